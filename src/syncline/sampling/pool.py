"""The pool that an asynchronous run takes its batches from: who comes first gets the next piece of the epoch.

A pure state machine. Every position of an epoch is handed out once, to whichever worker asks; so a slow worker does
fewer batches, nobody waits for it, and an epoch is over for all when nothing of it is left. What was handed out counts
as done: a worker that leaves gives nothing back. Workers may be in different epochs, each going only forward; an epoch
that all of them have passed is forgotten.
"""

from __future__ import annotations

from .order import MOST_EPOCHS

MOST_OPEN = 1 << 12
"""As many epochs may some workers be ahead of others."""


class Pool:
    """Positions 0 to ``samples`` of every epoch, in pieces of ``piece``, for so many workers."""

    def __init__(self, samples: int, piece: int, workers: int) -> None:
        self._samples, self._piece = samples, piece
        self._at = dict.fromkeys(range(workers), -1)  # the epoch of each worker that has not left
        self._taken: dict[int, int] = {}  # how much of an epoch has been handed out

    @property
    def over(self) -> bool:
        """Whether all workers have left."""
        return not self._at

    def take(self, worker: int, epoch: int) -> range:
        """The next piece of an epoch for a worker, empty when nothing is left; ValueError where it may not ask."""
        if worker not in self._at:
            raise ValueError("it has left")
        if not self._at[worker] <= epoch < MOST_EPOCHS:
            raise ValueError(f"it asks for epoch {epoch} behind epoch {self._at[worker]}")
        if epoch not in self._taken and len(self._taken) == MOST_OPEN:
            raise ValueError(f"it begins epoch {epoch} while {MOST_OPEN} are under way")
        self._at[worker] = epoch
        start = self._taken.get(epoch, 0)
        stop = self._taken[epoch] = min(start + self._piece, self._samples)
        self._forget()
        return range(start, stop)

    def leave(self, worker: int) -> None:
        """A worker asks no more; ValueError for one that has said so before."""
        if worker not in self._at:
            raise ValueError("it has left before")
        del self._at[worker]
        self._forget()

    def _forget(self) -> None:
        """Drop the epochs that nobody may ask for any more."""
        least = min(self._at.values(), default=MOST_EPOCHS)
        for epoch in [epoch for epoch in self._taken if epoch < least]:
            del self._taken[epoch]
