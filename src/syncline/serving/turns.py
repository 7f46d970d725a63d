"""Each push is in the weights once, though processes are lost: for owners to which workers push at their own pace.

A push carries the samples of its gradients, and an owner counts them together with the update: ``Account``. After a
loss the pool of batches hands out what no account has (``sampling``), so a sample is used once, whoever had it in hand.

With several owners a loss may come between the updates of a push at two of them. So ``Turns`` gives all owners the same
order: the first owner gives a push its turn once every owner has it, and they all take it then.

    worker        owner 0, the first         owner 1
    push  ------> holds it
          ----------------------------------> holds it
                            <---------------- "I hold it"
                  its turn: update ---------> its turn: update
          <------ weights
          <---------------------------------- weights

After a loss the owners that are left have taken the same turns up to a point, which may differ by the last turns. They
hold the pushes of these, and take them too (``Turns.missing``). A push that nobody has taken is dropped, and its
samples are used again. A worker goes on once all owners have answered; no such push is dropped, unless it is a late one
that waits for its update with backup workers.

Theory: total order broadcast by a fixed sequencer, with stability before delivery (Défago, Schiper and Urbán, "Total
order broadcast and multicast algorithms", ACM Computing Surveys 36(4), 2004).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .protocol import ALL, Action, Add, Apply

SAMPLES = "samples"
"""The name of a push's samples among its values: an epoch, and the first and last position in its order."""

Counted = Sequence[tuple[int, int, int]]
"""Samples as epochs, with the first position in the epoch's order and the one after the last."""


class Account:
    """The samples of all pushes that are in the weights."""

    def __init__(self, counted: Counted = ()) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}  # by epoch: ascending, and not adjacent
        self._added: list[Sequence[int]] = []  # the samples of pushes that the next update contains
        for epoch, start, stop in counted:
            self.count(epoch, start, stop)

    def note(self, action: Action) -> None:
        """Count what an action of the protocol puts into the weights. ValueError for samples that are there already."""
        if isinstance(action, Add):
            self._added += _samples_of(action)
        elif isinstance(action, Apply):
            samples, self._added = (self._added, []) if action.worker == ALL else (_samples_of(action), self._added)
            for epoch, start, stop in samples:
                self.count(epoch, start, stop)

    def count(self, epoch: int, start: int, stop: int) -> None:
        """Count a range of samples. ValueError if it is empty, or some of it was counted before."""
        ranges = self._ranges.setdefault(epoch, [])
        at = bisect_left(ranges, (start, stop))
        before = ranges[at - 1] if at else (-1, -1)
        after = ranges[at] if at < len(ranges) else (stop + 1, stop + 1)
        if not 0 <= start < stop or before[1] > start or after[0] < stop:
            raise ValueError(f"samples {start} to {stop} of epoch {epoch} are no range, or in the weights already")
        first = at - (before[1] == start)
        last = at + (after[0] == stop)
        ranges[first:last] = [(before[0] if first < at else start, after[1] if last > at else stop)]

    def has(self, epoch: int, part: range) -> bool:
        """Whether all of a range was counted."""
        return any(start <= part.start and part.stop <= stop for start, stop in self._ranges.get(epoch, ()))

    def left(self, epoch: int, samples: int) -> list[range]:
        """The missing ranges of an epoch of that many samples, in order."""
        edges = [0, *(edge for pair in self._ranges.get(epoch, ()) for edge in pair), samples]
        return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]

    def first_left(self, epoch: int, samples: int) -> int:
        """The first epoch, from this one on, of which something is missing."""
        while epoch in self._ranges and not self.left(epoch, samples):
            epoch += 1
        return epoch

    @property
    def counted(self) -> Counted:
        """All samples, for another account."""
        return [(epoch, *pair) for epoch, ranges in sorted(self._ranges.items()) for pair in ranges]


@dataclass(frozen=True)
class Tell:
    """Tell another owner of a worker's message: the first owner that this one holds it, or the others its turn."""

    to: int
    worker: int


@dataclass(frozen=True)
class Take:
    """It is the turn of a worker's message: handle it."""

    worker: int


class Turns:
    """The order in which the ``owners`` handle messages, as the owner ``me`` knows it. The first of them decides it.

    A worker sends its next message only after all owners have taken the one before.
    """

    def __init__(self, me: int, owners: Sequence[int], workers: int) -> None:
        self._me, self._first = me, owners[0]
        self.others = tuple(owner for owner in owners if owner != me)
        self._holders: dict[int, set[int]] = {}  # of the first owner: who holds the message of each worker
        self.taken = 0
        """The number of turns so far."""
        self._recent: deque[int] = deque(maxlen=workers)

    @property
    def heard(self) -> Sequence[int]:
        """The owners that tell this one of messages."""
        return self.others if self._me == self._first else (self._first,)

    @property
    def recent(self) -> list[int]:
        """The workers of the last turns. Another owner is behind by at most one turn of each worker."""
        return list(self._recent)

    def hold(self, worker: int) -> list[Tell | Take]:
        """This owner has the whole message of a worker."""
        return self._held_by(self._me, worker) if self._me == self._first else [Tell(self._first, worker)]

    def hear(self, owner: int, worker: int) -> list[Tell | Take]:
        """Another owner has told of a worker's message. ValueError if it has said so before."""
        return self._held_by(owner, worker) if self._me == self._first else [Take(worker)]

    def _held_by(self, owner: int, worker: int) -> list[Tell | Take]:
        holders = self._holders.setdefault(worker, set())
        if owner in holders:
            raise ValueError(f"it has the message of worker {worker} twice")
        holders.add(owner)
        if len(holders) <= len(self.others):
            return []
        del self._holders[worker]
        return [*(Tell(other, worker) for other in self.others), Take(worker)]

    def take(self, worker: int) -> None:
        """Note that this owner handles the message whose turn it is."""
        self.taken += 1
        self._recent.append(worker)

    def missing(self, taken: int, recent: Sequence[int]) -> list[int]:
        """The workers of the turns that another owner has taken, ``taken`` in all, and this one has not."""
        behind = max(0, taken - self.taken)
        if behind > len(recent):
            raise ValueError(f"another owner is {behind} turns ahead, and tells {len(recent)}")
        return list(recent[len(recent) - behind :])


def _samples_of(action: Apply | Add) -> list[Sequence[int]]:
    return [action.values[SAMPLES]] if SAMPLES in action.values else []


def are_samples(value: Any) -> bool:
    """Whether a value from another process can be the samples of a push."""
    return isinstance(value, list) and len(value) == 3 and all(type(one) is int and one >= 0 for one in value)


def counted_in(told: Any) -> Counted:
    """The account of another process. ValueError for anything else."""
    if not isinstance(told, list) or not all(are_samples(one) for one in told):
        raise ValueError(f"no list of samples: {told!r:.200}")
    return Account([(epoch, start, stop) for epoch, start, stop in told]).counted
