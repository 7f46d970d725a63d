"""Detects stalls in one process and finds the rank at fault.

It counts how often something has moved and how often a poll found nothing. If nothing moves for the time limit although
work is in flight, the fault names the rank that causes the stall, which need not be the rank that this process waits
for. Peers that search for the cause therefore query this process as well (``wire.culprit``). Its answer is reliable
only if it has polled since the question, so it then polls without waiting.

Only the time of polls counts. A process that was stopped, or whose machine was, could not see anything move: a poll
counts for at most twice its planned duration, and searches do not count. When the limit is over, a search for the rank
at fault begins. It is repeated after growing pauses until two consecutive searches agree, because a rank with an unread
message reads it meanwhile. After ``SEARCHES`` searches the verdict is a rank that has not polled in all that time, if
there is one, else the result of the last search: the other ranks may go on forever without this process.

The clock and the search are arguments.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import PeerTimeout
from ..wire.culprit import ANEW, Answer, Culprit, Found, Waits

SEARCHES = 9
LOOKS = 8
"""The least number of polls within a time limit."""

_PAUSE_S = 0.05
"""The first pause between two searches. Each further pause is twice as long, up to ``_SHARE`` of the limit."""
_SHARE = 0.25
_MOST = 2
"""A poll counts for at most this multiple of its planned duration."""
_ROUNDING_S = 1e-6
_POLL_S = 1.0


class Watchdog:
    """Progress and stalls of one process. For the driving thread; ``answer``, ``allow`` and ``limit`` for any thread.

    ``waits`` names the processes that this one waits for; ``find_culprit`` finds the rank at fault,
    ``moved_bytes`` counts the bytes sent and received. The driver
    increments ``moves`` and resets ``stall`` itself on every turn.
    """

    def __init__(
        self,
        limit_s: float,
        waits: Callable[[], Waits],
        find_culprit: Callable[[Waits], Found],
        moved_bytes: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit(limit_s)
        self._waits, self._find_culprit, self._moved_bytes = waits, find_culprit, moved_bytes
        self._clock = clock
        self._bytes = 0  # sent and received, when nothing had moved last
        self.moves = 0
        """How often something has arrived, left or begun."""
        self.looks = 0
        """How often a poll has found nothing."""
        self.awaited_looks = 0
        """A peer waits until ``looks`` reaches this number.

        The driving thread may have compared the two just before an answer and gone to sleep. The answering thread
        therefore wakes it afterwards (``Driver.answer``).
        """
        self.stall: Stall | None = None
        """The current stall: it begins with the first poll that finds nothing although work is in flight. None after
        progress."""

    def allow(self, limit_s: float) -> None:
        """Raise the time limit to at least ``limit_s``, from the next stall on."""
        self.limit(max(self.limit_s, limit_s))

    def limit(self, limit_s: float) -> None:
        """Set the time limit, from the next stall on."""
        self.limit_s = limit_s
        self.patience_s = min(_POLL_S, limit_s / LOOKS)
        """The planned duration of the next poll while there is no stall."""

    def moved(self) -> None:
        """Record that something has arrived, left or begun."""
        self.moves += 1
        self.stall = None

    def bytes_moved(self) -> bool:
        """Whether bytes have moved since the last call. This notices a message that takes longer than a poll."""
        before, self._bytes = self._bytes, self._moved_bytes()
        return before != self._bytes

    def found_nothing(self, needed: bool) -> None:
        """Record a poll that found nothing. If work is in flight (``needed``), raises PeerTimeout once the cause is
        certain.

        Without ``needed`` no work is in flight that anything waits for, so there is no stall.
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
        """This process's answer to a peer that searches for the cause of a stall. Callable from any thread.

        ``looking`` is whether this process has any reason to poll.
        """
        moves, looks = self.moves, self.looks if looking else -1
        answer = Answer(self._waits(), moves, looks)
        self.awaited_looks = looks + ANEW
        return answer


class Stall:
    """A stall, until something moves. It becomes a fault after ``limit_s`` of polls of ``look_s`` each."""

    def __init__(self, limit_s: float, look_s: float, clock: Callable[[], float]) -> None:
        self.patience_s = look_s
        """The planned duration of the next poll."""
        self._left_s = limit_s
        self._most_s = _MOST * look_s
        self._longest_s = _SHARE * limit_s
        self._clock = clock
        self._begun = self._seen = clock()
        self._searches = 0
        self._found: Found | None = None
        self._asked = 0.0  # the time of the first search
        self._busy: dict[int, Answer] = {}  # the peers that have not polled since then, with their answers

    @property
    def lasted_s(self) -> float:
        """The seconds since its start."""
        return self._clock() - self._begun

    def look(self, search: Callable[[], Found]) -> Found | None:
        """Record another poll that found nothing. Returns the result of the search once it is certain."""
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
        """Keep the peers that have a reason to poll but have neither polled nor moved since the first search."""
        said = {peer: answer for peer, answer in found.answers.items() if answer is not None and answer.looks >= 0}
        if self._searches == 0:
            self._asked, self._busy = self._seen, said
        counts = {peer: (answer.moves, answer.looks) for peer, answer in said.items()}
        self._busy = {peer: one for peer, one in self._busy.items() if counts.get(peer) == (one.moves, one.looks)}

    def _last(self, found: Found) -> Found:
        """The verdict if no two consecutive searches agreed."""
        if not self._busy:
            return found
        why = (
            f"has not looked for messages for {self._seen - self._asked:.1f} s: a call in its progress thread takes"
            " long"
        )
        return Found(Culprit(next(iter(self._busy)), why), found.answers)
