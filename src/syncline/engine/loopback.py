"""Messages of a process to itself: no transport carries them. Used from the thread that drives, as transports are.

As between two processes, those of one tag are received in the order in which they were sent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable


class Loopback:
    """What was sent and has not been asked for, and what was asked for and has not been sent, by tag."""

    def __init__(self) -> None:
        self._sent: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self._asked: defaultdict[int, deque[Callable[[bytes], None]]] = defaultdict(deque)

    def send(self, tag: int, data: bytes) -> None:
        """Give a message to whoever asked first, or keep it."""
        if self._asked[tag]:
            self._asked[tag].popleft()(data)
        else:
            self._sent[tag].append(data)

    def recv(self, tag: int, came: Callable[[bytes], None]) -> None:
        """Call with the next message, now or when it is sent."""
        if self._sent[tag]:
            came(self._sent[tag].popleft())
        else:
            self._asked[tag].append(came)
