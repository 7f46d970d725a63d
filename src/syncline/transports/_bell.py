"""What a library's thread waits for where the library has nothing to wait for."""

from __future__ import annotations

import os
import threading


class Bell:
    """Wakes the one thread that waits for it; rings given before are kept, as one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """End the wait, or the next one at once."""
        try:
            self._lock.release()
        except RuntimeError:
            return  # it has rung already

    def wait(self, seconds: float) -> bool:
        """Wait up to so many seconds; whether it rang. 0 only looks."""
        return self._lock.acquire(timeout=seconds) if seconds > 0 else self._lock.acquire(blocking=False)


class DescriptorBell:
    """A bell that one can wait for together with other descriptors; silent once it is closed."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._open = True

    def fileno(self) -> int:
        """Readable after a ring."""
        return self._fd

    def ring(self) -> None:
        """Make the descriptor readable."""
        with self._lock:
            if self._open:
                os.eventfd_write(self._fd, 1)

    def rang(self) -> bool:
        """Whether it rang since the last time that this was asked."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """The descriptor's number may be another file's from now on."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._fd)
