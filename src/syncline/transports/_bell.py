"""What a library's thread waits for where the library has nothing to wait for."""

from __future__ import annotations

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
