"""One process in the meeting: it says who it is, hears who all are, and leaves when all are through.

Every wait has a limit, whatever the meeting does; when it is over the meeting is asked once more who is missing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from ..errors import GroupError, RollCallError
from .meeting import AMOUNT, Broken, Frames, Kind, fault_frame, frame, note, read_roll, told
from .member import Member, Roll, printable

_WORD_S = 1.0
"""How long the meeting may take to say who is missing, or to take leave."""

_CHECK_S = 0.25
_READ_BYTES = 1 << 16


class MeetingClient:
    """A connection to the meeting, proved already; ``where`` is the meeting's place, for messages.

    ``set``, ``get`` and ``add`` are the notes of message libraries (``wire.store``). One thread calls at a time.
    """

    def __init__(self, sock: socket.socket, where: str, world: int) -> None:
        self._sock, self._where = sock, where
        self._frames = Frames(told(world))
        self._lock = threading.Lock()
        self._limit_s, self.deadline = 0.0, time.monotonic()
        self._look_after: Callable[[], None] | None = None

    def limit(self, deadline: float, limit_s: float) -> None:
        """From now on everything has to be done until ``deadline`` (time.monotonic); errors speak of ``limit_s``."""
        self._limit_s, self.deadline = limit_s, deadline

    def enter(self) -> bytes:
        """Come in; the key to prove connections with where the run has no secret, else empty."""
        return self._expect(Kind.WELCOME)[1]

    def call_roll(self, me: Member, run: str, secret: bytes) -> Roll:
        """Say who this process is and wait for all others; raises RollCallError when they disagree or do not come.

        ``secret`` is what the processes of the roll prove to each other, and ``run`` its name.
        """
        self._send(frame(Kind.RECORD, me.to_text().encode()))
        return Roll(me.index, read_roll(self._expect(Kind.ROLL)[1], me.world), run, secret)

    def look_after(self, check: Callable[[], None]) -> None:
        """From now on call this whenever something is waited for: it raises what ends the wait."""
        self._look_after = check

    def check(self) -> None:
        """Raise the fault that ends this start, if there is one by now; does not wait."""
        with self._lock:
            if (said := self._look()) is not None:
                raise self._confused(f"said {said[0].name.lower()}")
        if self._look_after is not None:
            self._look_after()

    def set(self, key: str, value: bytes) -> None:
        """Write a note."""
        self._ask(Kind.SET, note(key, value))

    def get(self, key: str) -> bytes | None:
        """Read a note; None when nobody has written it yet."""
        kind, value = self._ask(Kind.GET, note(key))
        return value if kind is Kind.VALUE else None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return int(AMOUNT.unpack(self._ask(Kind.ADD, note(key, AMOUNT.pack(amount)))[1])[0])

    def through(self) -> None:
        """This process's connections stand; returns when all others' do."""
        self._send(frame(Kind.THROUGH))
        self._expect(Kind.OVER)

    def give_up(self, fault: str) -> None:
        """This process cannot join, for a reason that all others shall read unless they know another one."""
        with contextlib.suppress(OSError, GroupError):
            self._sock.settimeout(_WORD_S)
            self._sock.sendall(fault_frame(fault))
            self._sock.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + _WORD_S
            while self._sock.recv(_READ_BYTES) and time.monotonic() < deadline:
                pass  # closing with something unread could take back what was said

    def close(self) -> None:
        """Hang up."""
        self._sock.close()

    def _ask(self, kind: Kind, body: bytes) -> tuple[Kind, bytes]:
        with self._lock:
            self._send(frame(kind, body))
            return self._expect(Kind.VALUE, Kind.NOTHING)

    def _send(self, data: bytes) -> None:
        try:
            self._sock.settimeout(max(_WORD_S, self.deadline - time.monotonic()))
            self._sock.sendall(data)
        except TimeoutError:
            raise self._silent() from None
        except OSError:
            self._look()  # why it has hung up may have come before, behind the answer to what was said last
            self._look()
            raise self._gone() from None

    def _expect(self, *kinds: Kind) -> tuple[Kind, bytes]:
        """The next word of the meeting, which has to be one of these; after the limit, who is missing."""
        deadline, asked = self.deadline, False
        while (said := self._take()) is None:
            left = deadline - time.monotonic()
            if left <= 0 and asked:
                raise self._silent()
            if left <= 0:
                asked, deadline = True, time.monotonic() + _WORD_S
                self._send(frame(Kind.LATE, b"%d" % round(self._limit_s)))
                continue
            self._sock.settimeout(left if self._look_after is None else min(left, _CHECK_S))
            with contextlib.suppress(TimeoutError):
                self._feed(self._receive())
                continue
            if self._look_after is not None:
                self._look_after()
        if said[0] not in kinds:
            raise self._confused(f"said {said[0].name.lower()}")
        return said

    def _take(self) -> tuple[Kind, bytes] | None:
        """What has come; raises RollCallError when it is a fault."""
        try:
            said = self._frames.take()
        except Broken as broken:
            raise self._confused(str(broken)) from None
        if said is not None and said[0] is Kind.FAULT:
            raise RollCallError(printable(said[1].decode(errors="replace")))
        return said

    def _look(self) -> tuple[Kind, bytes] | None:
        """What has come by now, None where that is no whole word; reads no further than the word's end."""
        self._sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while (said := self._take()) is None:
                self._feed(self._receive())
            return said
        return None

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(_READ_BYTES)
        except (BlockingIOError, TimeoutError):
            raise
        except OSError:
            return b""

    def _feed(self, data: bytes) -> None:
        if not data:
            self._take()
            raise self._gone()
        self._frames.feed(data)

    def _gone(self) -> GroupError:
        return GroupError(f"rank 0, which serves the meeting at {self._where}, has ended; see what it printed")

    def _silent(self) -> GroupError:
        return GroupError(
            f"rank 0, which serves the meeting at {self._where}, has not answered within"
            f" {self._limit_s:.0f} s: is it stopped, or its machine gone? see what it printed, or give more time with"
            " init(timeout=)"
        )

    def _confused(self, how: str) -> GroupError:
        return GroupError(
            f"what answers at {self._where} breaks the rules of the meeting: it {how}; does rank 0 run another version"
            " of Syncline?"
        )
