"""The rendezvous over sockets: the server in rank 0, and the client in every process.

``meeting`` decides what is sent. The server never waits for a single process: unread frames stay in that process's
queue, and the server reads nothing from it meanwhile. A queue therefore holds no more than the roll, a note and a
fault. The doors close before any process learns that all are connected. Every wait of the client has a limit; after it
the client asks once for the missing processes.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import GroupError, HandshakeError, RollCallError
from .bell import DescriptorBell
from .handshake import Hello
from .listener import Doors
from .meeting import (
    AMOUNT,
    HEARD,
    Broken,
    Frames,
    Kind,
    Meeting,
    Member,
    Roll,
    fault_frame,
    frame,
    note,
    printable,
    read_roll,
    told,
)
from .tls import Credentials

PURPOSE = "meeting"

_READ_S = 2.0
"""How long a process may take to read its last frame."""

MORE = 64
"""The limit for authenticated connections, in addition to two for every process."""

_WORD_S = 1.0
"""How long the meeting may take to name the missing processes, or to close the connection."""

_CHECK_S = 0.25
_READ_BYTES = 1 << 16


@dataclass(eq=False)
class _Line:
    """An authenticated connection."""

    number: int
    sock: socket.socket
    frames: Frames = field(default_factory=lambda: Frames(HEARD))
    unsent: deque[memoryview] = field(default_factory=deque)
    dismissed_at: float | None = None
    silenced: bool = False


class MeetingServer:
    """Serves ``meeting`` at listening sockets, in a thread of its own, for at most ``limit_s``."""

    def __init__(
        self,
        doors: Sequence[socket.socket],
        run: bytes,
        secret: bytes,
        meeting: Meeting,
        limit_s: float,
        tls: Credentials | None = None,
    ) -> None:
        self._meeting = meeting
        self._lines: dict[int, _Line] = {}
        self._count = 0
        self._new: deque[tuple[int, socket.socket, str]] = deque()
        self._limit = self._stay_until = time.monotonic() + limit_s
        self._closing = False
        self._bell = DescriptorBell()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._doors = Doors(
            doors,
            run,
            secret,
            0,
            lambda said, sock, origin: self._admit(said.source, sock, f"from {origin}"),
            check=self._check,
            refused=self._note_refusal,
            world=meeting.world,
            tls=tls,
        )
        # Not a daemon: the interpreter waits for its end, so that late processes read the fault.
        self._thread = threading.Thread(target=self._serve, name="syncline-meeting", daemon=False)
        self._thread.start()

    def adopt(self, rank: int, origin: str) -> socket.socket:
        """A connection for rank ``rank`` within this process, which need not authenticate."""
        here, there = socket.socketpair()
        self._admit(rank, there, origin)
        return here

    def close(self, stay_s: float = 0.0) -> None:
        """Let the server end, and do not wait for it.

        After success it ends at once. After a fault it ends when all connected processes have read the fault, and waits
        up to ``stay_s`` for the missing ones. Callable again with a shorter time.
        """
        self._stay_until = time.monotonic() + stay_s
        self._closing = True
        self._bell.ring()

    def join(self) -> None:
        """Wait for the end after ``close``."""
        self._thread.join()

    def _admit(self, rank: int, sock: socket.socket, origin: str) -> None:
        self._new.append((rank, sock, origin))
        self._bell.ring()

    def _check(self, said: Hello) -> None:
        if said.purpose != PURPOSE:
            raise HandshakeError(f"at this port processes meet, but the connection is for {said.purpose!r}")
        if len(self._lines) + len(self._new) >= 2 * self._meeting.world + MORE:
            raise HandshakeError("too many connections")

    def _note_refusal(self, said: Hello, origin: str, why: str) -> None:
        if said.source < self._meeting.world:
            self._meeting.refused[said.source] = f"one that claims to be it was refused at {origin}: {why}"

    def _serve(self) -> None:
        try:
            while (wait_s := self._wait_s()) is not None:
                for key, mask in self._selector.select(wait_s):
                    if key.data is None:
                        self._bell.rang()
                    elif mask & selectors.EVENT_WRITE:
                        self._write(key.data)
                    else:
                        self._read(key.data)
                while self._new:
                    self._enter(*self._new.popleft())
        finally:
            self._doors.close()
            for sock in (*(line.sock for line in self._lines.values()), *(sock for _, sock, _ in self._new)):
                sock.close()
            self._selector.close()
            self._bell.close()

    def _wait_s(self) -> float | None:
        """The time limit of the next wait for events. None ends the server."""
        now = time.monotonic()
        if now >= self._limit and not self._ended:
            self._meeting.fail("the time for this start is over")
            self._act()
        for line in list(self._lines.values()):
            if line.dismissed_at is not None and now >= line.dismissed_at + _READ_S:
                self._hang_up(line)
        if self._closing and not self._ended:
            return None  # no process was sent a last frame: the connections just close
        end = (self._stay_until if self._closing else self._limit) + 2 * _READ_S
        if now >= end:
            return None  # even if processes are still connected
        if self._closing and not self._lines and not self._new:
            if self._meeting.over or not self._meeting.awaited or now >= self._stay_until:
                return None
            return self._stay_until - now
        times = [line.dismissed_at + _READ_S for line in self._lines.values() if line.dismissed_at is not None]
        return max(0.0, min([*times, end if self._ended else self._limit]) - now)

    @property
    def _ended(self) -> bool:
        return self._meeting.over or self._meeting.fault is not None

    def _enter(self, rank: int, sock: socket.socket, origin: str) -> None:
        self._count += 1
        line = self._lines[self._count] = _Line(self._count, sock)
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, line)
        self._meeting.enter(line.number, rank, origin)
        self._act()

    def _read(self, line: _Line) -> None:
        try:
            data = line.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up(line)
        elif line.dismissed_at is None:
            line.frames.feed(data)
            self._hear(line)

    def _hear(self, line: _Line) -> None:
        """Act on received frames one by one, until one has an answer that the process has not read."""
        try:
            while not line.unsent and line.dismissed_at is None and (said := line.frames.take()) is not None:
                self._meeting.hear(line.number, *said)
                self._act()
        except Broken as broken:
            self._meeting.break_off(line.number, str(broken))
            self._act()

    def _act(self) -> None:
        """Send the frames of the meeting."""
        while self._meeting.said:
            if self._meeting.over:
                self._doors.close()
            caller, data, last = self._meeting.said.popleft()
            line = self._lines.get(caller)
            if line is None:
                continue
            if data:
                line.unsent.append(memoryview(data))
            if last:
                line.dismissed_at = time.monotonic()
            self._write(line)

    def _write(self, line: _Line) -> None:
        """Send as much as the connection accepts, and end the stream of a dismissed process after its last frame."""
        try:
            while line.unsent:
                rest = line.unsent[0][line.sock.send(line.unsent[0]) :]
                if rest:
                    line.unsent[0] = rest
                else:
                    line.unsent.popleft()
        except BlockingIOError:
            self._selector.modify(line.sock, selectors.EVENT_WRITE, line)
            return
        except OSError:
            line.unsent.clear()  # the connection is broken, which the next read reports
        if line.dismissed_at is not None and not line.silenced:
            line.silenced = True
            with contextlib.suppress(OSError):
                line.sock.shutdown(socket.SHUT_WR)
        if self._selector.get_key(line.sock).events != selectors.EVENT_READ:
            self._selector.modify(line.sock, selectors.EVENT_READ, line)
            self._hear(line)

    def _hang_up(self, line: _Line) -> None:
        del self._lines[line.number]
        self._selector.unregister(line.sock)
        line.sock.close()
        self._meeting.leave(line.number)
        self._act()


class MeetingClient:
    """An authenticated connection to the meeting at ``where`` (for messages). For one thread at a time.

    ``set``, ``get`` and ``add`` are the notes of message libraries (``transports.Store``).
    """

    def __init__(self, sock: socket.socket, where: str, world: int) -> None:
        self._sock, self._where = sock, where
        self._frames = Frames(told(world))
        self._lock = threading.Lock()
        self._limit_s, self.deadline = 0.0, time.monotonic()
        self._checks: list[Callable[[], None]] = []

    def limit(self, deadline: float, limit_s: float) -> None:
        """Set the deadline (time.monotonic) of all further calls, and the time limit that errors mention."""
        self._limit_s, self.deadline = limit_s, deadline

    def enter(self) -> bytes:
        """Enter the meeting. Returns the key that authenticates connections, empty if the run has a secret."""
        return self._expect(Kind.WELCOME)[1]

    def call_roll(self, me: Member, run: str, secret: bytes) -> Roll:
        """Send this process's record and wait for all other records. RollCallError if they disagree or are missing.

        ``secret`` authenticates the processes to each other; ``run`` is the run's name.
        """
        self._send(frame(Kind.RECORD, me.to_text().encode()))
        return Roll(me.index, read_roll(self._expect(Kind.ROLL)[1], me.world), run, secret)

    def look_after(self, check: Callable[[], None]) -> None:
        """Call ``check`` too in all further waits. It raises to end the wait."""
        self._checks.append(check)

    def check(self) -> None:
        """Raise the fault that ends this start, if it has arrived. Does not wait."""
        with self._lock:
            if (said := self._look()) is not None:
                raise self._confused(f"sent {said[0].name.lower()}")
        for check in self._checks:
            check()

    def set(self, key: str, value: bytes) -> None:
        """Write a note of this process."""
        self._ask(Kind.SET, note(key, value))

    def get(self, key: str) -> bytes | None:
        """Read a note, None before it is written."""
        kind, value = self._ask(Kind.GET, note(key))
        return value if kind is Kind.VALUE else None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return int(AMOUNT.unpack(self._ask(Kind.ADD, note(key, AMOUNT.pack(amount)))[1])[0])

    def through(self) -> None:
        """Report that this process is connected to all others, and wait until all processes are."""
        self._send(frame(Kind.THROUGH))
        self._expect(Kind.OVER)

    def give_up(self, fault: str) -> None:
        """Report that this process cannot join. All others raise this fault, unless another one came first."""
        with contextlib.suppress(OSError, GroupError):
            self._sock.settimeout(_WORD_S)
            self._sock.sendall(fault_frame(fault))
            self._sock.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + _WORD_S
            while self._sock.recv(_READ_BYTES) and time.monotonic() < deadline:
                pass  # closing a socket with unread data could discard the fault on its way

    def close(self) -> None:
        """Close the connection."""
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
            self._look()  # the fault may have arrived before the end, after the answer to the last question
            self._look()
            raise self._gone() from None

    def _expect(self, *kinds: Kind) -> tuple[Kind, bytes]:
        """The next frame, which must have one of these kinds. After the deadline, ask for the missing processes."""
        deadline, asked = self.deadline, False
        while (said := self._take()) is None:
            left = deadline - time.monotonic()
            if left <= 0 and asked:
                raise self._silent()
            if left <= 0:
                asked, deadline = True, time.monotonic() + _WORD_S
                self._send(frame(Kind.LATE, b"%d" % round(self._limit_s)))
                continue
            self._sock.settimeout(min(left, _CHECK_S) if self._checks else left)
            with contextlib.suppress(TimeoutError):
                self._feed(self._receive())
                continue
            for check in self._checks:
                check()
        if said[0] not in kinds:
            raise self._confused(f"sent {said[0].name.lower()}")
        return said

    def _take(self) -> tuple[Kind, bytes] | None:
        """The next received frame, if it is complete. Raises RollCallError for a fault."""
        try:
            said = self._frames.take()
        except Broken as broken:
            raise self._confused(str(broken)) from None
        if said is not None and said[0] is Kind.FAULT:
            raise RollCallError(printable(said[1].decode(errors="replace")))
        return said

    def _look(self) -> tuple[Kind, bytes] | None:
        """The next frame if it has arrived, without waiting and without reading a further one."""
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
            f"the process at {self._where} breaks the rules of the meeting: it {how}; does rank 0 run another version"
            " of Syncline?"
        )
