"""Transport over TCP, one connection per pair of processes.

A message of up to ``INLINE_BYTES`` is sent at once, and the receiver keeps it until a receive is posted. A larger one
waits at the sender for the receiver's credit. Posting a receive sends that credit, so a receive that is posted in time
costs no round trip. Bodies are written from the sender's buffer and read into the receiver's: the only copies are the
kernel's two. Messages that cannot go to the caller's memory (``borrow``, or an early message) use pooled scratch.

Received frames are validated: a large message without a credit, or more credits or unclaimed messages than a correct
process can have in flight, is a ProtocolError that ``poll`` raises. A message that does not fit is read and discarded.

Traffic of a message: its bytes and a header of 24; a large one also costs 24 bytes back for its credit. Checksums take
8 bytes more for a header and for a body.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from socket import socket
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..nouns import Rate, Seconds
from ..registry import register
from ..wire.links import CONTROL, Frame, Link, Loop, broken, leave_unpaced
from ..wire.scratch import Adding, Scratch, can_add
from ..wire.shaped import NO_DELAY, Line, Shape, ShapedLoop
from . import INLINE_BYTES, Bytes, Handle
from ._operations import UNCLAIMED_BYTES, LoopTransport, Receive

_DATA, _CREDIT = 1, 2

_MOST_CREDITS = 1 << 18
"""The most credits of a peer for messages that this process has not started to send: one per posted large receive."""


@dataclass
class _Arrived:
    """A received message, and the memory that it is in."""

    data: Bytes | None
    size: int


@dataclass
class _Reading:
    """The message whose body a link is reading."""

    receive: Receive | None
    data: Bytes | None
    """None while the body is being added, or discarded because it does not fit."""


def _check(rate: Rate | None, delay: Seconds, checksum: str) -> None:  # noqa: ARG001  # any checksum is possible
    Shape(rate, delay)


@register("transports", "tcp", connection="tcp", one_host=False, check=_check, sums="checksum")
class Tcp(LoopTransport):
    """TCP, one connection per pair of processes; ``rate`` and ``delay`` simulate a slower network.

    ``socks`` are authenticated connections of process ``rank`` to all others. ``rate`` limits the payload that they
    send together, and that they receive together, in bits per second. Every byte arrives ``delay`` seconds late. With
    ``checksum=on`` bytes that were altered on their way raise an AlteredError.
    """

    name = "tcp"
    chunk_bytes = 4 * 1024 * 1024
    """Most bytes of a chunk of a segment: a sum is sent on while it is in the cache, and messages are still few."""

    def __init__(
        self,
        rank: int,
        socks: Mapping[int, socket],
        *,
        rate: Rate | None = None,
        delay: Seconds = NO_DELAY,
        checksum: Literal["off", "on"] = "off",
    ) -> None:
        shape = Shape(rate, delay)
        for sock in socks.values():
            leave_unpaced(sock)
        ends: Mapping[int, Any] = socks if shape.plain else {peer: Line(sock, shape) for peer, sock in socks.items()}
        super().__init__(rank, {peer: Link(sock, peer, self._sink, self._arrival) for peer, sock in ends.items()})
        if checksum == "on":
            for link in self._links.values():
                link.sum_frames(rank)
        links = self._links.values()
        self._loop = Loop(links, self._lost) if shape.plain else ShapedLoop(links, self._lost, shape)
        self.scratch = Scratch()
        self._reading: dict[int, _Reading] = {}
        self._waiting: dict[tuple[int, int], deque[tuple[Handle, Bytes, float]]] = {}  # sends without credit
        self._credits: dict[tuple[int, int], int] = {}  # credits that came before their send
        self._early = dict.fromkeys(socks, 0)  # the number of these per peer
        self._offered: dict[tuple[int, int], int] = {}  # credits sent and not used yet
        self._wanted: dict[tuple[int, int], int] = {}  # large receives posted and not filled

    def lends_from(self, src: int) -> bool:  # noqa: ARG002
        """Always False: received data are in scratch memory."""
        return False

    def allocate(self, nbytes: int) -> Bytes:
        """Ordinary memory: the kernel can use any."""
        return np.zeros(nbytes, np.uint8)

    def send(self, dst: int, tag: int, data: Bytes, priority: float = 0.0, owner: Any = None) -> Handle:
        """Sent at once if small or already requested; done when the kernel has all of it."""
        handle = Handle("send", dst, tag, data.nbytes, owner)
        if not self._operations.admit(handle):
            return handle
        key = dst, tag
        large = data.nbytes > INLINE_BYTES
        # A waiting message of this tag must go first: messages of one tag keep their order.
        if key in self._waiting or (large and not self._credits.get(key)):
            self._waiting.setdefault(key, deque()).append((handle, data, priority))
            return handle
        if large:
            self._spend(self._credits, key)
            self._early[dst] -= 1
        after = partial(self._operations.finish, handle)
        self._links[dst].push(_DATA, tag, 0, memoryview(data), priority, after)
        return handle

    def add(self, src: int, tag: int, into: NDArray[Any], owner: Any = None) -> Handle:
        return self._post(Receive(Handle("add", src, tag, into.nbytes, owner), adds=into))

    def release(self, handle: Handle) -> None:
        self.scratch.give(handle.note)
        handle.payload = handle.note = None

    def adds_from(self, src: int, dtype: np.dtype[Any]) -> bool:  # noqa: ARG002
        """If the compiled code supports the type."""
        return can_add(dtype)

    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """The bytes written to and read from the sockets, credits included."""
        sent = {peer: link.sent_bytes for peer, link in self._links.items()}
        return sent, {peer: link.received_bytes for peer, link in self._links.items()}

    def close(self) -> None:
        if not self._operations.closed:
            self._operations.closed = True
            self._loop.close()

    def _post(self, receive: Receive) -> Handle:
        handle = receive.handle
        key = handle.peer, handle.tag
        if self._operations.post(receive) and handle.nbytes > INLINE_BYTES:
            self._wanted[key] = self._wanted.get(key, 0) + 1
            # If a small message has filled an earlier large receive, that receive's credit is still unused.
            if self._offered.get(key, 0) < self._wanted[key]:
                self._offered[key] = self._offered.get(key, 0) + 1
                self._links[handle.peer].push(_CREDIT, handle.tag, priority=CONTROL)
        return handle

    def _sink(self, link: Link, frame: Frame) -> memoryview | Adding | None:
        if frame.kind != _DATA:
            raise broken(link.peer, f"{frame.size} bytes came behind a frame of kind {frame.kind}, which has no body")
        if frame.size > INLINE_BYTES and (link.peer, frame.tag) not in self._offered:
            raise broken(link.peer, f"a message of {frame.size} bytes came without being asked for")
        receive = self._operations.matcher.take(link.peer, frame.tag)
        if receive is not None and frame.size > receive.handle.nbytes:
            self._reading[link.peer] = _Reading(receive, None)
            return None
        if receive is None and frame.size > UNCLAIMED_BYTES:
            raise broken(link.peer, f"a message of {frame.size} bytes came for a receive that a smaller one had filled")
        if receive is not None and receive.adds is not None and frame.size > INLINE_BYTES:
            self._reading[link.peer] = _Reading(receive, None)
            return Adding(receive.adds, self.scratch)
        in_place = None if receive is None else receive.into
        data = self.scratch.take(frame.size) if in_place is None else in_place
        self._reading[link.peer] = _Reading(receive, data)
        return memoryview(data[: frame.size])

    def _arrival(self, link: Link, frame: Frame) -> None:
        key = link.peer, frame.tag
        if frame.kind == _CREDIT:
            self._credited(key)
            return
        if frame.kind != _DATA:
            raise broken(link.peer, f"a frame of unknown kind {frame.kind} came")
        if frame.size > INLINE_BYTES:
            self._spend(self._offered, key)
        if frame.size == 0:
            self._sink(link, frame)
        reading = self._reading.pop(link.peer)
        message = _Arrived(reading.data, frame.size)
        if reading.receive is not None:
            self._deliver(reading.receive, message)
            return
        assert reading.data is not None
        # The receive may have been posted while the body was being read.
        self._operations.arrive(*key, message, reading.data.nbytes)

    def _credited(self, key: tuple[int, int]) -> None:
        waiting = self._waiting.get(key)
        if waiting is None:
            self._early[key[0]] += 1
            if self._early[key[0]] > _MOST_CREDITS:
                raise broken(key[0], f"more than {_MOST_CREDITS} credits came for messages that it cannot expect")
            self._credits[key] = self._credits.get(key, 0) + 1
            return
        large = True
        # then the small messages behind it, which had waited for their order
        while waiting and (large or waiting[0][1].nbytes <= INLINE_BYTES):
            handle, data, priority = waiting.popleft()
            after = partial(self._operations.finish, handle)
            self._links[handle.peer].push(_DATA, handle.tag, 0, memoryview(data), priority, after)
            large = False
        if not waiting:
            del self._waiting[key]

    def _deliver(self, receive: Receive, message: _Arrived) -> None:
        """Complete a receive whose message is in place, in scratch memory, or (None) already added or too long."""
        handle, data, size = receive.handle, message.data, message.size
        if handle.nbytes > INLINE_BYTES and (handle.peer, handle.tag) in self._wanted:
            self._spend(self._wanted, (handle.peer, handle.tag))
        if data is not None:
            if self._operations.deliver(receive, data[:size], data):
                self.scratch.give(data)
        elif self._operations.fits(receive, size):
            self._operations.finish(handle)

    def _spend(self, table: dict[tuple[int, int], int], key: tuple[int, int]) -> None:
        left = table.get(key, 0) - 1
        if left > 0:
            table[key] = left
        else:
            table.pop(key, None)

    def _lost(self, peer: int) -> None:
        self._operations.lose(peer)
        self._reading.pop(peer, None)
        for key in [key for key in self._waiting if key[0] == peer]:
            del self._waiting[key]
