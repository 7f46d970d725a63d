"""``synthetic:NETWORK``: random images of ImageNet's shape, for measuring speed without the data set.

The images are generated once, the same on every rank, and repeated to fill an epoch; the work of a step does not depend
on their content. Every worker has the same batch whatever their number, as in the scaling experiments of Shi and Chu
(arXiv 1711.05979) and of Zhu, Liu, Fang (2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np

from syncline.errors import UsageError
from syncline.registry import register

from ._workload import Images, Workload, entropy

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

IMAGES = 32
"""Distinct images in memory (5 MB), enough to exceed a core's cache."""
EPOCH_IMAGES = 1024
CLASSES = 1000
DATA_SEED = 20120930
CHANNEL_MEANS = (104.0, 117.0, 123.0)
"""ImageNet's channel means (blue, green, red) as Caffe subtracts them."""


@dataclass(frozen=True)
class _Network:
    """The network's parameters: side of the image, batch per worker, learning rate, weight decay."""

    side: int
    batch: int
    learning_rate: float
    weight_decay: float


_NETWORKS = {
    "alexnet": _Network(227, 16, 0.01, 0.0005),
    "googlenet": _Network(224, 8, 0.01, 0.0002),
    "googlenet_aux": _Network(224, 8, 0.01, 0.0002),
    "resnet50": _Network(224, 4, 0.01, 0.0001),
}


@register("workloads", "synthetic", computes=True)
def synthetic(argument: str = "") -> Workload:
    """AlexNet, GoogLeNet (also with auxiliary heads) or ResNet-50 on random images; the batch per worker is fixed."""
    network = _NETWORKS.get(argument)
    if network is None:
        near = get_close_matches(argument, _NETWORKS, n=1)
        hint = f"did you mean 'synthetic:{near[0]}'?" if near else f"choose one of {', '.join(_NETWORKS)}"
        raise UsageError(f"synthetic has no network {argument!r}: {hint}")
    return Workload(
        name=f"synthetic:{argument}",
        batch=network.batch,
        global_batch=False,
        epochs=1,
        train=_images(network.side),
        test=None,
        build=lambda: _build(argument),
        loss=_loss,
        optimizer=lambda model: _optimizer(model, network),
        schedule=lambda _, __: None,
    )


def _images(side: int) -> Images:
    random = np.random.default_rng(DATA_SEED)
    pixels = random.integers(0, 256, (IMAGES, 3, side, side), dtype=np.uint8)
    mean = np.array(CHANNEL_MEANS, dtype=np.float32).reshape(3, 1, 1)
    return Images(pixels, random.integers(0, CLASSES, IMAGES), mean, repeats=EPOCH_IMAGES // IMAGES)


def _build(name: str) -> nn.Module:
    from .models.networks import IMAGENET

    return IMAGENET[name]()


def _loss(output: Any, target: Tensor) -> Tensor:
    """Cross entropy of the scores. Auxiliary classifiers, if any, count 0.3 each."""
    if not isinstance(output, tuple):
        return entropy(output, target)
    from .models.networks import AUXILIARY_WEIGHT

    scores, *auxiliary = output
    return entropy(scores, target) + AUXILIARY_WEIGHT * sum(entropy(each, target) for each in auxiliary)


def _optimizer(model: nn.Module, network: _Network) -> Optimizer:
    from torch.optim import SGD

    return SGD(model.parameters(), lr=network.learning_rate, momentum=0.9, weight_decay=network.weight_decay)
