"""``digits``: a small CNN for scikit-learn's handwritten digits, real images that ship with that package.

1797 images of 8x8 pixels with values 0 to 16 (Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI
1998). The split is fixed: 36 images of every class are the test set (360); the other 1437 are for training. The global
batch is constant, whatever the number of workers, so that all of them train the same model.

The recipe makes the result insensitive to rounding: no dropout, no batch normalization, and the learning rate of
``_solver``. It exists as a blueprint beside its PyTorch model, so that any framework can train it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from syncline.errors import UsageError
from syncline.registry import register

from ._blueprint import Blueprint, Convolution, Dense, Flatten, MaxPooling, Relu
from ._solver import rate_factor, warm_cosine
from ._workload import Images, Workload, entropy

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

TEST_PER_CLASS = 36
SPLIT_SEED = 1797
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.05, 0.9, 1e-3
HIDDEN = 128
MOST_HIDDEN = 1 << 20


@register("workloads", "digits", computes=True)
def digits(argument: str = "", *, hidden: int = HIDDEN) -> Workload:
    """A small CNN on scikit-learn's 1797 handwritten digits; the global batch is constant.

    It has 18,826 + 1,035 ``hidden`` parameters, so with ``hidden=9648`` ten million, and learns the slower the wider.
    """
    if argument:
        raise UsageError(f"digits takes no argument, got {argument!r}: write 'digits'")
    if not 2 <= hidden <= MOST_HIDDEN:
        raise UsageError(f"hidden must be a number of neurons from 2 to {MOST_HIDDEN:,}, got {hidden}")
    train, test = _split(*_read())
    return Workload(
        name="digits",
        batch=64,
        global_batch=True,
        epochs=12,
        train=train,
        test=test,
        build=lambda: _build(hidden),
        loss=entropy,
        optimizer=lambda model: _optimizer(model, _rate(hidden)),
        schedule=warm_cosine,
        blueprint=blueprint(hidden),
    )


def blueprint(hidden: int = HIDDEN) -> Blueprint:
    """The network and its solver as data."""
    convolutions = Convolution(1, 32), Relu(), Convolution(32, 64), Relu(), MaxPooling()
    dense = Flatten(), Dense(1024, hidden), Relu(), Dense(hidden, 10)
    return Blueprint(
        (1, 8, 8),
        (*convolutions, *dense),
        MOMENTUM,
        WEIGHT_DECAY,
        lambda steps: tuple(_rate(hidden) * rate_factor(step, steps) for step in range(steps)),
    )


def _rate(hidden: int) -> float:
    """The learning rate, lower for wide networks: a step's effect on the scores grows with the number of neurons."""
    return LEARNING_RATE * min(1.0, HIDDEN / hidden)


def _read() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Pixels and labels, read directly from scikit-learn's data file, because importing the package takes a second."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise UsageError("digits come with scikit-learn: install it with pip install 'syncline[workloads]'")
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        table = np.loadtxt(path, np.float32, delimiter=",")
        pixels, labels = table[:, :-1], table[:, -1]
    else:  # a version that stores it elsewhere
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
    return pixels.astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int64)


def _split(pixels: NDArray[np.float32], labels: NDArray[np.int64]) -> tuple[Images, Images]:
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    by_class = [order[labels[order] == digit] for digit in range(10)]
    test = np.sort(np.concatenate([found[:TEST_PER_CLASS] for found in by_class]))
    train = np.sort(np.concatenate([found[TEST_PER_CLASS:] for found in by_class]))
    mean = np.asarray(pixels[train].mean(), dtype=np.float32)
    scale = float(1 / pixels[train].std())
    return Images(pixels[train], labels[train], mean, scale), Images(pixels[test], labels[test], mean, scale)


def _build(hidden: int) -> nn.Module:
    from .models.networks import DigitsCNN

    return DigitsCNN(hidden)


def _optimizer(model: nn.Module, rate: float) -> Optimizer:
    from torch.optim import SGD

    return SGD(model.parameters(), lr=rate, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
