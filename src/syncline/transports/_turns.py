"""The order of collectives over a library that matches them by the order in which they are called.

Ranks may start theirs in different orders, so all take them in rank 0's, of which it tells the others.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from numpy.typing import NDArray

from ..errors import UsageError
from . import Handle

_MOST_TURNS = 1 << 16
"""How many collectives rank 0 may be ahead."""


class Turns:
    """The collectives that rank 0 has begun, those that this rank has come to, and those of both that run.

    ``begun`` counts the last.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._order: deque[int] = deque()  # keys, as rank 0 starts them
        self._ready: dict[int, tuple[Handle, NDArray[Any]]] = {}
        self._running: dict[int, Handle] = {}  # by number
        self.begun = 0

    def check_new(self, key: int) -> None:
        """Raise UsageError for a key that this rank has come to already."""
        if key in self._ready:
            raise UsageError(f"rank {self._rank} has an allreduce with key {key} under way already")

    def come(self, key: int, handle: Handle, array: NDArray[Any]) -> None:
        """This rank has come to one."""
        self._ready[key] = handle, array

    @property
    def full(self) -> bool:
        """Whether rank 0 is as far ahead as it may be."""
        return len(self._order) >= _MOST_TURNS

    def add(self, key: int) -> None:
        """It is the next one's turn, says rank 0."""
        self._order.append(key)

    def take(self) -> tuple[Handle, NDArray[Any]] | None:
        """The next one that runs from now on; None where this rank or rank 0 has not come to it."""
        if not self._order or self._order[0] not in self._ready:
            return None
        handle, array = self._ready.pop(self._order.popleft())
        handle.note = self.begun
        self._running[self.begun] = handle
        self.begun += 1
        return handle, array

    def ended(self, handle: Handle) -> None:
        """One has ended, or will never begin."""
        self._running.pop(handle.note, None)

    def left_out(self, begun: int) -> list[Handle]:
        """Those that run and that a peer is not in, which has been in so many."""
        return [handle for number, handle in self._running.items() if number >= begun]

    def give_up(self) -> list[Handle]:
        """Those that have not begun, and never will."""
        found = [handle for handle, _ in self._ready.values()]
        self._ready.clear()
        return found
