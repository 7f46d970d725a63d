"""What the engine has under way: a work, and the lane in which works keep their order.

Owns when a work may start: once its gate is done, and in a lane when those before it have started and there is room.
Works of one lane start in the order in which they were handed over, at most ``in_flight`` of them at a time: ranks
whose gradients become ready in different orders still serve the same buckets. Knows no thread, clock or transport:
what a work does, and when it is done, is the engine's affair, which calls all of this from the thread that drives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from .trace import Span


class Work:
    """Something under way; ``result`` is set when it is done. A ``tolerant`` one does not mind peers that leave.

    ``span`` is what an observer has been told of it.
    """

    __slots__ = ("_callbacks", "done", "label", "result", "span", "tolerant")

    def __init__(self, label: str, tolerant: bool = False) -> None:
        self.label = label
        self.tolerant = tolerant
        self.done = False
        self.result: Any = None
        self.span: Span | None = None
        self._callbacks: list[Callable[[], None]] = []

    def when_done(self, call: Callable[[], None]) -> None:
        """Call at once, or as soon as the work is done."""
        if self.done:
            call()
        else:
            self._callbacks.append(call)

    def call_back(self) -> None:
        """Call what waits for this work, which is done."""
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Lane:
    """An ordered queue of works of which ``in_flight`` may be under way; ``active`` are."""

    def __init__(self, in_flight: int) -> None:
        self.in_flight = in_flight
        self.active = 0
        self._waiting: deque[tuple[Work | None, Callable[[], None]]] = deque()

    def enter(self, gate: Work | None, start: Callable[[], None]) -> None:
        """Start one more work, once ``gate`` is done and it is its turn."""
        self._waiting.append((gate, start))
        self._advance()

    def leave(self) -> None:
        """A work of this lane is done: another may start."""
        self.active -= 1
        self._advance()

    def _advance(self) -> None:
        while self._waiting and self.active < self.in_flight:
            gate, start = self._waiting[0]
            if gate is not None and not gate.done:
                gate.when_done(self._advance)
                return
            self._waiting.popleft()
            self.active += 1
            start()
