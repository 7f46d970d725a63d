"""Simulates a slower network in user space: sockets and an event loop that keep to a ``Shape``, without root.

The connections of a process share one full-duplex port: together they send no faster than the rate, and receive no
faster. Each received byte is held for the delay, so a round trip takes twice the delay longer. Connections share the
port fairly: the most urgent frame first, equal ones in turns. The rate counts the bytes in the sockets: on Ethernet a
TCP payload of 1448 bytes takes 1538. Cost: one more copy of received data, and a wake-up per millisecond while the port
is busy.

A pacer is a virtual clock (Zhang, "VirtualClock", SIGCOMM 1990; a token bucket with a debt). It computes the time at
which all passed bytes would have gone through at the rate, and lets more pass while that time is less than a quantum
ahead. It makes up for late wake-ups up to a limit, and so for a pause. At most ``rate * t + burst_bytes`` pass in
t seconds.
``Shape``, ``Pacer`` and ``DelayLine`` are arithmetic, without I/O or clock.
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
from ..nouns import Rate, Seconds
from .links import Link, Loop

QUANTUM_S = 0.002
"""How far ahead of its rate a port may send, in seconds: the amount per wake-up."""

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


class Pacer:
    """One direction of a port. Pass up to ``allowance`` bytes, then call ``spend`` with their number."""

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
    """A connection, with the calls that links make. It writes only granted bytes and reads from a delay line."""

    def __init__(self, sock: socket.socket, delay_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Use a connected socket, which the line closes."""
        self._sock = sock
        self.family: int = sock.family
        self.fileno, self.setblocking, self.setsockopt = sock.fileno, sock.setblocking, sock.setsockopt
        self.recv_into, self.close = sock.recv_into, sock.close
        self.granted = 0
        self.read_turn = self.write_turn = 0  # when it was last this line's turn
        self.readable = self.writable = True
        self.incoming = DelayLine(delay_s)
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

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:
        """Write no more than was granted. BlockingIOError if nothing was granted, or the kernel accepts nothing."""
        views = []
        left = self.granted
        for buffer in buffers:
            if left <= 0:  # below 0 after a record of TLS that was larger than its grant
                break
            view = memoryview(buffer)[:left]
            views.append(view)
            left -= view.nbytes
        if not views:
            raise BlockingIOError
        try:
            sent = self._sock.sendmsg(views)
        except BlockingIOError:
            self.writable = False
            raise
        self.granted -= sent
        return sent

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
        self._out, self._in = Pacer(shape.bytes_per_s), Pacer(shape.bytes_per_s)
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
        """Whether nothing is left to write."""
        return all(link.idle for link in self._links.values())

    def write(self) -> None:
        """Write the bytes that may pass now."""
        self.waiting.clear()
        self._push()
        self._set_timer()

    def turn(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for something to do, and do it."""
        for fd, events in self._epoll.poll(timeout):
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
        """Write as much as the port allows: the most urgent first, and links of equal urgency in turn."""
        while ready := self._writable():
            allowed = self._out.allowance(self._clock())
            if not allowed:
                return
            fd = min(ready, key=lambda fd: (self._links[fd].urgency, self._lines[fd].write_turn))
            line = self._lines[fd]
            line.write_turn = next(self._turns)
            line.granted = granted = min(allowed, _SLICE_BYTES)
            try:
                self._links[fd].flush()
            except OSError:
                self._lose(fd)
            self._out.spend(granted - line.granted)
        self._out.rest(self._clock())

    def _writable(self) -> list[int]:
        return [fd for fd, link in self._links.items() if not link.idle and self._lines[fd].writable]

    def _set_timer(self) -> None:
        """Set the timer to the moment when the port opens for a waiting link, or something in flight arrives."""
        wake_at = min((line.incoming.due_at for line in self._lines.values()), default=float("inf"))
        if self._readable():
            wake_at = min(wake_at, self._in.opens_at)
        if self._writable():
            wake_at = min(wake_at, self._out.opens_at)
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
