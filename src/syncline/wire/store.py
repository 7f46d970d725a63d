"""The small shared notebook in which a message library's processes find each other.

Between processes it is the meeting (``meeting_client``), which keeps little and for the start only; between threads a
dictionary.
"""

from __future__ import annotations

import threading
from typing import Protocol


class Store(Protocol):
    """Keys and values that all processes of a run see. Every call has a time limit."""

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes | None:
        """Read a value; None when nobody has written it yet."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0 and return its new value."""
        ...


class MemoryStore:
    """A store between the threads of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> bytes | None:
        """Read a value; None when nobody has written it yet."""
        with self._lock:
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + amount
            return self._counters[key]
