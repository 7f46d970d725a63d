"""Which arrived message belongs to which posted receive. Pure bookkeeping, no I/O.

Messages match receives by (sender, tag), first to first. Whichever side comes first waits here for the other.

What a sender may leave here unasked is bounded: a sound one is ahead by what is under way, a broken one without end.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from ..errors import ProtocolError

UNCLAIMED_BYTES = 1 << 30
"""What messages of one sender that nobody has asked for may take."""

_ENTRY_BYTES = 512
"""What a message takes at least, with the tables that know it."""

Posted = TypeVar("Posted")
Arrived = TypeVar("Arrived")


class Matcher(Generic[Posted, Arrived]):
    """Two tables of queues; at most one of them has an entry for a key at any time."""

    def __init__(self, unclaimed_bytes: int = UNCLAIMED_BYTES) -> None:
        self._posted: dict[tuple[int, int], deque[Posted]] = {}
        self._arrived: dict[tuple[int, int], deque[tuple[Arrived, int]]] = {}
        self._limit = unclaimed_bytes
        self._unclaimed: dict[int, int] = {}  # bytes by sender

    def post(self, src: int, tag: int, receive: Posted) -> Arrived | None:
        """A receive was posted: the message it gets at once, or None when it has to wait."""
        key = src, tag
        queue = self._arrived.get(key)
        if queue is None:
            self._posted.setdefault(key, deque()).append(receive)
            return None
        message, cost = queue.popleft()
        if not queue:
            del self._arrived[key]
        self._unclaimed[src] -= cost
        return message

    def arrive(self, src: int, tag: int, message: Arrived, nbytes: int = 0) -> Posted | None:
        """A message arrived: the receive it belongs to, or None when it is kept for later, in ``nbytes`` of memory.

        Raises ProtocolError when its sender has left too much here.
        """
        found = self.take(src, tag)
        if found is None:
            cost = nbytes + _ENTRY_BYTES
            total = self._unclaimed.get(src, 0) + cost
            if total > self._limit:
                raise ProtocolError(
                    f"rank {src} has sent messages of {total} bytes that nobody here has asked for; do all ranks make"
                    " the same calls?",
                    rank=src,
                )
            self._unclaimed[src] = total
            self._arrived.setdefault((src, tag), deque()).append((message, cost))
        return found

    def take(self, src: int, tag: int) -> Posted | None:
        """The receive that the next message of that key belongs to, taken out; None when there is none."""
        key = src, tag
        queue = self._posted.get(key)
        if queue is None:
            return None
        receive = queue.popleft()
        if not queue:
            del self._posted[key]
        return receive

    def forget(self, src: int) -> None:
        """Drop the receives that wait for that sender; messages that did arrive stay."""
        for key in [key for key in self._posted if key[0] == src]:
            del self._posted[key]
