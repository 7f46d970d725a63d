"""``cifar10:PATH``: Caffe's Cifar10 quick CNN on CIFAR-10, with Caffe's solver.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; the model and solver are those of Caffe's
examples/cifar10 (5000 iterations of 100 images), and the experiment is the correctness test of Zhu, Liu, Fang (2020).
The data are read from PATH and never fetched: the folder that the published archive of the binary version unpacks to,
or the one above it. A record is a byte for the label and 3072 of an image: its red, green and blue planes of 32 x 32.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from syncline.errors import DataError, UsageError
from syncline.registry import register

from ._workload import Images, Workload, entropy

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

LEARNING_RATE = 0.001

PARTS = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
FOLDER = "cifar-10-batches-bin"
RECORD_BYTES = 3073
MOST_BYTES = 512 * 2**20
"""Larger files are refused before they fill the memory (the published ones have 31 MB)."""

Set = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images (n, 3, 32, 32) and their labels (n,)."""


@register("workloads", "cifar10", computes=True)
def cifar10(argument: str = "") -> Workload:
    """Caffe's Cifar10 quick CNN on CIFAR-10 read from a folder; the global batch is constant."""
    if not argument:
        raise UsageError("cifar10 needs the folder that holds the data: write 'cifar10:PATH'")
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
        loss=entropy,
        optimizer=_optimizer,
        schedule=_schedule,
    )


def read(path: str | Path) -> tuple[Set, Set]:
    """The training and test set. DataError names a missing, truncated or altered file."""
    path = Path(path).expanduser()
    if not path.exists():
        raise DataError(f"{path} does not exist: give the folder that holds CIFAR-10")
    if path.is_file():
        raise DataError(f"{path} is a file: unpack the archive, and give the folder that holds {PARTS[0]}.bin")
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    missing = [f"{part}.bin" for part in PARTS if not (folder / f"{part}.bin").is_file()]
    if len(missing) == len(PARTS):
        pickled = (folder / PARTS[0]).is_file() or (path / "cifar-10-batches-py").is_dir()
        found = "CIFAR-10 as pickles, which are not read" if pickled else "no CIFAR-10 data"
        raise DataError(
            f"{path} holds {found}: expected {PARTS[0]}.bin to {PARTS[4]}.bin and {PARTS[5]}.bin of the binary version "
            f"(cifar-10-binary.tar.gz, unpacked), there or in {FOLDER}"
        )
    if missing:
        raise DataError(f"{folder} is incomplete: {', '.join(missing)} missing; unpack or download the data again")
    *training, test = (_part(folder / f"{part}.bin") for part in PARTS)
    images, labels = zip(*training, strict=True)
    return (np.concatenate(images), np.concatenate(labels)), test


def _part(path: Path) -> Set:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise DataError(f"{path} has {size} bytes, more than {MOST_BYTES}: not CIFAR-10")
        data = np.fromfile(path, np.uint8)
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    if not data.size or data.size % RECORD_BYTES:
        whole = -(-max(data.size, 1) // RECORD_BYTES)
        raise DataError(
            f"{path} is truncated: {whole} records of {RECORD_BYTES} bytes are {whole * RECORD_BYTES} bytes, "
            f"found {data.size}"
        )
    records = data.reshape(-1, RECORD_BYTES)
    labels = records[:, 0].astype(np.int64)
    wrong = np.flatnonzero(labels > 9)
    if wrong.size:
        raise DataError(f"{path} is altered: image {wrong[0]} has label {labels[wrong[0]]}, the greatest is 9")
    return np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32), labels


def _build() -> nn.Module:
    from .models.networks import Cifar10Quick

    return Cifar10Quick()


def _optimizer(model: nn.Module) -> Optimizer:
    """SGD with momentum 0.9 and weight decay 0.004. Biases learn twice as fast as weights."""
    from torch.optim import SGD

    weights = [tensor for name, tensor in model.named_parameters() if not name.endswith("bias")]
    biases = [tensor for name, tensor in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "lr": LEARNING_RATE}, {"params": biases, "lr": 2 * LEARNING_RATE}]
    return SGD(groups, lr=LEARNING_RATE, momentum=0.9, weight_decay=0.004)


def _schedule(optimizer: Optimizer, steps: int) -> LRScheduler:
    """A tenth of the learning rate for the last fifth of the steps, like Caffe's 4000 steps and then 1000 more."""
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda step: 1.0 if 5 * step < 4 * steps else 0.1)
