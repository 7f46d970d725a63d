"""What waits to be given to a message library that knows no priority: the most urgent goes first.

A library sends what it has been given in its own order. So where priorities differ it is given little ahead of time:
the next thing for a peer while it has less than ``AHEAD_BYTES`` to send there, or when that is as small as a header: it
may be what the peer has to know of something urgent. Whoever puts something in here sees to
it that it flows once the library has it, whatever its receiver does: what is held back then waits for nothing else.
While nothing has had another priority than 0 all is given to the library at once.

Pure: how a library sends is passed in.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import NamedTuple

AHEAD_BYTES = 1024 * 1024
_SMALL_BYTES = 64

Event = Callable[[], None]
"""Something that has happened, for the thread that drives to act on."""

Begin = Callable[[Event], None]
"""Gives something to the library, which calls what it is passed when that has been sent."""


class _Waiting(NamedTuple):
    """Something that waits; of the most urgent, which have the smallest priority, the oldest goes first."""

    priority: float
    serial: int
    nbytes: int
    begin: Begin
    done: Event


class Outbox:
    """What one rank has to send to each of its peers."""

    def __init__(self, peers: Iterable[int]) -> None:
        self.ranked = False
        """Whether something had another priority than 0."""
        self._waiting: dict[int, list[_Waiting]] = {peer: [] for peer in peers}
        self._ahead = dict.fromkeys(self._waiting, 0)
        self._serial = count()

    def put(self, peer: int, priority: float, nbytes: int, begin: Begin, done: Event) -> None:
        """Let something be sent when it is its turn; ``done`` when it has been."""
        if not self.ranked:
            begin(done)
            return
        heapq.heappush(self._waiting[peer], _Waiting(priority, next(self._serial), nbytes, begin, done))
        self._give(peer)

    def holds(self, peer: int) -> bool:
        """Whether something waits."""
        return bool(self._waiting[peer])

    def forget(self, peer: int) -> None:
        """The peer is gone."""
        self._waiting[peer].clear()

    def empty(self, peer: int) -> None:
        """Give the library all that waits for a peer: nothing will be more urgent."""
        waiting = self._waiting[peer]
        while waiting:
            first = heapq.heappop(waiting)
            first.begin(first.done)

    def _give(self, peer: int) -> None:
        waiting = self._waiting[peer]
        while waiting and (self._ahead[peer] < AHEAD_BYTES or waiting[0].nbytes <= _SMALL_BYTES):
            first = heapq.heappop(waiting)
            self._ahead[peer] += first.nbytes
            first.begin(partial(self._sent, peer, first))

    def _sent(self, peer: int, what: _Waiting) -> None:
        self._ahead[peer] -= what.nbytes
        what.done()
        self._give(peer)
