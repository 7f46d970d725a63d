"""Saying who was refused at an open door without letting whoever knocks fill the log.

The first refusals are logged in full. After them one line follows whenever their number has doubled, with the latest
one as an example, and one at the end: a million strangers make some twenty lines more.
"""

from __future__ import annotations

import logging

IN_FULL = 8
"""Refusals that have a line each."""


class Refusals:
    """Counts and logs the refusals of one door; used from one thread at a time."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._count = 0
        self._told = 0
        self._latest: tuple[str, str] = "", ""

    def add(self, whence: str, why: str) -> None:
        """Somebody from ``whence`` was refused."""
        self._count += 1
        self._latest = whence, why
        if self._count <= IN_FULL:
            self._log.warning("refused a connection from %s: %s", whence, why)
            self._told = self._count
        elif self._count >= 2 * self._told:
            self._tell_count()

    def close(self) -> None:
        """The door is closed: say how many there were that no line has counted yet. May be called again."""
        if self._count > self._told:
            self._tell_count()

    def _tell_count(self) -> None:
        self._told = self._count
        self._log.warning("refused %d connections so far, the latest from %s: %s", self._count, *self._latest)
