"""Owns one process's shared memory: anonymous segments that peers map, and reusable staging buffers.

Segments are memfd files. They have no names in /dev/shm, which could be left behind, and are not subject to its size
limit. They are allocated at creation and sealed against shrinking, so that no access can fault; a machine without
enough memory gives a clear error instead. The transport sends the descriptors to the peers.

Segments stay mapped because peers know their numbers. Idle staging buffers hold little memory: the excess over
``IDLE_BYTES`` is returned to the kernel, least recently used first, and allocated again on use. Small staging buffers
share segments, because each segment costs a descriptor here and a mapping at every peer.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from bisect import bisect_right
from collections import Counter
from pathlib import Path

import numpy as np

from ..errors import SynclineError
from ..kernels.board import MOST_SEGMENTS
from . import Bytes

_BLOCK_BYTES = 512

IDLE_BYTES = 256 * 1024 * 1024
"""The memory that idle staging buffers may hold."""

_ARENA_BYTES = 1024 * 1024
"""The largest segment that several staging buffers share."""


class Segments:
    """This process's shared memory: segments by address, and reusable staging buffers."""

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
