"""A network and its solver as data, from which any framework can build them, with common initial weights.

It defines the few layers that such a network may have, the names of its tensors, and the learning rates; it knows no
framework. PyTorch draws initial weights from its own generator, but runs of other frameworks do not import PyTorch.
NumPy therefore makes the same draws here: it has the same generator (the Mersenne twister), and PyTorch's conversion of
bits to normal numbers is reimplemented (Box and Muller, "A note on the generation of random normal deviates", 1958,
sixteen at a time). They agree except for the last bit, because logarithm and cosine are rounded differently.
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
    """``outputs`` square kernels of an odd side over images, padded so that images keep their size."""

    inputs: int
    outputs: int
    side: int = 3

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight: outputs, inputs, height, width."""
        return self.outputs, self.inputs, self.side, self.side


@dataclass(frozen=True)
class Dense:
    """A fully connected layer."""

    inputs: int
    outputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight: outputs, inputs."""
        return self.outputs, self.inputs


@dataclass(frozen=True)
class Relu:
    """Replaces values below 0 by 0."""


@dataclass(frozen=True)
class MaxPooling:
    """The maximum of every square of this side."""

    side: int = 2


@dataclass(frozen=True)
class Flatten:
    """An image as one row: channels, then height, then width."""


Layer = Convolution | Dense | Relu | MaxPooling | Flatten


@dataclass(frozen=True)
class Blueprint:
    """Layers in sequence under the mean cross entropy of their softmax, trained by SGD with momentum.

    v <- momentum v + (g + weight_decay w); w <- w - rate v, with ``rates(steps)`` the learning rate of every step.
    Layers are named by their positions; those with weights have a ``weight`` and a ``bias``. ``image`` is (channels,
    height, width).
    """

    image: tuple[int, int, int]
    layers: tuple[Layer, ...]
    momentum: float
    weight_decay: float
    rates: Callable[[int], tuple[float, ...]]

    @property
    def weighted(self) -> dict[str, Convolution | Dense]:
        """The layers with weights, by name, in forward order."""
        return {str(place): one for place, one in enumerate(self.layers) if isinstance(one, Convolution | Dense)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, in forward order."""
        found: dict[str, tuple[int, ...]] = {}
        for name, layer in self.weighted.items():
            found |= {f"{name}.weight": layer.shape, f"{name}.bias": (layer.outputs,)}
        return found

    def start(self, seed: int) -> Weights:
        """PyTorch's initial values for that seed: weights of variance 2 / fan-in (He et al., ICCV 2015), and biases of
        0."""
        bits = np.random.RandomState(seed & 0xFFFFFFFF)
        # PyTorch's layers draw once in their constructors, before the model draws again.
        _uniform(bits, sum(map(prod, self.shapes.values())))
        found: Weights = {}
        for name, shape in self.shapes.items():
            if name.endswith("bias"):
                found[name] = np.zeros(shape, np.float32)
            else:
                found[name] = _normal(bits, prod(shape), sqrt(2 / prod(shape[1:]))).reshape(shape)
        return found


def _normal(bits: np.random.RandomState, count: int, std: float) -> NDArray[np.float32]:
    """Normal numbers, 16 or more. If the count is not a multiple of 16, the last 16 are drawn again."""
    assert count >= _BLOCK
    found = np.empty(count, np.float32)
    drawn = _uniform(bits, count)
    whole = count // _BLOCK * _BLOCK
    found[:whole] = _box_muller(drawn[:whole], std)
    if whole < count:
        found[-_BLOCK:] = _box_muller(_uniform(bits, _BLOCK), std)
    return found


def _uniform(bits: np.random.RandomState, count: int) -> NDArray[np.float32]:
    """Uniform numbers from 0 to 1, with 24 bits each."""
    return (np.frombuffer(bits.bytes(4 * count), "<u4") & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)


def _box_muller(drawn: NDArray[np.float32], std: float) -> NDArray[np.float32]:
    halves = drawn.reshape(-1, 2, _BLOCK // 2)
    radius = np.sqrt(np.float32(-2) * np.log(1 - halves[:, 0])) * np.float32(std)
    angle = np.float32(2 * np.pi) * halves[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
