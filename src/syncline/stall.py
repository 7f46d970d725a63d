"""Whether nothing has moved for too long, and who is to blame for it, as one process sees that.

Time counts while this process looks for messages. One that was stopped, or whose machine was, finds that nothing has
moved while nobody could: no look counts for more than it should have lasted. When the limit is over it is searched who
is to blame, and again after pauses that grow, until a search confirms the one before it (``wire.culprit``): who has a
message before it that it has not read yet reads it meanwhile. After ``SEARCHES`` the last one counts: somebody may move
on for ever without this process.

Pure: the clock and the search are given.
"""

from __future__ import annotations

from collections.abc import Callable

from .wire.culprit import Found

SEARCHES = 9
LOOKS = 8
"""How many looks a limit lasts at least."""

_PAUSE_S = 0.05
_MOST = 2
"""A look counts for no more time than so many."""


class Stall:
    """Begins at ``now``, is over when something moves, and is a fault after ``limit_s`` of looks of ``look_s``."""

    def __init__(self, limit_s: float, look_s: float, now: float) -> None:
        self.patience_s = look_s
        """How long the next look may last."""
        self._left_s = limit_s
        self._most_s = _MOST * look_s
        self._seen = now
        self._searches = 0
        self._found: Found | None = None

    def look(self, now: float, search: Callable[[], Found]) -> Found | None:
        """Note that nothing had moved when it was looked at ``now``; who is to blame, once that is certain."""
        self._left_s -= min(now - self._seen, self._most_s)
        self._seen = now
        if self._left_s > 0:
            return None
        found, before = search(), self._found
        self._searches += 1
        if self._searches == SEARCHES or (before is not None and found.confirms(before)):
            return found
        self._found = found
        self.patience_s = self._left_s = _PAUSE_S * 2 ** (self._searches - 1)
        self._most_s = _MOST * self.patience_s
        return None
