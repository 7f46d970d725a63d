"""The pool that asynchronous workers take their batches from: each request gets the next piece of the epoch.

It is a pure state machine. Every position of an epoch is handed out once, to whichever worker asks. A slow worker thus
does fewer batches and delays no one, and an epoch ends for all workers when nothing of it is left. Positions that were
handed out count as done: a worker that leaves returns nothing. Workers may be in different epochs and only move
forward. An epoch that all workers have passed is forgotten.
"""

from __future__ import annotations

from .order import MOST_EPOCHS

MOST_OPEN = 1 << 12
"""The most epochs that may be open at once."""


class Pool:
    """Positions 0 to ``samples`` of every epoch, in pieces of ``piece``, for ``workers`` workers."""

    def __init__(self, samples: int, piece: int, workers: int) -> None:
        self._samples, self._piece = samples, piece
        self._at = dict.fromkeys(range(workers), -1)  # the epoch of each worker that has not left
        self._taken: dict[int, int] = {}  # the number of samples handed out per epoch

    @property
    def over(self) -> bool:
        """Whether all workers have left."""
        return not self._at

    def take(self, worker: int, epoch: int) -> range:
        """A worker's next piece of an epoch, empty when nothing is left. ValueError for an invalid request."""
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
        """Record that a worker makes no more requests. ValueError if it has left already."""
        if worker not in self._at:
            raise ValueError("it has left before")
        del self._at[worker]
        self._forget()

    def _forget(self) -> None:
        """Drop the epochs that all workers have passed."""
        least = min(self._at.values(), default=MOST_EPOCHS)
        for epoch in [epoch for epoch in self._taken if epoch < least]:
            del self._taken[epoch]
