"""Transport over shared memory, between processes of one machine.

Memory from ``allocate`` is in segments that every peer maps. A message from it travels as a reference of 24 bytes over
a UNIX connection. The receiver reads the sender's memory in place (``borrow``) or copies it once (``recv``) and then
sends a short acknowledgement that frees the sender's buffer. Small messages travel inside their frame; large messages
from other memory are first copied into a segment.

Segments are anonymous; peers get their descriptors (``Segments``). The first segment of each process is its board, and
its bell's descriptor follows. With both, plans run by one-sided access (``engine.memory``), without any messages.

Received frames and segments are validated (``_check_frame``, ``map_segment``). ``poll`` raises a ProtocolError that
names a peer that refers to memory that it has not shared, or shares memory that could vanish.

Minimal memory traffic of a message of n bytes: n read and n written by the receiver.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any

import numpy as np

from ..errors import SynclineError
from ..kernels.board import BOARD_BYTES, MOST_SEGMENTS
from ..registry import register
from ..wire.links import CONTROL, Frame, Link, Loop, broken, moved_bytes
from . import Bytes, Handle, Words
from ._operations import LoopTransport, Receive

_DATA, _REFERENCE, _CONSUMED, _SEGMENT, _BELL, _MAPPED = 1, 2, 3, 4, 5, 6

_REFERENCE_BYTES = 24
"""The size of a reference: segment, offset and number of bytes."""

_BOARD = 0
"""The number of the segment that is the process's board."""

_IN_FRAME_BYTES = 4096
"""Messages up to this size travel in their frame, which is cheaper than a reference and its acknowledgement."""


_BLOCK_BYTES = 512

IDLE_BYTES = 256 * 1024 * 1024
"""The memory that idle staging buffers may hold."""

_ARENA_BYTES = 1024 * 1024
"""The largest segment that several staging buffers share."""


class Segments:
    """This process's shared memory: segments by address, and reusable staging buffers.

    Segments are memfd files. They have no names in /dev/shm, which could be left behind, and are not subject to its
    size limit. They are allocated at creation and sealed against shrinking, so that no access can fault; a machine
    without enough memory gives a clear error instead. The transport sends the descriptors to the peers.

    Segments stay mapped because peers know their numbers. Idle staging buffers hold little memory: the excess over
    ``IDLE_BYTES`` is returned to the kernel, least recently used first, and allocated again on use. Small staging
    buffers share segments, because each segment costs a descriptor here and a mapping at every peer.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []
        self._memory: list[Bytes] = []  # kept mapped: a known address must not be reused
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._numbers: list[int] = []
        self.known = MOST_SEGMENTS
        """The number of segments, from the first on, that all peers have mapped. Only these may have holes."""
        self._maps: list[mmap.mmap] = []
        self._free: dict[int, list[Bytes]] = {}
        self._made: Counter[int] = Counter()  # staging buffers by size
        self._idle: dict[int, int] = {}  # address -> bytes of free buffers with memory, least recently used first
        self._idle_bytes = 0

    def create(self, nbytes: int) -> tuple[int, int, Bytes]:
        """Create a segment. Returns its number, descriptor and memory."""
        size = max(nbytes, 1)
        number = len(self.fds)
        if number == MOST_SEGMENTS:
            raise SynclineError(f"all {MOST_SEGMENTS} shared segments of this process are in use: use transport=tcp")
        try:
            fd = os.memfd_create(f"syncline-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise SynclineError(
                f"no shared segment of {size} bytes ({error.strerror}): let the process open more files (ulimit -n),"
                " use fewer and larger buckets, or transport=tcp"
            ) from error
        try:
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mapped = mmap.mmap(fd, size)
        except OSError as error:
            os.close(fd)
            raise _explained(error, size) from error
        memory = np.frombuffer(mapped, np.uint8)
        start = memory.ctypes.data
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._ends.insert(at, start + size)
        self._numbers.insert(at, number)
        self.fds.append(fd)
        self._maps.append(mapped)
        self._memory.append(memory)
        return number, fd, memory[:nbytes]

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """The segment number and offset of ``nbytes`` at ``address``, if they are in a segment."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address + nbytes > self._ends[at]:
            return None
        return self._numbers[at], address - self._starts[at]

    def staging(self, nbytes: int) -> Bytes | None:
        """A free staging buffer of at least ``nbytes``. None if a new segment must be cut."""
        free = self._free.get(staging_size(nbytes))
        if not free:
            return None
        staging = free.pop()  # the most recently used one: it holds memory if any of this size does
        idle = self._idle.pop(staging.ctypes.data, 0)
        self._idle_bytes -= idle
        if not idle:
            number, offset = self._place(staging.ctypes.data, staging.nbytes)
            try:
                os.posix_fallocate(self.fds[number], offset, staging.nbytes)
            except OSError as error:
                free.append(staging)
                raise _explained(error, staging.nbytes) from error
        return staging

    def segment_for(self, nbytes: int) -> int:
        """The size of a segment for new staging buffers of at least ``nbytes``: as many small ones as exist already."""
        size = staging_size(nbytes)
        return size * max(1, min(self._made[size], _ARENA_BYTES // size))

    def cut(self, segment: Bytes, nbytes: int) -> Bytes:
        """Cut a new segment into staging buffers. Returns the first; the others are free."""
        size = staging_size(nbytes)
        first, *others = (segment[at : at + size] for at in range(0, segment.nbytes, size))
        self._made[size] += 1 + len(others)
        for other in others:
            self.free(other)
        return first

    def free(self, staging: Bytes) -> None:
        """Keep a staging buffer for the next message of its size."""
        self._free.setdefault(staging.nbytes, []).append(staging)
        self._idle[staging.ctypes.data] = staging.nbytes
        self._idle_bytes += staging.nbytes
        if self._idle_bytes > IDLE_BYTES:
            self._give_back()

    def _give_back(self) -> None:
        """Return the memory of the least recently used buffers to the kernel."""
        for address, nbytes in tuple(self._idle.items()):
            number, offset = self._place(address, nbytes)
            if number >= self.known:
                continue
            del self._idle[address]
            self._idle_bytes -= nbytes
            self._maps[number].madvise(mmap.MADV_REMOVE, offset, nbytes)
            if self._idle_bytes <= IDLE_BYTES:
                return

    def _place(self, address: int, nbytes: int) -> tuple[int, int]:
        place = self.find(address, nbytes)
        assert place is not None
        return place

    def close(self) -> None:
        """Close the descriptors. The memory lives as long as arrays that use it."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self._memory.clear()
        self._maps.clear()
        self._free.clear()
        self._starts.clear()


def _explained(error: OSError, nbytes: int) -> Exception:
    if error.errno not in (errno.ENOMEM, errno.ENOSPC):
        return error
    return SynclineError(
        f"no memory for a shared segment of {nbytes} bytes ({error.strerror}): use fewer ranks on this machine, a"
        " smaller model, or transport=tcp"
    )


def map_segment(fd: int, nbytes: int) -> Bytes:
    """Map a peer's segment for reading and writing. Raises OSError if it could vanish during use."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("shared memory that could vanish")
    found = os.fstat(fd)
    if min(found.st_size, found.st_blocks * _BLOCK_BYTES) < nbytes:  # an access to a hole might find no memory
        raise OSError(f"{nbytes} bytes of shared memory that are not there")
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


def check_bell(fd: int) -> None:
    """Raise OSError unless the descriptor is a non-blocking eventfd."""
    kind = str(Path(f"/proc/self/fd/{fd}").readlink())
    if kind != "anon_inode:[eventfd]" or os.get_blocking(fd):
        raise OSError(f"{kind}, where an eventfd that does not block was expected")


def staging_size(nbytes: int) -> int:
    """The size of a message's staging buffer: a power of two, so that few sizes serve all."""
    return 1 << max(nbytes - 1, 4095).bit_length()


@dataclass
class _Message:
    """A received message; ``number`` is the sender's reference number if the data are in the sender's memory."""

    src: int
    data: Bytes
    number: int | None


@dataclass
class _Sending:
    """A reference in flight: its handle, and the staging buffer to free afterwards."""

    handle: Handle
    staging: Bytes | None


@register("transports", "shm", connection="unix", one_host=True)
class Shm(LoopTransport):
    """Shared memory between the processes of one machine.

    ``socks`` are authenticated UNIX connections of process ``rank`` to all others.
    """

    name = "shm"

    def __init__(self, rank: int, socks: Mapping[int, socket]) -> None:
        super().__init__(rank, {peer: Link(sock, peer, self._sink, self._arrival) for peer, sock in socks.items()})
        self.gone = self._operations.gone
        self._segments = Segments()
        self._loop = Loop(self._links.values(), self._lost)
        self._mapped: dict[tuple[int, int], Bytes] = {}  # (peer, segment number) -> its memory
        self._segment_counts = dict.fromkeys(socks, 0)  # how many of each peer's segments are mapped here
        self._mapped_there = dict.fromkeys(socks, 0)  # how many of this process's segments each peer has mapped
        self._note_known()
        self._bodies: dict[int, Bytes] = {}  # the body that a link is reading
        self._sending: dict[int, _Sending] = {}
        self._number = 0
        everyone = max((rank, *socks)) + 1
        self._in_place: Words = np.zeros((2, everyone), np.int64)  # bytes sent and received without a socket
        self.members: Words = np.full((everyone, 2), (0, -1), np.int64)
        self.maps: Words = np.zeros((everyone, 32), np.int64)
        self.board: Words = self.allocate(BOARD_BYTES).view(np.int64)
        self._own_bell = self._loop.bell
        self.members[rank] = self.board.ctypes.data, self._own_bell
        for link in self._links.values():
            link.push(_BELL, 0, fd=self._loop.bell)

    def lends_from(self, src: int) -> bool:  # noqa: ARG002
        """Always True: receivers read the sender's memory."""
        return True

    def allocate(self, nbytes: int) -> Bytes:
        """A segment that every peer maps, to read and write it in place."""
        self._operations.check_open()
        number, fd, memory = self._segments.create(nbytes)
        for peer, link in self._links.items():
            if peer not in self.gone:
                link.push(_SEGMENT, number, memory.nbytes, fd=fd)
        return memory

    def send(self, dst: int, tag: int, data: Bytes, priority: float = 0.0, owner: Any = None) -> Handle:
        """Sends a reference; done when the peer has consumed it. A small message is done when the kernel has it."""
        handle = Handle("send", dst, tag, data.nbytes, owner)
        if not self._operations.admit(handle):
            return handle
        link = self._links[dst]
        if data.nbytes <= _IN_FRAME_BYTES:
            link.push(_DATA, tag, 0, memoryview(data), priority, partial(self._operations.finish, handle))
        else:
            place, staging = self._segments.find(data.ctypes.data, data.nbytes), None
            if place is None:
                staging = self.staging(data.nbytes)
                staging[: data.nbytes] = data
                place = self._segments.find(staging.ctypes.data, data.nbytes)
                assert place is not None
            self._number += 1
            self._sending[self._number] = _Sending(handle, staging)
            body = np.array([place[0], place[1], data.nbytes], np.uint64).view(np.uint8)
            link.push(_REFERENCE, tag, self._number, memoryview(body), priority)
            self._in_place[0, dst] += data.nbytes
        return handle

    def release(self, handle: Handle) -> None:
        message: _Message = handle.note
        handle.payload = handle.note = None
        self._consumed(message)

    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """The bytes over the connections and those read in place."""
        out, into = self._in_place.tolist()
        sent = {peer: link.sent_bytes + out[peer] for peer, link in self._links.items()}
        return sent, {peer: link.received_bytes + into[peer] for peer, link in self._links.items()}

    @property
    def moved_bytes(self) -> int:
        return moved_bytes(self._links.values()) + int(self._in_place.sum())

    def close(self) -> None:
        if not self._operations.closed:
            self._operations.closed = True
            self._loop.close()
            for fd in self.members[:, 1]:
                if fd not in (-1, self._own_bell):
                    os.close(int(fd))
            self.members[:] = 0, -1
            self.board = self.board[:0].copy()
            self._mapped.clear()
            self._sending.clear()
            self._segments.close()

    # One-sided access.

    @property
    def window(self) -> Shm:
        """The memory that all processes have mapped, and its boards (``engine.scripts``)."""
        return self

    def words_of(self, peer: int, segment: int) -> Words:
        memory = self._mapped.get((peer, segment))
        return np.empty(0, np.int64) if memory is None else memory[: memory.nbytes // 8 * 8].view(np.int64)

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        return self._segments.find(address, nbytes)

    def staging(self, nbytes: int) -> Bytes:
        found = self._segments.staging(nbytes)
        if found is None:
            found = self._segments.cut(self.allocate(self._segments.segment_for(nbytes)), nbytes)
        return found

    def free(self, staging: Bytes) -> None:
        """The buffer is kept for the next one of its size."""
        self._segments.free(staging)

    def count(self, sent: Words, received: Words) -> None:
        self._in_place[0] += sent
        self._in_place[1] += received

    def _sink(self, link: Link, frame: Frame) -> memoryview | None:
        self._check_frame(link.peer, frame)
        body = np.empty(frame.size, np.uint8)
        self._bodies[link.peer] = body
        return memoryview(body)

    def _check_frame(self, peer: int, frame: Frame) -> None:
        """Raise ProtocolError unless a frame of that kind may have a body of that size."""
        most = {_DATA: _IN_FRAME_BYTES, _REFERENCE: _REFERENCE_BYTES, _CONSUMED: 0, _SEGMENT: 0, _BELL: 0, _MAPPED: 0}
        if frame.size > most.get(frame.kind, -1) or (frame.kind == _REFERENCE and frame.size < _REFERENCE_BYTES):
            raise broken(peer, f"a frame of kind {frame.kind} with {frame.size} bytes came")

    def _arrival(self, link: Link, frame: Frame) -> None:
        body = self._bodies.pop(link.peer, None)
        if body is None:
            self._check_frame(link.peer, frame)
        if frame.kind == _SEGMENT:
            self._map(link, frame)
        elif frame.kind == _BELL:
            self._take_bell(link)
        elif frame.kind == _MAPPED:
            self._mapped_by(link.peer, frame.argument)
        elif frame.kind == _CONSUMED:
            self._freed(link.peer, frame.argument)
        elif frame.kind == _DATA:
            self._arrived(frame, _Message(link.peer, np.empty(0, np.uint8) if body is None else body, None))
        else:
            assert body is not None
            segment, offset, nbytes = (int(value) for value in body.view(np.uint64))
            memory = self._mapped.get((link.peer, segment))
            if memory is None or offset + nbytes > memory.nbytes:
                raise broken(link.peer, f"it refers to {nbytes} bytes of segment {segment}, which it has not shared")
            self._in_place[1, link.peer] += nbytes
            self._arrived(frame, _Message(link.peer, memory[offset : offset + nbytes], frame.argument))

    def _arrived(self, frame: Frame, message: _Message) -> None:
        kept = message.data.nbytes if message.number is None else 0
        self._operations.arrive(message.src, frame.tag, message, kept)

    def _map(self, link: Link, frame: Frame) -> None:
        """Map a segment that a peer shares: number ``tag``, ``argument`` bytes. Peers share their segments in order."""
        number = frame.tag
        if number != self._segment_counts[link.peer] or number >= MOST_SEGMENTS:
            raise broken(link.peer, f"it shares segment {number} after {self._segment_counts[link.peer]} others")
        if number == _BOARD and frame.argument < BOARD_BYTES:
            raise broken(link.peer, f"its board has {frame.argument} bytes, less than {BOARD_BYTES}")
        fd = self._descriptor(link)
        try:
            memory = map_segment(fd, max(frame.argument, 1))
        except OSError as error:
            raise broken(link.peer, f"its segment {number} cannot be used: {error}") from error
        finally:
            os.close(fd)
        self._segment_counts[link.peer] += 1
        link.push(_MAPPED, 0, self._segment_counts[link.peer], priority=CONTROL)
        self._mapped[link.peer, number] = memory
        if 2 * number >= self.maps.shape[1]:
            self.maps = np.pad(self.maps, ((0, 0), (0, max(2 * number, self.maps.shape[1]))))
        self.maps[link.peer, 2 * number : 2 * number + 2] = memory.ctypes.data, memory.nbytes
        if number == _BOARD:
            self.members[link.peer, 0] = memory.ctypes.data

    def _mapped_by(self, peer: int, count: int) -> None:
        """Record how many of this process's segments a peer has mapped."""
        if count != self._mapped_there[peer] + 1 or count > len(self._segments.fds):
            raise broken(peer, f"it has mapped {count} segments of {len(self._segments.fds)}")
        self._mapped_there[peer] = count
        self._note_known()

    def _note_known(self) -> None:
        self._segments.known = min(self._mapped_there.values(), default=MOST_SEGMENTS)

    def _take_bell(self, link: Link) -> None:
        """Store a peer's bell. Each peer sends one."""
        if self.members[link.peer, 1] >= 0:
            raise broken(link.peer, "it gives its bell twice")
        fd = self._descriptor(link)
        try:
            check_bell(fd)
        except OSError as error:
            os.close(fd)
            raise broken(link.peer, f"the descriptor that it sent is not a bell: {error}") from error
        self.members[link.peer, 1] = fd

    def _descriptor(self, link: Link) -> int:
        """The descriptor that came with the current frame."""
        if not link.fds:
            raise broken(link.peer, "a frame came without its descriptor")
        return link.fds.popleft()

    def _deliver(self, receive: Receive, message: _Message) -> None:
        if self._operations.deliver(receive, message.data, message):
            self._consumed(message)

    def _consumed(self, message: _Message) -> None:
        if message.number is not None and message.src not in self.gone:
            self._links[message.src].push(_CONSUMED, 0, message.number, priority=CONTROL)

    def _freed(self, peer: int, number: int) -> None:
        sending = self._sending.get(number)
        if sending is None or sending.handle.peer != peer:
            raise broken(peer, f"it has consumed message {number}, which it was not sent")
        del self._sending[number]
        if sending.staging is not None:
            self._segments.free(sending.staging)
        self._operations.finish(sending.handle)

    def _lost(self, peer: int) -> None:
        self._operations.lose(peer)
        self._mapped_there.pop(peer, None)
        self._note_known()
        self._bodies.pop(peer, None)
        for number in [number for number, sending in self._sending.items() if sending.handle.peer == peer]:
            del self._sending[number]
