"""Which arrived message belongs to which posted receive. Pure bookkeeping, no I/O.

Messages match receives by (sender, tag), first to first. Whichever side comes first waits here for the other.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Posted = TypeVar("Posted")
Arrived = TypeVar("Arrived")


class Matcher(Generic[Posted, Arrived]):
    """Two tables of queues; at most one of them has an entry for a key at any time."""

    def __init__(self) -> None:
        self._posted: dict[tuple[int, int], deque[Posted]] = {}
        self._arrived: dict[tuple[int, int], deque[Arrived]] = {}

    def post(self, src: int, tag: int, receive: Posted) -> Arrived | None:
        """A receive was posted: the message it gets at once, or None when it has to wait."""
        found = _pop(self._arrived, (src, tag))
        if found is None:
            self._posted.setdefault((src, tag), deque()).append(receive)
        return found

    def arrive(self, src: int, tag: int, message: Arrived) -> Posted | None:
        """A message arrived: the receive it belongs to, or None when it is kept for later."""
        found = _pop(self._posted, (src, tag))
        if found is None:
            self._arrived.setdefault((src, tag), deque()).append(message)
        return found

    def take(self, src: int, tag: int) -> Posted | None:
        """The receive that the next message of that key belongs to, taken out; None when there is none."""
        return _pop(self._posted, (src, tag))

    def forget(self, src: int) -> None:
        """Drop the receives that wait for that sender; messages that did arrive stay."""
        for key in [key for key in self._posted if key[0] == src]:
            del self._posted[key]


Item = TypeVar("Item")


def _pop(table: dict[tuple[int, int], deque[Item]], key: tuple[int, int]) -> Item | None:
    queue = table.get(key)
    if queue is None:
        return None
    item = queue.popleft()
    if not queue:
        del table[key]
    return item
