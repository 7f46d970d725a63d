"""The interface of a framework without hooks to the steps of ``_flat``: one model's weights and optimizer.

If weights are exchanged, workers exchange copies of them in the transport's memory (``HeldWeights``). Owners of weights
run the framework's optimizer on slices (``OnHoldings``).
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
    """A framework's side of one model. Flat arrays are contiguous and in the order of its tensors."""

    def read(self, into: Sequence[Array]) -> None:
        """Copy the framework's weights into flat arrays."""
        ...

    def write(self, values: Sequence[Array]) -> None:
        """Replace the framework's weights by these."""
        ...

    def update(self, gradients: Sequence[Array]) -> None:
        """Update the framework's weights with these gradients, which the optimizer may overwrite."""
        ...

    def values(self) -> Groups:
        """The settings of the optimizer, in the form for owners of weights."""
        ...

    def kept(self) -> list[State]:
        """The optimizer's state of each tensor, with flat elements. It may share the optimizer's memory."""
        ...

    def keep(self, states: Sequence[State]) -> None:
        """Replace the optimizer's state of each tensor."""
        ...


class HeldWeights:
    """The ``WeightMemory`` of a framework's weights: ``held`` are copies of them, ``travelling`` the buckets for
    exchanges."""

    sums_differences = False

    def __init__(self, weights: Weights, held: Blocks, travelling: Blocks, workers: int) -> None:
        self._weights, self._held, self._travelling, self._workers = weights, held, travelling, workers

    @property
    def buckets(self) -> Values:
        """The blocks themselves: only the framework separates tensors."""
        return Values(self._travelling.arrays, self._travelling.arrays)

    def zeros(self) -> Values:
        arrays = [np.zeros_like(array) for array in self._held.arrays]
        return Values(arrays, arrays)

    def read(self, into: Values) -> None:
        """Through the copies."""
        self._weights.read(self._held.flat)
        for array, mine in zip(into.blocks, self._held.arrays, strict=True):
            array[...] = mine

    def write(self, values: Values) -> None:
        """Through the copies."""
        for mine, array in zip(self._held.arrays, values.blocks, strict=True):
            mine[...] = array
        self._weights.write(self._held.flat)

    def subtract(self, values: Values) -> None:
        """From the copies, which are refreshed first."""
        self._weights.read(self._held.flat)
        for bucket, mine, array in zip(self._travelling.arrays, self._held.arrays, values.blocks, strict=True):
            np.subtract(mine, array, out=bucket)

    def give_up(self, part: float) -> None:
        """Only after ``subtract``, which has refreshed the copies."""
        for mine, bucket in zip(self._held.arrays, self._travelling.arrays, strict=True):
            mine -= bucket * bucket.dtype.type(part)
        self._weights.write(self._held.flat)

    def share_out(self, weight: float) -> None:  # noqa: ARG002
        """All workers have the same weight."""
        for bucket in self._travelling.arrays:
            bucket /= self._workers

    def bytes_of(self, block: Array) -> Array:
        return block.view(np.uint8)

    def at_once(self, block: Array) -> int:  # noqa: ARG002
        """A block that fits the cache."""
        return BLOCK_ELEMENTS

    def add_up(self, add: Callable[[Array], None]) -> None:
        for bucket in self._travelling.arrays:
            add(bucket)

    def saved(self, values: Values) -> list[Array]:
        return [array.copy() for array in values.blocks]

    def load(self, values: Values, saved: Sequence[Array]) -> None:
        """Raises UsageError for other buckets, before anything is written."""
        if [(one.shape, one.dtype) for one in values.blocks] != [(one.shape, one.dtype) for one in saved]:
            raise UsageError("the agreed weights in this state are of another model or schedule")
        for mine, value in zip(values.blocks, saved, strict=True):
            mine[...] = value


class OnHoldings:
    """The common part of the frameworks' optimizers on the slices that this process owns."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self._holdings = holdings

    def squared_norm(self) -> float:
        return float(sum(np.square(held.gradient, dtype=np.float64).sum() for held in self._holdings))

    def advanced(self) -> Groups:
        """Nothing: optimizers that change their own settings are refused before."""
        return []


def flat_elements(array: Array) -> Elements:
    """A contiguous array of an optimizer's state as sent to and from owners: flat, unless it has no dimensions."""
    return Elements.of(array.reshape(-1) if array.ndim else array)
