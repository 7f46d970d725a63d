"""Lets compiled code move the bodies of large messages while there are any (``kernels.sockets``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from .link import Link

_LONGEST_MS = 1000


class Pump:
    """Called instead of a wait: moves bodies of ``links`` (by descriptor) until there is something else to do."""

    def __init__(self, links: Mapping[int, Link], bell: int, lose: Callable[[int], None]) -> None:
        from ..kernels import sockets  # compiled code: loaded where it is used

        self._kernel = sockets
        self._links, self._bell, self._lose = links, bell, lose
        self._before = np.zeros((len(links), sockets.COLUMNS), np.int64)
        self._polled = np.zeros(len(links) + 1, np.int64)

    def __call__(self, timeout: float) -> bool:
        """Move bodies, waiting up to ``timeout`` seconds for more; False when there are none to move."""
        links = list(self._links.values())
        before = self._before[: len(links)]
        before[:] = 0
        busy = [link.bulk(row) for link, row in zip(links, before, strict=True)]
        if not any(busy):
            return False
        after = before.copy()
        wait_ms = min(int(timeout * 1000), _LONGEST_MS)
        self._kernel.pump(after, self._bell, self._polled.ctypes.data, wait_ms)
        for link, was, now in zip(links, before, after, strict=True):
            if now[self._kernel.STATUS] != self._kernel.OPEN:
                self._lose(link.sock.fileno())
            else:
                link.moved(was, now)
        return True
