"""Framed, non-blocking stream connections to peers, TCP or UNIX, and the event loop that drives them.

A frame is a header of 24 bytes (kind in 8 bits, size of the body in 56, tag, argument) and a body. Outgoing frames wait
in a heap: the smallest priority first, equal ones in order; a frame that has begun is finished first. Once priorities
differ, the kernel's unsent queue is bounded, because urgent frames would wait behind it. Headers and small bodies are
read into a small buffer, the rest of a large body directly to its destination. A received size never allocates memory.

The loop waits for ready sockets, has a bell for other threads, and notices the end of connections. Over TCP its turns
are compiled code (``kernels.streams``): each link writes the rest of a large body into its ``row`` (``kernels.rows``),
and a turn moves these bytes without the interpreter lock.

The owner of a link interprets the kinds of frames, chooses the destination of a body, and is called when it is
complete. UNIX links carry file descriptors, at most one beside a frame. For one thread; others may only call
``Loop.wake``.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import math
import os
import select
import socket
import struct
import termios
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import count
from typing import NamedTuple

import numpy as np

from ..errors import ProtocolError
from ..kernels import rows
from ..kernels.aot.compiled import Bound
from . import checksums
from .bell import DescriptorBell
from .checksums import Checksums
from .scratch import Adding, address_of

HEADER = struct.Struct("<QQQ")
"""Kind (lowest 8 bits) and size of the body, tag, argument."""

CONTROL = float("-inf")
"""The priority of control frames, which precede all others."""

TCP_NOTSENT_LOWAT = 25
_UNSENT_BYTES = 512 * 1024
_INBOX_BYTES = 16 * 1024
_READ_BUDGET_BYTES = 2 * 1024 * 1024
_BATCH_PARTS = 64
_BATCH_BYTES = 256 * 1024
_FORGET_BYTES = 64 * 1024
_LARGE_BYTES = 32 * 1024
"""Compiled code moves the rest of a body if it is at least this large."""
_MOST_MS = 2**31 - 1
"""The longest timeout that the kernel accepts."""


class Frame(NamedTuple):
    """A received header."""

    kind: int
    size: int
    tag: int
    argument: int


Sink = Callable[["Link", Frame], "memoryview | Adding | None"]
"""Called with a header. Returns the destination of the body, the array that it is added to, or None to discard it."""

Arrival = Callable[["Link", Frame], None]
"""Called when a frame's body is complete."""


_Waiting = tuple[float, int, memoryview, memoryview | None, Callable[[], None] | None, int | None]
"""A frame in the heap: priority, serial number, header, body, callback after it, descriptor."""


def broken(peer: int, what: str) -> ProtocolError:
    """The error for a peer that does something (``what``) that no process of this version does."""
    return ProtocolError(
        f"rank {peer} broke the protocol: {what}; do all ranks run the same version on sound machines?", rank=peer
    )


def leave_unpaced(sock: socket.socket) -> None:
    """Let the kernel send at once what a receiver on the same host has room for.

    No network is in between that could be congested. The kernel's default may be BBR, whose timers hold bytes back.
    """
    with contextlib.suppress(OSError):  # the peer may have gone, and a sandbox may refuse it
        if sock.family != socket.AF_UNIX and sock.getsockname()[0] == sock.getpeername()[0]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


class Link:
    """A connection to ``peer``. Its driver calls ``flush`` when it is writable and ``fill`` when it is readable."""

    def __init__(self, sock: socket.socket, peer: int, sink: Sink, arrival: Arrival) -> None:
        sock.setblocking(False)
        self.is_unix = sock.family == socket.AF_UNIX
        if not self.is_unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.peer = peer
        self.row = np.zeros(rows.WORDS, np.int64)
        """The record from which compiled code moves bytes (``kernels.rows``)."""
        self.row[rows.FD] = sock.fileno()
        self.compiled = type(sock) is socket.socket and not self.is_unix
        """Whether compiled code may read and write the socket."""
        self._pending: Callable[[], int] | None = getattr(sock, "pending", None)  # bytes that TLS has already read
        self.waiting: dict[int, Link] = {}
        """By peer: the links with new frames. The driver of several links gives all of them the same dictionary."""
        self._bounded = False
        self._sent_bytes = 0  # includes all bytes that ``row`` was given to write
        self._received_bytes = 0  # without the bytes that ``row`` has read
        self.fds: deque[int] = deque()
        self._sink, self._arrival = sink, arrival
        self._serial = count()
        self._heap: list[_Waiting] = []
        self._going: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        self._going_priority = CONTROL
        self._fd: int | None = None
        inbox = np.zeros(_INBOX_BYTES, np.uint8)
        self._inbox, self._inbox_at = memoryview(inbox), address_of(inbox)
        self._have = 0  # valid bytes in the inbox
        self._frame: Frame | None = None
        self._body: memoryview | None = None
        self._adding: Adding | None = None
        self._got = 0
        self._reading = False  # the row reads the rest of the body
        self._writing = 0  # bytes that the row was given to write
        self._sums: Checksums | None = None
        self._head_bytes = HEADER.size
        self._leaving = False  # the body of ``_large`` leaves
        self._large: tuple[memoryview, int, Callable[[], None] | None] | None = None  # its checksum is still to leave
        self._unproved: Frame | None = None  # whose body has come, but not its checksum

    def sum_frames(self, rank: int) -> None:
        """Add checksums to all frames between process ``rank``, this one, and the peer, who must do so too."""
        self._sums = Checksums(rank, self.peer, self.row)
        self._head_bytes = HEADER.size + checksums.BYTES

    @property
    def sent_bytes(self) -> int:
        """The number of bytes that the kernel has accepted."""
        return self._sent_bytes - int(self.row[rows.OUT_LEFT])

    @property
    def received_bytes(self) -> int:
        """The number of bytes that were read from the kernel."""
        return self._received_bytes + int(self.row[rows.RECEIVED])

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._going and not self._heap and self._large is None

    @property
    def urgency(self) -> float:
        """The priority of the next frame to write. A frame that has begun is finished first."""
        if self._going or not self._heap or self._large is not None:
            return self._going_priority
        return self._heap[0][0]

    def push(
        self,
        kind: int,
        tag: int,
        argument: int = 0,
        body: memoryview | None = None,
        priority: float = CONTROL,
        after: Callable[[], None] | None = None,
        fd: int | None = None,
    ) -> None:
        """Queue a frame. ``after`` is called once the kernel, or a shaped line's queue, has all of it.

        ``fd`` travels with it (UNIX only).
        """
        size = 0 if body is None else body.nbytes
        if priority not in (CONTROL, 0.0) and not self._bounded:
            self._bound_unsent()
        head = memoryview(HEADER.pack(kind | size << 8, tag, argument))
        heapq.heappush(self._heap, (priority, next(self._serial), head, body if size else None, after, fd))
        self.waiting[self.peer] = self

    def _bound_unsent(self) -> None:
        """Keep the kernel's unsent queue short from now on. This costs wake-ups: use it for different priorities."""
        self._bounded = True
        if not self.is_unix:
            self.sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def flush(self) -> bool:
        """Write as much as the kernel accepts. Returns whether nothing is left. OSError if the connection is broken."""
        if self._writing:
            self._account()
        going = self._going
        while True:
            if not going:
                if self.idle:
                    return True
                if self._sums is None:
                    self._gather()
                else:
                    self._gather_summed(self._sums)
            try:
                if self._large is not None:
                    sent = self._send_large()
                else:
                    sent = self.sock.sendmsg([part for part, _ in going]) if self._fd is None else self._pass(self._fd)
            except BlockingIOError:
                sent = 0
            self._sent_bytes += sent
            self._advance(sent)
            if self.compiled and going and going[0][0].nbytes >= _LARGE_BYTES:
                self._leave_to_row(going[0][0])
                return False
            if not sent:
                return False

    def _leave_to_row(self, part: memoryview) -> None:
        """Let compiled code write the rest of a large body as the kernel accepts it."""
        self.row[rows.OUT] = address_of(np.frombuffer(part, np.uint8))
        self.row[rows.OUT_LEFT] = self._writing = part.nbytes
        self._sent_bytes += part.nbytes

    def _account(self) -> None:
        """Count the bytes that compiled code has written."""
        left, given = int(self.row[rows.OUT_LEFT]), self._writing
        self._writing = self.row[rows.OUT_LEFT] = 0
        self._sent_bytes -= left
        self._advance(given - left)

    def _gather(self) -> None:
        """Take the most urgent frames for one call, so that small frames share a call."""
        heap, going, size = self._heap, self._going, 0
        while heap and len(going) < _BATCH_PARTS and size < _BATCH_BYTES:
            fd = heap[0][5]
            if fd is not None and going:
                return  # descriptors travel with the first byte of a call
            self._going_priority, _, head, body, after, _ = heapq.heappop(heap)
            if body is None:
                going.append((head, after))
            else:
                going.append((head, None))
                going.append((body, after))
                size += body.nbytes
            size += HEADER.size
            if fd is not None:
                self._fd = fd
                return

    def _gather_summed(self, sums: Checksums) -> None:
        """The same with checksums. The sum of a large body follows the body, which is summed piece by piece."""
        heap, going, size = self._heap, self._going, 0
        if self._large is not None:
            large, first, called = self._large
            if not self._leaving:
                sums.begin(first)
                self._leaving = True
                going.append((large, None))
                return
            going.append((sums.end(), called))
            self._large, self._leaving = None, False
        while heap and len(going) < _BATCH_PARTS and size < _BATCH_BYTES:
            self._going_priority, _, plain, body, after, _ = heapq.heappop(heap)
            head, first = sums.seal(plain)
            if body is None:
                going.append((head, after))
                continue
            going.append((head, None))
            if body.nbytes > rows.PIECE_BYTES:
                self._large = body, first, after
                return
            going.append((body, None))
            going.append((sums.of_body(body, first), after))
            size += body.nbytes

    def _send_large(self) -> int:
        """Write what precedes a large body, or its next piece, whose checksum is then computed."""
        if not self._leaving:
            return self.sock.sendmsg([part for part, _ in self._going], [], socket.MSG_MORE)
        piece = self._going[0][0][: rows.PIECE_BYTES]
        sent = self.sock.sendmsg([piece])
        assert self._sums is not None
        self._sums.leaves(piece[:sent])
        return sent

    def _pass(self, fd: int) -> int:
        """Write the first part of a frame, with its descriptor."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]
        sent = self.sock.sendmsg([self._going[0][0]], rights)
        self._fd = None
        return sent

    def _advance(self, sent: int) -> None:
        going = self._going
        while going and sent >= going[0][0].nbytes:
            part, after = going.popleft()
            sent -= part.nbytes
            if after is not None:
                after()
        if sent:
            part, after = going[0]
            going[0] = part[sent:], after

    def fill(self) -> bool:
        """Read arrived bytes, up to a budget. False if the peer has closed. Raises OSError and ProtocolError."""
        left = _READ_BUDGET_BYTES
        while left > 0 or (self._pending is not None and self._pending()):
            if self._reading:
                before = int(self.row[rows.RECEIVED])
                came = self._fill_by_row()
                if came == rows.NOTHING:
                    return self._fill_by_hand()
                if came == rows.OPEN:
                    return True
                left -= int(self.row[rows.RECEIVED]) - before
                continue
            space, frame = self._inbox[self._have :], self._frame
            into, room, direct = [space], space.nbytes, 0
            if frame is not None:
                rest = self._rest(frame)
                direct = rest.nbytes
                if self._got + direct < frame.size:
                    into, room = [rest], direct
                else:
                    into, room = [rest, space], direct + room
            try:
                got = self._read(into) if self.is_unix else self.sock.recvmsg_into(into)[0]
            except BlockingIOError:
                return True
            if got == 0:
                return False
            self._received_bytes += got
            left -= got
            self._have += max(got - direct, 0)
            if frame is not None and self._sums is not None:
                self._sums.comes(rest[: min(got, direct)])
            if frame is not None and not self._took(frame, min(got, direct)):
                continue
            self._parse()
            if self.is_unix:
                self._check_fds()
            if got < room:
                return True
        return True

    def _fill_by_row(self) -> int:
        """Let compiled code read the rest of a body, unless it has. Returns its result."""
        from ..kernels import streams  # compiled code: loaded where it is used

        came: int = streams.fill(self.row) if self.row[rows.LEFT] else rows.COMPLETE
        if came == rows.COMPLETE:
            self._complete()
        return came

    def _fill_by_hand(self) -> bool:
        """Find the reason why compiled code could not read. False if the peer has closed. Raises OSError."""
        row, left = self.row, int(self.row[rows.LEFT])
        assert self._adding is not None or self._body is not None
        room = self._body[-left:] if self._adding is None else self._adding.room()  # type: ignore[index]
        try:
            got = self.sock.recv_into(room)
        except BlockingIOError:
            return True
        row[rows.RECEIVED] += got
        if self._sums is not None:
            self._sums.comes(room[:got])
        if self._adding is not None:
            self._adding.took(got)
        else:
            row[rows.INTO] += got
            row[rows.LEFT] -= got
        return got > 0

    def _read(self, into: list[memoryview]) -> int:
        """Read arrived bytes and the descriptors beside them."""
        room = socket.CMSG_LEN(4)  # of several descriptors in one call the kernel keeps the first and sets a flag
        got, ancillary, flags, _ = self.sock.recvmsg_into(into, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                self.fds.extend(found)
        if flags & socket.MSG_CTRUNC:
            raise broken(
                self.peer, "descriptors that it passed were lost (or this process has no free ones: ulimit -n)"
            )
        return got

    def _check_fds(self) -> None:
        """Allow one waiting descriptor, for a frame that has begun: it comes with the frame's first byte."""
        if self.fds and (len(self.fds) > 1 or not (self._have or self._frame)):
            raise broken(self.peer, "it passed a descriptor beside a frame that takes none")

    def _rest(self, frame: Frame) -> memoryview:
        """The memory for the next bytes of a body, of a piece of it if it is added or discarded."""
        if self._adding is not None:
            return self._adding.room()
        if self._body is not None:
            return self._body[self._got :]
        return memoryview(bytearray(min(_FORGET_BYTES, frame.size - self._got)))

    def _took(self, frame: Frame, nbytes: int) -> bool:
        """Record ``nbytes`` of a body. Returns whether it is complete."""
        self._got += nbytes
        if self._adding is not None:
            self._adding.took(nbytes)
        if self._got == frame.size:
            self._complete()
            return True
        if self.is_unix:
            self._check_fds()
        return False

    def _parse(self) -> None:
        """Take complete headers and the starts of bodies out of the inbox."""
        at, sums = 0, self._sums
        while self._have - at >= (self._head_bytes if self._unproved is None else checksums.BYTES):
            if self._unproved is not None:
                at += checksums.BYTES
                self._prove(self._unproved, self._inbox[at - checksums.BYTES : at])
                continue
            if sums is not None:
                sums.check_head(self._inbox[at : at + self._head_bytes])
            first, tag, argument = HEADER.unpack_from(self._inbox, at)
            at += self._head_bytes
            size = first >> 8
            frame = Frame(first & 0xFF, size, tag, argument)
            if size:
                body, come = self._sink(self, frame), self._have - at
                if come < size:
                    self._begin(frame, body, at, come)
                    at += come
                    break
                if sums is not None:
                    sums.comes(self._inbox[at : at + size])
                if isinstance(body, Adding):
                    body.begin(self.row, size, self._inbox_at + at, size)
                    body.close()
                elif body is not None:
                    body[:size] = self._inbox[at : at + size]
                at += size
            if size and sums is not None:
                self._unproved = frame
            else:
                self._arrival(self, frame)
        left = self._have - at
        if at and left:
            self._inbox[:left] = bytes(self._inbox[at : self._have])
        self._have = left

    def _prove(self, frame: Frame, come: memoryview) -> None:
        """Compare the checksum behind the body of a frame, which has then arrived."""
        assert self._sums is not None
        self._sums.check_body(come, frame.size)
        self._unproved = None
        self._arrival(self, frame)

    def _begin(self, frame: Frame, body: memoryview | Adding | None, at: int, come: int) -> None:
        """Begin a body whose first ``come`` bytes are in the inbox behind its header."""
        self._frame, self._got = frame, come
        if self._sums is not None:
            self._sums.comes(self._inbox[at : at + come])
        if isinstance(body, Adding):
            self._adding = body
            body.begin(self.row, frame.size, self._inbox_at + at, come)
            self._reading = self.compiled
            return
        if body is None:
            return
        self._body = body
        body[:come] = self._inbox[at : at + come]
        left = frame.size - come
        if self.compiled and left >= _LARGE_BYTES:
            into = address_of(np.frombuffer(body, np.uint8)) + come
            self.row[rows.CODE], self.row[rows.INTO], self.row[rows.LEFT] = rows.AS_IS, into, left
            self._reading = True

    def _complete(self) -> None:
        """Finish a body that has arrived in several reads."""
        frame = self._frame
        assert frame is not None
        if self._adding is not None:
            self._adding.close()
        self._frame = self._body = self._adding = None
        self._reading = False
        if self._sums is None:
            self._arrival(self, frame)
        else:
            self._unproved = frame

    def close(self) -> None:
        """Close the socket and all descriptors that were not taken."""
        self.sock.close()
        while self.fds:
            os.close(self.fds.popleft())


def moved_bytes(links: Collection[Link]) -> int:
    """The bytes sent and received over all these links."""
    aside = [int(link.row[rows.RECEIVED]) - int(link.row[rows.OUT_LEFT]) for link in links]
    return sum(aside) + sum([link._sent_bytes + link._received_bytes for link in links])


class Loop:
    """Drives links. ``on_lost(peer)`` is called once for each link that ends.

    ``turn`` and ``write`` raise ProtocolError for a peer that breaks the protocol; its link has then ended.
    """

    def __init__(self, links: Iterable[Link], on_lost: Callable[[int], None]) -> None:
        self._on_lost = on_lost
        self._epoll = select.epoll()
        self._bell = DescriptorBell()
        self.bell: int = self._bell.fileno()
        """The descriptor of the eventfd that ``wake`` writes to; other processes may be given it."""
        self._epoll.register(self.bell, select.EPOLLIN)
        self._links = {link.sock.fileno(): link for link in links}
        self._writing: set[int] = set()
        self.waiting: dict[int, Link] = {}
        """The links with new frames since the last ``write``. The frames of a link go in one call."""
        for fd, link in self._links.items():
            self._epoll.register(fd, select.EPOLLIN)
            link.waiting = self.waiting
        self._ready: deque[tuple[int, int]] = deque()  # events that are not handled yet
        self._compiled = self._bind_turn() if any(link.compiled for link in self._links.values()) else None

    def _bind_turn(self) -> Bound:
        """The compiled turn. It moves the bytes in the rows of links and leaves all other events in ``_found``."""
        from ..kernels import streams  # compiled code: loaded where it is used

        most = len(self._links) + 1
        self._rows = np.zeros(max(self._links) + 1, np.int64)
        for fd, link in self._links.items():
            if link.compiled:
                self._rows[fd] = address_of(link.row)
        self._found = np.zeros(2 * most, np.int64)
        events, self._time = np.zeros(streams.EVENT_WORDS * most, np.int32), np.zeros(2, np.int64)
        turn: Bound = streams.turn.bind(self._rows, self._found, events)
        turn.words[-4:-1] = [address_of(events), address_of(self._time), self._epoll.fileno()]
        return turn

    def write(self) -> None:
        """Write queued frames: as much as the kernel accepts now, and the rest in later turns."""
        while self.waiting:
            link = self.waiting.popitem()[1]
            fd = link.sock.fileno()
            if fd not in self._links or fd in self._writing:
                continue
            try:
                done = link.flush()
            except OSError:
                self._hear_out(fd, link)
                continue
            if not done:
                self._writing.add(fd)
                self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT)

    def watch(self, fd: int) -> None:
        """Let ``turn`` also return when this descriptor is readable. Its owner must handle that."""
        self._epoll.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        """A descriptor that is readable when ``turn`` has something to do, for a loop around this one."""
        return self._epoll.fileno()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to write."""
        return not self.waiting and not self._writing

    def turn(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for events and handle them. After an error the next turn handles the rest."""
        ready = self._ready
        if not ready:
            if self._compiled is None:
                ready.extend(self._epoll.poll(timeout))
            else:
                self._compiled.words[-1] = min(math.ceil(timeout * 1e3), _MOST_MS)
                left = self._compiled.run()
                if left > 0:
                    found = self._found[: 2 * left].tolist()
                    ready.extend(zip(found[::2], found[1::2], strict=True))
                elif left < 0:
                    ready.extend(self._epoll.poll(0.0))  # raises the error, if it was no signal
        while ready:
            fd, events = ready.popleft()
            if fd == self.bell:
                self._bell.rang()
                continue
            link = self._links.get(fd)
            if link is None:
                continue
            if events & ~select.EPOLLOUT and not self._fill(fd, link):
                continue
            try:
                if events & select.EPOLLOUT and link.flush():
                    self._writing.discard(fd)
                    self._epoll.modify(fd, select.EPOLLIN)
            except OSError:
                self._hear_out(fd, link)

    def wake(self) -> None:
        """Make ``turn`` in another thread return. Does nothing after ``close``."""
        self._bell.ring()

    def close(self) -> None:
        """Close every connection and the loop's own descriptors."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._epoll.close()
        self._bell.close()

    def _hear_out(self, fd: int, link: Link) -> None:
        """Read the bytes that a peer sent before its connection broke."""
        there = array("i", [0])
        fcntl.ioctl(fd, termios.FIONREAD, there)
        before, until = -1, link.received_bytes + there[0]  # the peer may send forever
        while before < link.received_bytes < until:
            before = link.received_bytes
            if not self._fill(fd, link):
                return
        self._lose(fd)

    def _fill(self, fd: int, link: Link) -> bool:
        """Read arrived bytes. False if the link has then ended."""
        try:
            if link.fill():
                return True
        except OSError:
            pass
        except ProtocolError:
            self._lose(fd)
            raise
        self._lose(fd)
        return False

    def _lose(self, fd: int) -> None:
        link = self._links.pop(fd, None)
        if link is None:
            return
        self._writing.discard(fd)
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        if self._compiled is not None:
            self._rows[fd] = 0
        link.close()
        self._on_lost(link.peer)
