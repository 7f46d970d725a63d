"""Iterables over the sample indices of this worker, epoch after epoch.

Workers that exchange in lockstep have fixed shares of equal size, as in PyTorch's DistributedSampler. Workers at their
own pace get their shares from a pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .order import MOST_EPOCHS, SampleOrder


class Shares(Protocol):
    """A worker's positions in an epoch's order."""

    @property
    def size(self) -> int | None:
        """Their number in an epoch; None if it is not known in advance."""
        ...

    def parts(self, epoch: int) -> Iterator[range | NDArray[np.int64]]:
        """Positions in the order of that epoch, as they become available."""
        ...


class Split:
    """A fixed share per worker, all of equal size (``SampleOrder.positions``)."""

    def __init__(self, order: SampleOrder, rank: int, world: int) -> None:
        self._order, self._rank, self._world = order, rank, world
        self.size = -(-order.samples // world)

    def parts(self, epoch: int) -> Iterator[NDArray[np.int64]]:  # noqa: ARG002 - all epochs have the same positions
        positions = self._order.positions(self._rank, self._world)
        step = self._order.batch_size or len(positions)
        return (positions[start : start + step] for start in range(0, len(positions), step))


class Sampler:
    """Indices for one worker; with a batch size, lists of them for ``DataLoader(dataset, batch_sampler=)``.

    Every iteration is the next epoch, in a new order if samples are shuffled; ``set_epoch`` selects another epoch, for
    example in a resumed run. ``len`` works for fixed shares; batches from a pool have no known number.
    """

    def __init__(self, order: SampleOrder, shares: Shares) -> None:
        self._order, self._shares = order, shares
        self._epoch = 0

    @property
    def pooled(self) -> bool:
        """Whether batches come from a pool, so that their number per worker is not known in advance."""
        return self._shares.size is None

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that epoch, counted from 0."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < MOST_EPOCHS:
            raise UsageError(f"set_epoch() takes a whole number from 0 to {MOST_EPOCHS - 1}, got {epoch!r}")
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._walk(epoch, self._shares.parts(epoch))

    def __len__(self) -> int:
        size = self._shares.size
        if size is None:
            raise TypeError(
                "a sampler from a pool has no length: how many batches a worker gets depends on how fast the others"
                " are; all workers together get those of the whole data set"
            )
        return size if self._order.batch_size is None else -(-size // self._order.batch_size)

    def _walk(self, epoch: int, parts: Iterator[range | NDArray[np.int64]]) -> Iterator[Any]:
        order = self._order.indices(epoch)
        for part in parts:
            found = order[part.start : part.stop] if isinstance(part, range) else order[part]
            if self._order.batch_size is None:
                yield from found.tolist()
            else:
                yield found.tolist()
