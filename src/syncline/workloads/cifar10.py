"""``cifar10:PATH``: Caffe's Cifar10 quick CNN on CIFAR-10, with Caffe's solver.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; the model and solver are those of Caffe's
examples/cifar10 (5000 iterations of 100 images), and the experiment is the correctness test of Zhu, Liu, Fang (2020).
The data are read from PATH by ``_cifar10_reader`` and never fetched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import UsageError
from ..registry import register
from ._cifar10_reader import read
from ._workload import Images, Workload

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

LEARNING_RATE = 0.001


@register("workloads", "cifar10", computes=True)
def cifar10(argument: str = "") -> Workload:
    """Caffe's Cifar10 quick CNN on CIFAR-10 read from a folder or archive; the global batch is constant."""
    if not argument:
        raise UsageError("cifar10 needs the folder or archive that holds the data: write 'cifar10:PATH'")
    (pixels, labels), (test_pixels, test_labels) = read(argument)
    mean = pixels.mean(axis=0, dtype=np.float64).astype(np.float32)
    return Workload(
        name=f"cifar10:{argument}",
        batch=100,
        global_batch=True,
        epochs=10,
        train=Images(pixels, labels, mean),
        test=Images(test_pixels, test_labels, mean),
        build=_build,
        loss=_loss,
        optimizer=_optimizer,
        schedule=_schedule,
    )


def _build() -> nn.Module:
    from .models.cifar10_quick import Cifar10Quick

    return Cifar10Quick()


def _loss(output: Tensor, target: Tensor) -> Tensor:
    from torch.nn.functional import cross_entropy

    return cross_entropy(output, target)


def _optimizer(model: nn.Module) -> Optimizer:
    """SGD with momentum 0.9 and weight decay 0.004; biases learn twice as fast as weights."""
    from torch.optim import SGD

    weights = [tensor for name, tensor in model.named_parameters() if not name.endswith("bias")]
    biases = [tensor for name, tensor in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "lr": LEARNING_RATE}, {"params": biases, "lr": 2 * LEARNING_RATE}]
    return SGD(groups, lr=LEARNING_RATE, momentum=0.9, weight_decay=0.004)


def _schedule(optimizer: Optimizer, steps: int) -> LRScheduler:
    """A tenth of the learning rate for the last fifth of the steps, as Caffe's 4000 steps and then 1000 more."""
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda step: 1.0 if 5 * step < 4 * steps else 0.1)
