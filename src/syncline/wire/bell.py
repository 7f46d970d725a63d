"""Bells: wake a thread that waits for messages, from any other thread."""

from __future__ import annotations

import os
import select
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
        """Wait up to ``seconds``; returns whether it rang."""
        return self._lock.acquire(timeout=max(0.0, seconds))

    def rang(self) -> bool:
        """Whether it rang since the last call of this method or of ``wait``."""
        return self._lock.acquire(blocking=False)


class DescriptorBell(Bell):
    """A bell that can be polled together with other descriptors. Ringing a closed bell does nothing."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Lock()

    def fileno(self) -> int:
        """The descriptor, readable after a ring; -1 once closed."""
        return self._fd

    def ring(self) -> None:
        """Make the descriptor readable."""
        with self._closing:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def wait(self, seconds: float) -> bool:
        """Wait for the descriptor."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1e3)
        return self.rang()

    def rang(self) -> bool:
        """Whether the descriptor was readable, which it then is no longer."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Close the descriptor, whose number another file may then get."""
        with self._closing:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
