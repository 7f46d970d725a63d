"""The event loop of links: which sockets are ready, a bell for other threads, and the end of connections.

Where links are TCP sockets a turn is compiled code (``kernels.streams``): it moves the bodies that links have told it
of, without the interpreter lock, and comes back for what only Python knows.

Used from one thread; only ``wake`` may be called from others.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import termios
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from ..errors import ProtocolError
from .link import Link
from .scratch import address_of

_MOST_MS = 2**31 - 1
"""The longest wait that the kernel can be asked for."""


class Loop:
    """Drives links; ``on_lost(peer)`` is called once for each that ends.

    ``turn`` and ``write`` raise ProtocolError when a peer breaks the protocol; its link has then ended.
    """

    def __init__(self, links: Iterable[Link], on_lost: Callable[[int], None]) -> None:
        self._on_lost = on_lost
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ringing = threading.Lock()
        self._epoll.register(self._bell, select.EPOLLIN)
        self._links = {link.sock.fileno(): link for link in links}
        self._writing: set[int] = set()
        self.waiting: dict[int, Link] = {}
        """Links that have been given frames since the last ``write``; those of a link go in one call."""
        for fd, link in self._links.items():
            self._epoll.register(fd, select.EPOLLIN)
            link.waiting = self.waiting
        self._ready: deque[tuple[int, int]] = deque()  # what a turn has found and nobody has looked at yet
        self._compiled = self._bound_turn() if any(link.compiled for link in self._links.values()) else None

    def _bound_turn(self) -> Callable[[int], int]:
        """The turn of compiled code: it moves what rows of links ask for, and leaves the rest in ``_found``."""
        from ..kernels import streams  # compiled code: loaded where it is used

        most = len(self._links) + 1
        self._rows = np.zeros(max(self._links) + 1, np.int64)
        for fd, link in self._links.items():
            if link.compiled:
                self._rows[fd] = address_of(link.row)
        self._found = np.zeros(2 * most, np.int64)
        events, self._clock = np.zeros(streams.EVENT_WORDS * most, np.int32), np.zeros(2, np.int64)
        turn = streams.turn.bind(self._rows, self._found, events)
        return partial(turn, address_of(events), address_of(self._clock), self._epoll.fileno())

    @property
    def bell(self) -> int:
        """The descriptor of the eventfd that ``wake`` writes to; other processes may be given it."""
        return self._bell

    def write(self) -> None:
        """Write what links have been given since the last time."""
        while self.waiting:
            self._write(self.waiting.popitem()[1])

    def _write(self, link: Link) -> None:
        """Write now what the kernel takes, and the rest when it takes more."""
        fd = link.sock.fileno()
        if fd not in self._links or fd in self._writing:
            return
        try:
            done = link.flush()
        except OSError:
            self._hear_out(fd, link)
            return
        if not done:
            self._writing.add(fd)
            self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT)

    def watch(self, fd: int) -> None:
        """From now on ``turn`` returns when another's descriptor is readable, too, which is the other's to see to."""
        self._epoll.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when ``turn`` would have something to do: for a loop around this one."""
        return self._epoll.fileno()

    @property
    def idle(self) -> bool:
        """True when nothing is left to write."""
        return not self.waiting and not self._writing

    def turn(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for something to do, and do it.

        What is left when an error is raised is done in the next turn: compiled code may have read all that had come.
        """
        ready = self._ready
        if not ready:
            if self._compiled is None:
                ready.extend(self._epoll.poll(timeout))
            elif (count := self._compiled(min(math.ceil(timeout * 1e3), _MOST_MS))) > 0:
                found = self._found[: 2 * count].tolist()
                ready.extend(zip(found[::2], found[1::2], strict=True))
            elif count < 0:
                ready.extend(self._epoll.poll(0.0))  # raises what was wrong; nothing where it was a signal
        while ready:
            fd, events = ready.popleft()
            if fd == self._bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
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
        """Make ``turn`` in another thread return; nothing after ``close``, when the number may be another file's."""
        with self._ringing:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close every connection and the loop's own descriptors."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._epoll.close()
        with self._ringing:
            bell, self._bell = self._bell, -1
            if bell >= 0:
                os.close(bell)

    def _hear_out(self, fd: int, link: Link) -> None:
        """The peer takes nothing any more; what it had sent before it went is still there to be read."""
        there = array("i", [0])
        fcntl.ioctl(fd, termios.FIONREAD, there)
        before, until = -1, link.received_bytes + there[0]  # it may go on sending without end
        while before < link.received_bytes < until:
            before = link.received_bytes
            if not self._fill(fd, link):
                return
        self._lose(fd)

    def _fill(self, fd: int, link: Link) -> bool:
        """Read what has come; False when the link has ended with that."""
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
