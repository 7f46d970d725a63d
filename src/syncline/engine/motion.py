"""Whether what is under way moves, as the thread that drives sees it, and who is to blame when nothing does.

Counts how often something has moved, and how often it was looked in vain. When nothing moves for as long as the limit
of progress although something is under way, that is a fault that names who is to blame: not always whom this process
waits for itself. So others that search ask this one too (``wire.culprit``): what it answers is only worth something
once it has looked again, which it then does without waiting.

Time counts while this process looks for messages. One that was stopped, or whose machine was, finds that nothing has
moved while nobody could: no look counts for more than twice what it should have lasted, and no search at all. When the
limit is over it is searched who is to blame, and again after pauses that grow, until a search confirms the one before
it: who has a message before it that it has not read yet reads it meanwhile. After ``SEARCHES`` it is one that has not
looked in all that time, if there is one, else the last search counts: somebody may move on for ever without this
process.

Pure: the clock and the search are given.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ..errors import PeerTimeout
from ..wire.culprit import ANEW, Answer, Culprit, Found, Waits

SEARCHES = 9
LOOKS = 8
"""How many looks a limit lasts at least."""

_PAUSE_S = 0.05
"""The first pause between two searches; each of the next is twice as long, up to ``_SHARE`` of the limit."""
_SHARE = 0.25
_MOST = 2
"""A look counts for no more time than so many."""
_ROUNDING_S = 1e-6
_POLL_S = 1.0


class Carries(Protocol):
    """What bytes go and come through."""

    @property
    def moved_bytes(self) -> int:
        """The bytes sent and received so far."""
        ...


class Motion:
    """What has moved in one process. Used from the thread that drives; ``answer``, ``allow`` and ``limit`` from any.

    ``waits`` says for whom this process waits, ``find_culprit`` searches who is to blame. Whoever drives counts
    ``moves`` and ends a ``stall`` itself, in every turn.
    """

    def __init__(
        self,
        limit_s: float,
        waits: Callable[[], Waits],
        find_culprit: Callable[[Waits], Found],
        carrier: Carries,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit(limit_s)
        self._waits, self._find_culprit, self._carrier = waits, find_culprit, carrier
        self._clock = clock
        self._bytes = 0  # sent and received, when nothing had moved last
        self.moves = 0
        """How often something has come, gone or begun."""
        self.looks = 0
        """How often this process has looked in vain."""
        self.owed = 0
        """Somebody waits until this process has looked in vain so often.

        The thread that drives may have looked at it just before an answer, and sleep: so whoever answers wakes it
        afterwards (``Driver.answer``).
        """
        self.stall: Stall | None = None
        """Begins with the first look in vain for what should move; None again once something moves."""

    def allow(self, limit_s: float) -> None:
        """Let the limit of progress be at least that, from the next time on that nothing moves."""
        self.limit(max(self.limit_s, limit_s))

    def limit(self, limit_s: float) -> None:
        """The limit of progress, from the next stall on."""
        self.limit_s = limit_s
        self.patience_s = min(_POLL_S, limit_s / LOOKS)
        """How long the next look may last where there is no stall, which says that itself."""

    def moved(self) -> None:
        """Something has come, gone or begun."""
        self.moves += 1
        self.stall = None

    def crept(self) -> bool:
        """Whether bytes have moved since this was asked last: of a message that is longer under way than any look."""
        before, self._bytes = self._bytes, self._carrier.moved_bytes
        return before != self._bytes

    def looked_in_vain(self, needed: bool) -> None:
        """Nothing has moved. Where something should (``needed``) raises PeerTimeout once it is certain who is to blame.

        Nothing should where nobody waits for what is under way.
        """
        self.looks += 1
        if not needed:
            self.stall = None
        elif self.stall is None:
            self.stall = Stall(self.limit_s, self.patience_s, self._clock)
        elif (found := self.stall.look(lambda: self._find_culprit(self._waits()))) is not None:
            raise self._fault(self.stall, found)

    def _fault(self, stall: Stall, found: Found) -> PeerTimeout:
        peers = ", ".join(f"rank {peer} ({label})" for peer, label in sorted(self._waits().items())) or "a message"
        text = f"nothing has moved for {stall.lasted_s:.1f} s, waiting for {peers}"
        if found.culprit is None:
            return PeerTimeout(text, rank=-1)
        return PeerTimeout(f"{text}; rank {found.culprit.rank} {found.culprit.why}", rank=found.culprit.rank)

    def answer(self, looking: bool) -> Answer:
        """What this process says of itself to one that asks for whom it waits; asked from any thread.

        ``looking`` is whether it has anything to look for.
        """
        moves, looks = self.moves, self.looks if looking else -1
        answer = Answer(self._waits(), moves, looks)
        self.owed = looks + ANEW
        return answer


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
