"""Whether what is under way moves, as the thread that drives sees it, and what others are told of that.

Counts how often something has moved, and how often it was looked in vain. When nothing moves for as long as the limit
of progress although something is under way, that is a fault that names who is to blame (``stall``): not always whom
this process waits for itself. So others that search ask this one too (``wire.culprit``): what it answers is only worth
something once it has looked again, which it then does without waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ..errors import PeerTimeout
from ..wire.culprit import ANEW, Answer, Found, Waits
from .stall import LOOKS, Stall

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
