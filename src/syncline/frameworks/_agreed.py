"""Weights that workers agree on, or mix, as flat arrays of a host's memory: for frameworks without devices.

Whoever has weights and the buckets in which they travel, or their differences, lets ``put`` fill these, has them added
up, and calls ``take``. Does not know when, nor how anything travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..plans.check import check_mixing
from ..plans.messages import Program
from ..session.communicator import compiled
from ..sync import Agrees, Mixes, mixes_of
from ..sync._periodic import agree_in_blocks

Array = NDArray[Any]


class AgreedWeights:
    """``weights`` and ``differences`` are buckets of one model, laid out alike; it begins with the weights as they are.

    Of the sum that ``put`` and the exchange of all ``workers`` make, every worker gives its part.
    """

    def __init__(self, mode: Agrees, workers: int, weights: Sequence[Array], differences: Sequence[Array]) -> None:
        self._mode, self._workers, self._weights, self._differences = mode, workers, weights, differences
        self._pull = mode.pull(workers)
        self._agreed = [array.copy() for array in weights]
        self._memory = [np.zeros_like(array) if mode.remembers else None for array in weights]

    def forget(self) -> None:
        """Remember no differences of before; ``begin`` says what is agreed on."""
        for memory in self._memory:
            if memory is not None:
                memory[...] = 0

    def begin(self) -> None:
        """The weights, which are the same on all workers, are those that they agree on."""
        for agreed, weights in zip(self._agreed, self._weights, strict=True):
            agreed[...] = weights

    def put(self) -> None:
        """Let the buckets be this worker's part of the mean difference, and the weights give up what they have to."""
        for weights, agreed, difference in zip(self._weights, self._agreed, self._differences, strict=True):
            np.subtract(weights, agreed, out=difference)
            if self._pull < 1:
                weights -= difference * difference.dtype.type(self._pull)
            difference /= self._workers

    def take(self, step: int) -> None:  # noqa: ARG002
        """The sum of all parts has come, after that step: go on from what follows."""
        for mean, agreed, memory in zip(self._differences, self._agreed, self._memory, strict=True):
            agree_in_blocks(self._mode, agreed, mean, memory)
        if self._pull == 1:
            self._give()

    def put_own(self) -> bool:
        """Let the buckets be this worker's part of the final weights; False where the centre is that."""
        for weights, difference in zip(self._weights, self._differences, strict=True):
            np.divide(weights, self._workers, out=difference)
        return self._pull == 1

    def take_final(self) -> None:
        """Let the weights be the final ones, whose parts have been added up where that was to be."""
        if self._pull < 1:
            self._give()
            return
        for weights, mean in zip(self._weights, self._differences, strict=True):
            weights[...] = mean

    def saved(self) -> dict[str, list[Array]]:
        """What all workers have alike and a resumed run has to know, by bucket."""
        memory = [array.copy() for array in self._memory if array is not None]
        return {"agreed": [array.copy() for array in self._agreed], "memory": memory}

    def load(self, saved: Mapping[str, Sequence[Array]]) -> None:
        """Take it up; raises UsageError for that of another model or other buckets."""
        memory = [array for array in self._memory if array is not None]
        for mine, theirs in ((self._agreed, saved["agreed"]), (memory, saved["memory"])):
            if [(one.shape, one.dtype) for one in mine] != [(one.shape, one.dtype) for one in theirs]:
                raise UsageError("the agreed weights in this state are of another model or schedule")
            for array, value in zip(mine, theirs, strict=True):
                array[...] = value

    def _give(self) -> None:
        for weights, agreed in zip(self._weights, self._agreed, strict=True):
            weights[...] = agreed


class MixedWeights:
    """As ``AgreedWeights``, for weights that each worker averages with those of some others: nothing is agreed on.

    Raises PlanError for a mode whose plans do not bring what each has to everybody.
    """

    def __init__(self, mode: Mixes, workers: int, rank: int, weights: Sequence[Array], sums: Sequence[Array]) -> None:
        check_mixing(mixes_of(mode, workers))
        self._mode, self._workers, self._rank, self._weights, self._sums = mode, workers, rank, weights, sums

    def program(self, step: int) -> Program:
        """This worker's part in adding weights up after that step."""
        return compiled(self._mode.mix(self._workers, step), self._rank)

    def forget(self) -> None:
        """There is nothing to remember."""

    def begin(self) -> None:
        """Weights are what they are."""

    def put(self) -> None:
        """All of the weights: what is added up is divided afterwards."""
        for weights, total in zip(self._weights, self._sums, strict=True):
            total[...] = weights

    def take(self, step: int) -> None:
        """The weights are the mean of the sum."""
        parts = len(self._mode.mix(self._workers, step).sums[self._rank])
        for weights, total in zip(self._weights, self._sums, strict=True):
            np.divide(total, parts, out=weights)

    def put_own(self) -> bool:
        """This worker's part of the mean of all."""
        for weights, total in zip(self._weights, self._sums, strict=True):
            np.divide(weights, self._workers, out=total)
        return True

    def take_final(self) -> None:
        """The mean has come."""
        for weights, total in zip(self._weights, self._sums, strict=True):
            weights[...] = total

    def saved(self) -> dict[str, list[Array]]:
        """Workers have nothing alike."""
        return {}

    def load(self, saved: Mapping[str, Sequence[Array]]) -> None:
        """There is nothing to take up."""
