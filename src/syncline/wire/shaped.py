"""Simulates a slower network in user space: sockets and an event loop that keep to a ``Shape``, without root.

The connections of a process share one full-duplex port: together they send no faster than the rate, and receive no
faster. Each received byte is held for the delay, so a round trip takes twice the delay longer. Connections share the
port fairly: the most urgent frame first, equal ones in turns. The rate counts the bytes in the sockets: on Ethernet a
TCP payload of 1448 bytes takes 1538. Cost: one more copy of sent and of received data, and a wake-up per millisecond
while the port is busy.

What is sent waits in a queue, as in the kernel and the card of a real machine: the sender goes on as soon as the queue
has accepted its bytes, and the queue empties at the rate, however late the process wakes up (``Departures``). A byte
leaves when all bytes before it and itself have taken their time, counted from the moment at which they were there to
send. So a pause gives nothing for free.

Arriving bytes have been waiting for an unknown time. ``Pacer`` is a virtual clock (Zhang, "VirtualClock", SIGCOMM 1990;
a token bucket with a debt). It computes the time at which all passed bytes would have gone through at the rate, and
lets more pass while that time is less than a quantum ahead. It makes up for late wake-ups up to a limit, and so for a
pause. At most ``rate * t + burst_bytes`` pass in t seconds. It only matters where several senders, or one without a
rate, send more than the port can take.
``Shape``, ``Departures``, ``Pacer`` and ``DelayLine`` are arithmetic, without I/O or clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ..errors import UsageError
from ..kernels import rows
from ..nouns import Rate, Seconds
from .links import TCP_NOTSENT_LOWAT, Link, Loop

QUEUE_S = 0.05
"""A connection's queue holds the bytes of so many seconds at the whole rate."""
LEAST_QUEUE_BYTES, MOST_QUEUE_BYTES = 64 * 1024, 4 * 1024 * 1024
"""It holds at least and at most so many, whatever the rate."""

WAKE_S = 0.001
"""The time between two departures from a queue."""

QUANTUM_S = 0.002
"""How far ahead of its rate a port may receive, in seconds."""

LATE_S = 0.02
"""The maximum delay of a wake-up that the port makes up for."""

PACKET_BYTES = 1500
"""The least number of bytes per call: smaller amounts wait for the next quantum."""

WINDOW_BYTES = 256 * 1024 * 1024
"""The maximum number of bytes in flight per connection. On a line with a larger product of rate and delay, this
limits the throughput, as in TCP."""

NO_DELAY = Seconds(0.0)

_LEAST_RATE, _GREATEST_RATE = 1e3, 1e12
_GREATEST_DELAY_S = 10.0

_SLICE_BYTES = 64 * 1024
"""The bytes that a connection may pass in one turn."""

_TURN_BYTES = 4 * 1024 * 1024
"""The bytes to read before the loop returns to its caller."""


@dataclass(frozen=True)
class Shape:
    """A line's ``rate`` in bits per second (None: unlimited) and one-way ``delay``; UsageError for impossible ones."""

    rate: Rate | None = None
    delay: Seconds = NO_DELAY

    def __post_init__(self) -> None:
        if self.rate is not None and not _LEAST_RATE <= self.rate <= _GREATEST_RATE:
            raise UsageError(f"a rate of {self.rate:g} bit/s cannot be shaped: give one from 1Kbit to 1Tbit")
        if not 0 <= self.delay <= _GREATEST_DELAY_S:
            raise UsageError(f"a delay of {self.delay:g} s cannot be shaped: give one from 0s to 10s, one way")

    @property
    def plain(self) -> bool:
        """Whether the line has neither a rate nor a delay."""
        return self.rate is None and not self.delay > 0

    @property
    def bytes_per_s(self) -> float | None:
        """The rate in bytes per second."""
        return None if self.rate is None else self.rate / 8


class Departures:
    """The bytes that leave a port. Call ``begin`` when bytes come to wait at a port that had none that could leave."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate = bytes_per_s
        self._free_at = float("-inf")  # when all bytes that have left were through

    def begin(self, now: float) -> None:
        """Note that bytes may leave from now on, and none could before."""
        self._free_at = max(self._free_at, now)

    def due(self, now: float) -> int:
        """The bytes that are through at ``now``, if so many have been waiting."""
        return WINDOW_BYTES if self._rate is None else int((now - self._free_at) * self._rate + 0.5)

    def spend(self, nbytes: int) -> None:
        """Count bytes that have left."""
        if self._rate is not None:
            self._free_at += nbytes / self._rate

    def opens_at(self, waiting: int) -> float:
        """The time at which ``waiting`` bytes are through, or a part of them that is worth a wake-up."""
        if self._rate is None:
            return self._free_at
        return self._free_at + min(waiting, max(PACKET_BYTES, WAKE_S * self._rate)) / self._rate


class Pacer:
    """The bytes that enter a port. Pass up to ``allowance`` bytes, then call ``spend`` with their number."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate = bytes_per_s
        self._ahead_s = QUANTUM_S if bytes_per_s is None else max(QUANTUM_S, PACKET_BYTES / bytes_per_s)
        self._free_at = float("-inf")  # when all passed bytes would have gone through

    @property
    def burst_bytes(self) -> float:
        """The bytes that may pass beyond rate x time in any interval."""
        return float("inf") if self._rate is None else self._rate * (self._ahead_s + LATE_S)

    def allowance(self, now: float) -> int:
        """Bytes that may pass at ``now``: 0, or at least a packet."""
        if self._rate is None:
            return WINDOW_BYTES
        self._free_at = max(self._free_at, now - LATE_S)
        # Half a byte more, or a quantum of exactly one packet would round down to none.
        count = int((now + self._ahead_s - self._free_at) * self._rate + 0.5)
        return count if count >= PACKET_BYTES else 0

    def spend(self, nbytes: int) -> None:
        """Count bytes that have passed."""
        if self._rate is not None:
            self._free_at += nbytes / self._rate

    def rest(self, now: float) -> None:
        """Note that no connection wants to pass at ``now``: the port does not save up unused time."""
        if self._rate is not None:
            self._free_at = max(self._free_at, now)

    @property
    def opens_at(self) -> float:
        """The time at which a whole quantum may pass again."""
        return self._free_at


class DelayLine:
    """Bytes in flight towards one receiver: put in when they arrive, taken out ``delay_s`` later, in order."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._parts: deque[tuple[float, memoryview]] = deque()  # the end of the stream is an empty part
        self.nbytes = 0

    def put(self, data: bytes, now: float) -> None:
        """Bytes have arrived; none at all is the end of the stream."""
        self._parts.append((now + self._delay_s, memoryview(data)))
        self.nbytes += len(data)

    @property
    def full(self) -> bool:
        """Whether no more bytes fit, so that the sender has to wait."""
        return self.nbytes >= WINDOW_BYTES

    @property
    def due_at(self) -> float:
        """The time at which the next bytes, or the end, may be taken; infinite if nothing is in flight."""
        return self._parts[0][0] if self._parts else float("inf")

    def take(self, into: Sequence[memoryview], now: float) -> int | None:
        """Move the due bytes into the views, one after the other. Returns their number, 0 at the end, None if
        nothing is due."""
        if self.due_at > now:
            return None
        taken = 0
        for view in into:
            at = 0
            while at < view.nbytes and self.due_at <= now:
                due, part = self._parts[0]
                if not part.nbytes:
                    self.nbytes -= taken
                    return taken  # the end stays, to be found again
                count = min(part.nbytes, view.nbytes - at)
                view[at : at + count] = part[:count]
                at += count
                taken += count
                if count == part.nbytes:
                    self._parts.popleft()
                else:
                    self._parts[0] = due, part[count:]
        self.nbytes -= taken
        return taken


class Line:
    """A connection, with the calls that links make. It writes into a queue and reads from a delay line."""

    def __init__(self, sock: socket.socket, shape: Shape, clock: Callable[[], float] = time.monotonic) -> None:
        """Use a connected socket, which the line closes."""
        self._sock = sock
        self.family: int = sock.family
        self.fileno, self.setblocking, self.recv_into = sock.fileno, sock.setblocking, sock.recv_into
        self.queue = bytearray()
        wanted = MOST_QUEUE_BYTES if shape.bytes_per_s is None else int(shape.bytes_per_s * QUEUE_S)
        self._most = min(max(wanted, LEAST_QUEUE_BYTES), MOST_QUEUE_BYTES)
        self.read_turn = self.write_turn = 0  # when it was last this line's turn
        self.readable = self.writable = True
        self.incoming = DelayLine(shape.delay)
        self._clock = clock

    def pull(self, nbytes: int) -> int:
        """Move up to ``nbytes`` bytes from the kernel into the delay line."""
        try:
            data = self._sock.recv(nbytes)
        except BlockingIOError:
            self.readable = False
            return 0
        except OSError:  # the connection broke, which the receiver notices after the bytes before
            data = b""
        self.readable = bool(data)
        self.incoming.put(data, self._clock())
        return len(data)

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        """Set an option of the socket. A limit of its unsent bytes holds for the queue, which is before it."""
        if (level, option) == (socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT):
            self._most = min(self._most, value)
        else:
            self._sock.setsockopt(level, option, value)

    @property
    def full(self) -> bool:
        """Whether the queue accepts nothing."""
        return len(self.queue) >= self._most

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:
        """Accept bytes into the queue. BlockingIOError if it is full."""
        if self.full:
            raise BlockingIOError
        before = len(self.queue)
        for buffer in buffers:
            self.queue += memoryview(buffer)[: self._most - len(self.queue)]
        return len(self.queue) - before

    def send(self, nbytes: int) -> int:
        """Let up to ``nbytes`` leave. Returns the number that left.

        It may exceed ``nbytes``: a record that TLS could not send before leaves whole. OSError if the line is broken.
        """
        with memoryview(self.queue) as queued, queued[:nbytes] as part:
            try:
                sent = self._sock.sendmsg([part])
            except BlockingIOError:
                self.writable = False
                return 0
        del self.queue[:sent]
        return sent

    def close(self) -> None:
        """Give the rest of the queue to the kernel, as far as it takes it at once, and close the connection."""
        with contextlib.suppress(OSError):
            while self.queue and self.send(len(self.queue)):
                pass
        self.queue = bytearray()
        self._sock.close()

    def recvmsg_into(self, buffers: Iterable[Any], *_: Any) -> tuple[int, list[Any], int, Any]:
        """Read the due bytes. BlockingIOError if none are due."""
        got = self.incoming.take([memoryview(buffer) for buffer in buffers], self._clock())
        if got is None:
            raise BlockingIOError
        return got, [], 0, None


class ShapedLoop(Loop):
    """Drives links whose sockets are lines, through one port."""

    def __init__(
        self,
        links: Iterable[Link],
        on_lost: Callable[[int], None],
        shape: Shape,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(links, on_lost)
        self._out, self._in = Departures(shape.bytes_per_s), Pacer(shape.bytes_per_s)
        self._clock = clock
        self._turns = count(1)
        self._timer = _Timer()
        self._epoll.register(self._timer.fd, select.EPOLLIN)
        self._lines: dict[int, Line] = {}
        for fd, link in self._links.items():
            line: Any = link.sock
            assert isinstance(line, Line)
            self._lines[fd] = line
            # Edge-triggered: a socket with more bytes than may pass now must not end every wait.
            self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to write, in a queue either."""
        return all(link.idle and not self._lines[fd].queue for fd, link in self._links.items())

    def write(self) -> None:
        """Write the bytes that may pass now."""
        self.waiting.clear()
        self._push()
        self._set_timer()

    def turn(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for something to do, and do it."""
        ready = self._epoll.poll(timeout)
        if not self._writable():  # all that waits is for peers that take nothing: the port was free
            self._out.begin(self._clock())
        for fd, events in ready:
            if fd == self.bell:
                self._bell.rang()
            elif fd == self._timer.fd:
                self._timer.read()
            elif fd in self._lines:
                line = self._lines[fd]
                line.readable = line.readable or bool(events & ~select.EPOLLOUT)
                line.writable = line.writable or bool(events & select.EPOLLOUT)
        self._pull()
        self._deliver()
        self._push()
        self._set_timer()

    def close(self) -> None:
        """Close every connection and the loop's own descriptors."""
        super().close()
        self._lines.clear()
        self._timer.close()

    def _pull(self) -> None:
        """Read as many bytes as the port allows into the delay lines, from the connections in turn."""
        limit = _TURN_BYTES
        while limit > 0 and (ready := self._readable()):
            allowed = self._in.allowance(self._clock())
            if not allowed:
                return
            line = min(ready, key=lambda line: line.read_turn)
            line.read_turn = next(self._turns)
            got = line.pull(min(allowed, _SLICE_BYTES))
            self._in.spend(got)
            limit -= got
        if limit > 0:
            self._in.rest(self._clock())

    def _readable(self) -> list[Line]:
        return [line for line in self._lines.values() if line.readable and not line.incoming.full]

    def _deliver(self) -> None:
        """Deliver delayed bytes to the links."""
        for fd, line in list(self._lines.items()):
            while fd in self._links and line.incoming.due_at <= self._clock():
                self._fill(fd, self._links[fd])

    def _push(self) -> None:
        """Let leave what is due: the most urgent first, and links of equal urgency in turn. Fill the queues again."""
        now = self._clock()
        self._leave(now)
        while accepting := [fd for fd, link in self._links.items() if not link.idle and not self._lines[fd].full]:
            if not self._writable():
                self._out.begin(now)
            for fd in accepting:
                self._links[fd].flush()
                self._count(fd)
            self._leave(now)

    def _leave(self, now: float) -> None:
        """Let bytes leave the queues."""
        while ready := self._writable():
            waiting = sum(len(self._lines[fd].queue) for fd in ready)
            due = self._out.due(now)
            if due < min(waiting, PACKET_BYTES):
                return
            fd = min(ready, key=lambda fd: (self._links[fd].urgency, self._lines[fd].write_turn))
            line = self._lines[fd]
            line.write_turn = next(self._turns)
            try:
                self._out.spend(line.send(min(due, _SLICE_BYTES)))
                broken = False
            except OSError:
                broken = True
            if broken:  # outside, where no traceback holds views of the queue any more
                self._lose(fd)
            else:
                self._count(fd)

    def _count(self, fd: int) -> None:
        """Let the link count the bytes in its queue as not sent."""
        self._links[fd].row[rows.OUT_LEFT] = len(self._lines[fd].queue)

    def _writable(self) -> list[int]:
        """The connections on which bytes can leave."""
        return [fd for fd, line in self._lines.items() if line.queue and line.writable]

    def _set_timer(self) -> None:
        """Set the timer to the moment when the port opens for a waiting link, or something in flight arrives."""
        wake_at = min((line.incoming.due_at for line in self._lines.values()), default=float("inf"))
        if self._readable():
            wake_at = min(wake_at, self._in.opens_at)
        if ready := self._writable():
            wake_at = min(wake_at, self._out.opens_at(sum(len(self._lines[fd].queue) for fd in ready)))
        self._timer.set(wake_at)

    def _lose(self, fd: int) -> None:
        self._lines.pop(fd, None)
        super()._lose(fd)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class _Timer:
    """A descriptor that becomes readable at a time of ``time.monotonic``: epoll itself counts in milliseconds."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)  # os.timerfd_create came with Python 3.13
        self.fd: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._set_to = float("inf")

    def set(self, when: float) -> None:
        """Become readable at ``when``, at once when that has passed, never when it is infinite."""
        if when == self._set_to:
            return
        self._set_to = when
        nanoseconds = 0 if when == float("inf") else round(max(when, 1e-9) * 1e9)  # 0 disarms
        value = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(nanoseconds, 10**9)))
        self._libc.timerfd_settime(self.fd, 1, ctypes.byref(value), None)  # 1: an absolute time

    def read(self) -> None:
        """Reset the descriptor: it is no longer readable."""
        self._set_to = float("inf")
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
