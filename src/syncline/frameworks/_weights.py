"""What a framework without hooks has to do for one model: its side of the steps of flat arrays.

Where its weights travel, workers exchange copies of them in the transport's memory (``HeldWeights``). Owners of
weights have its optimizer on slices of them (``OnHoldings``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..serving.records import Elements, State
from ..serving.shard import Groups, Holding
from ..sync._periodic import BLOCK_ELEMENTS
from ..training.memory import Blocks
from ..training.weights import Values

Array = NDArray[Any]


class Weights(Protocol):
    """A framework's side of one model; flat arrays are in the order of its tensors, and contiguous."""

    def read(self, into: Sequence[Array]) -> None:
        """Copy the framework's weights into flat arrays."""
        ...

    def write(self, values: Sequence[Array]) -> None:
        """Let the framework's weights be these."""
        ...

    def update(self, gradients: Sequence[Array]) -> None:
        """Update the framework's weights with these gradients, by its optimizer, which may overwrite them."""
        ...

    def values(self) -> Groups:
        """What the optimizer is set to, as owners of weights are told it."""
        ...

    def kept(self) -> list[State]:
        """What the optimizer keeps of each tensor, elements flat, which may be its own memory."""
        ...

    def keep(self, states: Sequence[State]) -> None:
        """Replace that."""
        ...


class HeldWeights:
    """A framework's weights as ``training.weights`` computes with them: ``held`` are copies, ``travelling`` buckets."""

    sums_differences = False

    def __init__(self, weights: Weights, held: Blocks, travelling: Blocks, workers: int) -> None:
        self._weights, self._held, self._travelling, self._workers = weights, held, travelling, workers

    @property
    def buckets(self) -> Values:
        """Those themselves: tensors are told apart by the framework alone."""
        return Values(self._travelling.arrays, self._travelling.arrays)

    def zeros(self) -> Values:
        """In memory of the host."""
        arrays = [np.zeros_like(array) for array in self._held.arrays]
        return Values(arrays, arrays)

    def read(self, into: Values) -> None:
        """By way of the copies."""
        self._weights.read(self._held.flat)
        for array, mine in zip(into.blocks, self._held.arrays, strict=True):
            array[...] = mine

    def write(self, values: Values) -> None:
        """The same."""
        for mine, array in zip(self._held.arrays, values.blocks, strict=True):
            mine[...] = array
        self._weights.write(self._held.flat)

    def subtract(self, values: Values) -> None:
        """From the copies as they are now."""
        self._weights.read(self._held.flat)
        for bucket, mine, array in zip(self._travelling.arrays, self._held.arrays, values.blocks, strict=True):
            np.subtract(mine, array, out=bucket)

    def give_up(self, part: float) -> None:
        """Behind ``subtract``, so that the copies are the weights."""
        for mine, bucket in zip(self._held.arrays, self._travelling.arrays, strict=True):
            mine -= bucket * bucket.dtype.type(part)
        self._weights.write(self._held.flat)

    def share_out(self, weight: float) -> None:  # noqa: ARG002
        """All workers count alike."""
        for bucket in self._travelling.arrays:
            bucket /= self._workers

    def bytes_of(self, block: Array) -> Array:
        """Where they lie."""
        return block.view(np.uint8)

    def at_once(self, block: Array) -> int:  # noqa: ARG002
        """A cache's worth."""
        return BLOCK_ELEMENTS

    def add_up(self, add: Callable[[Array], None]) -> None:
        """They lie there."""
        for bucket in self._travelling.arrays:
            add(bucket)

    def saved(self, values: Values) -> list[Array]:
        """By bucket."""
        return [array.copy() for array in values.blocks]

    def load(self, values: Values, saved: Sequence[Array]) -> None:
        """Also of other buckets nothing is taken."""
        if [(one.shape, one.dtype) for one in values.blocks] != [(one.shape, one.dtype) for one in saved]:
            raise UsageError("the agreed weights in this state are of another model or schedule")
        for mine, value in zip(values.blocks, saved, strict=True):
            mine[...] = value


class OnHoldings:
    """What a framework's optimizer has in common with others on the slices that this process owns."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self._holdings = holdings

    def squared_norm(self) -> float:
        """In float64."""
        return float(sum(np.square(held.gradient, dtype=np.float64).sum() for held in self._holdings))

    def advanced(self) -> Groups:
        """Nothing: such an optimizer is refused before."""
        return []


def flat_elements(array: Array) -> Elements:
    """A contiguous array that an optimizer keeps, as owners tell it: flat, but for what has no dimensions."""
    return Elements.of(array.reshape(-1) if array.ndim else array)
