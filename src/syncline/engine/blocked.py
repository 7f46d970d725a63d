"""How long threads were blocked in communication, each counted by itself: together the exposed communication."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator


class Blocked:
    """The seconds of the threads that waited, but for what they have asked not to be counted."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by thread
        self._uncounted: set[int] = set()

    @property
    def seconds(self) -> float:
        """Those of all threads, added up."""
        return sum(list(self._seconds.values()))

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """What this thread waits for inside is no communication of the training."""
        thread = threading.get_ident()
        self._uncounted.add(thread)
        try:
            yield
        finally:
            self._uncounted.discard(thread)

    def count(self, begun: float) -> None:
        """This thread was blocked since then (``time.perf_counter``)."""
        thread = threading.get_ident()
        if thread not in self._uncounted:
            self._seconds[thread] = self._seconds.get(thread, 0.0) + time.perf_counter() - begun
