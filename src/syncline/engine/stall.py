"""Whether nothing has moved for too long, and who is to blame for it, as one process sees that.

Time counts while this process looks for messages. One that was stopped, or whose machine was, finds that nothing has
moved while nobody could: no look counts for more than twice what it should have lasted, and no search at all. When the
limit is over it is searched who is to blame, and again after pauses that grow, until a search confirms the one before
it (``wire.culprit``): who has a message before it that it has not read yet reads it meanwhile. After ``SEARCHES`` it is
one that has not looked in all that time, if there is one, else the last search counts: somebody may move on for ever
without this process.

Pure: the clock and the search are given.
"""

from __future__ import annotations

from collections.abc import Callable

from ..wire.culprit import Answer, Culprit, Found

SEARCHES = 9
LOOKS = 8
"""How many looks a limit lasts at least."""

_PAUSE_S = 0.05
"""The first pause between two searches; each of the next is twice as long, up to ``_SHARE`` of the limit."""
_SHARE = 0.25
_MOST = 2
"""A look counts for no more time than so many."""
_ROUNDING_S = 1e-6


class Stall:
    """Begins when it is made, is over when something moves, and is a fault after ``limit_s`` of looks of ``look_s``."""

    def __init__(self, limit_s: float, look_s: float, clock: Callable[[], float]) -> None:
        self.patience_s = look_s
        """How long the next look may last."""
        self._left_s = limit_s
        self._most_s = _MOST * look_s
        self._longest_s = _SHARE * limit_s
        self._clock = clock
        self._begun = self._seen = clock()
        self._searches = 0
        self._found: Found | None = None
        self._asked = 0.0  # when it was first searched
        self._busy: dict[int, Answer] = {}  # who has not looked since then, and what it said

    @property
    def lasted_s(self) -> float:
        """How long ago it began."""
        return self._clock() - self._begun

    def look(self, search: Callable[[], Found]) -> Found | None:
        """Note that nothing had moved when it was looked; who is to blame, once that is certain."""
        now = self._clock()
        self._left_s -= min(now - self._seen, self._most_s)
        self._seen = now
        if self._left_s > _ROUNDING_S:
            return None
        found, before = search(), self._found
        self._seen = self._clock()
        if before is not None and found.confirms(before):
            return found
        self._note(found)
        self._searches += 1
        if self._searches == SEARCHES:
            return self._last(found)
        self._found = found
        self.patience_s = self._left_s = min(_PAUSE_S * 2 ** (self._searches - 1), self._longest_s)
        self._most_s = _MOST * self.patience_s
        return None

    def _note(self, found: Found) -> None:
        """Keep who has something to look for and has neither looked nor moved since the first search."""
        said = {peer: answer for peer, answer in found.answers.items() if answer is not None and answer.looks >= 0}
        if self._searches == 0:
            self._asked, self._busy = self._seen, said
        counts = {peer: (answer.moves, answer.looks) for peer, answer in said.items()}
        self._busy = {peer: one for peer, one in self._busy.items() if counts.get(peer) == (one.moves, one.looks)}

    def _last(self, found: Found) -> Found:
        """What counts where no search has confirmed another."""
        if not self._busy:
            return found
        why = (
            f"has not looked for messages for {self._seen - self._asked:.1f} s: something that its progress thread"
            " called takes long"
        )
        return Found(Culprit(next(iter(self._busy)), why), found.answers)
