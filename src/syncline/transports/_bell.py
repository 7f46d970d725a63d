"""Bells: wake the thread that drives a transport."""

from __future__ import annotations

import os
import threading


class Bell:
    """Wakes the one thread that waits for it. Rings before a wait count as one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """End the wait, or else the next one at once."""
        try:
            self._lock.release()
        except RuntimeError:
            return  # it has rung already

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds``; returns whether it rang. With 0 it only tests."""
        return self._lock.acquire(timeout=seconds) if seconds > 0 else self._lock.acquire(blocking=False)


class DescriptorBell:
    """A bell that can be polled together with other descriptors. Ringing a closed bell does nothing."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._open = True

    def fileno(self) -> int:
        """The descriptor, readable after a ring."""
        return self._fd

    def ring(self) -> None:
        """Make the descriptor readable."""
        with self._lock:
            if self._open:
                os.eventfd_write(self._fd, 1)

    def rang(self) -> bool:
        """Whether it rang since the last call."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Close the descriptor, whose number another file may then get."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._fd)
