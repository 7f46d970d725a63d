"""Which threads of a process are in a call of a group, and which one ends it: no call is begun in what is being ended.

Who begins one says so before it looks whether it may, and who ends the group the other way round: one sees the other.
Knows nothing of what is called.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ..errors import UsageError


class Callers:
    """The threads in the calls of one group; ``titled`` makes a message say of which."""

    def __init__(self, titled: Callable[[str], str]) -> None:
        self._titled = titled
        self._inside: list[int] = []  # the threads that are in a call, once for each
        self._closing = threading.Lock()
        self._closed_by: int | None = None  # the thread that ends it

    @property
    def is_busy(self) -> bool:
        """Whether another thread of this process is in a call."""
        return any(thread != threading.get_ident() for thread in list(self._inside))

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Inside this thread is in a call; UsageError where another one ends the group."""
        thread = threading.get_ident()
        begins = thread not in self._inside
        self._inside.append(thread)
        try:
            if begins and self._closed_by not in (None, thread):
                raise UsageError(
                    self._titled("another thread ends this group, or has: make another one, and call in it")
                )
            yield
        finally:
            self._inside.remove(thread)

    def close(self) -> bool:
        """Let no other thread begin a call from now on.

        False, and nothing changes, where another thread is in a call, or has closed the group before.
        """
        with self._closing:
            if self._closed_by is None:
                self._closed_by = threading.get_ident()
                if not self.is_busy:
                    return True
                self._closed_by = None
            return False

    def reopen(self) -> None:
        """Let other threads begin calls again."""
        self._closed_by = None
