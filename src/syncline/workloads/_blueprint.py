"""A network and its solver as data, from which any framework can build them, and the weights that all begin with.

Owns the few layers that such a network may have, what its tensors are called, and the solver's learning rates; knows no
framework. PyTorch draws initial weights from its own generator, and a run of another framework imports no PyTorch: so
the same draws are made here by NumPy, which has the same generator (the Mersenne twister), with PyTorch's way from its
bits to normal numbers (Box and Muller, "A note on the generation of random normal deviates", 1958, sixteen at a time).
They agree but for the last bit, since logarithm and cosine are rounded differently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]
_BLOCK = 16


@dataclass(frozen=True)
class Convolution:
    """Square kernels of an odd side over images, as many as ``outputs``, padded so that images keep their size."""

    inputs: int
    outputs: int
    side: int = 3

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight: outputs, inputs, height, width."""
        return self.outputs, self.inputs, self.side, self.side


@dataclass(frozen=True)
class Dense:
    """Every output from every input."""

    inputs: int
    outputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight: outputs, inputs."""
        return self.outputs, self.inputs


@dataclass(frozen=True)
class Relu:
    """What is below 0 becomes 0."""


@dataclass(frozen=True)
class MaxPooling:
    """The largest of every square of this side."""

    side: int = 2


@dataclass(frozen=True)
class Flatten:
    """An image as one row: channels, then height, then width."""


Layer = Convolution | Dense | Relu | MaxPooling | Flatten


@dataclass(frozen=True)
class Blueprint:
    """Layers one behind the other under the mean cross entropy of their softmax, trained by SGD with momentum.

    v <- momentum v + (g + weight_decay w); w <- w - rate v, with ``rates(steps)`` the learning rate of every step.
    Layers are named by their places; those with weights have a ``weight`` and a ``bias``. ``image`` is (channels,
    height, width).
    """

    image: tuple[int, int, int]
    layers: tuple[Layer, ...]
    momentum: float
    weight_decay: float
    rates: Callable[[int], tuple[float, ...]]

    @property
    def weighted(self) -> dict[str, Convolution | Dense]:
        """The layers that have weights, by name, in forward order."""
        return {str(place): one for place, one in enumerate(self.layers) if isinstance(one, Convolution | Dense)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, in forward order."""
        found: dict[str, tuple[int, ...]] = {}
        for name, layer in self.weighted.items():
            found |= {f"{name}.weight": layer.shape, f"{name}.bias": (layer.outputs,)}
        return found

    def start(self, seed: int) -> Weights:
        """PyTorch's draws of that seed: weights of variance 2 / fan-in (He et al., ICCV 2015), and biases of 0."""
        bits = np.random.RandomState(seed & 0xFFFFFFFF)
        # Its layers fill themselves when they are made, before they are filled anew.
        _uniform(bits, sum(map(prod, self.shapes.values())))
        found: Weights = {}
        for name, shape in self.shapes.items():
            if name.endswith("bias"):
                found[name] = np.zeros(shape, np.float32)
            else:
                found[name] = _normal(bits, prod(shape), sqrt(2 / prod(shape[1:]))).reshape(shape)
        return found


def _normal(bits: np.random.RandomState, count: int, std: float) -> NDArray[np.float32]:
    """So many normal numbers, 16 or more; where they are no multiple of 16 the last 16 are drawn anew."""
    assert count >= _BLOCK
    found = np.empty(count, np.float32)
    drawn = _uniform(bits, count)
    whole = count // _BLOCK * _BLOCK
    found[:whole] = _box_muller(drawn[:whole], std)
    if whole < count:
        found[-_BLOCK:] = _box_muller(_uniform(bits, _BLOCK), std)
    return found


def _uniform(bits: np.random.RandomState, count: int) -> NDArray[np.float32]:
    """From 0 to 1, of 24 bits each."""
    return (np.frombuffer(bits.bytes(4 * count), "<u4") & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)


def _box_muller(drawn: NDArray[np.float32], std: float) -> NDArray[np.float32]:
    halves = drawn.reshape(-1, 2, _BLOCK // 2)
    radius = np.sqrt(np.float32(-2) * np.log(1 - halves[:, 0])) * np.float32(std)
    angle = np.float32(2 * np.pi) * halves[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
