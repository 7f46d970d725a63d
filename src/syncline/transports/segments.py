"""Shared memory of one process: anonymous segments that peers map, and staging buffers that are used again.

Segments are memfd: there are no names in /dev/shm that could be left behind or run into its size limit. They are
allocated when made and sealed against shrinking, so that no access can fault; a machine without the memory gives a
clear error instead. How descriptors reach the peers is the transport's business.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from bisect import bisect_right
from pathlib import Path

import numpy as np

from ..errors import SynclineError
from . import Bytes

MOST_SEGMENTS = 1 << 16
"""A process may map about as many areas (vm.max_map_count); with as many its peers would have no room left."""


_BLOCK_BYTES = 512


class Segments:
    """This process's own shared memory: segments by address, and staging buffers that are used again."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self._memory: list[Bytes] = []  # kept mapped: an address must not become somebody else's while it is known
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._numbers: list[int] = []
        self._free: dict[int, list[Bytes]] = {}

    def create(self, nbytes: int) -> tuple[int, int, Bytes]:
        """A new segment: number, descriptor, memory."""
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
            memory = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise SynclineError(
                    f"no memory for a shared segment of {size} bytes ({error.strerror}): use fewer ranks on this"
                    " machine, a smaller model, or transport=tcp"
                ) from error
            raise
        start = memory.ctypes.data
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._ends.insert(at, start + size)
        self._numbers.insert(at, number)
        self.fds.append(fd)
        self._memory.append(memory)
        return number, fd, memory[:nbytes]

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Segment number and offset of ``nbytes`` at ``address``, when they lie in a segment."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address + nbytes > self._ends[at]:
            return None
        return self._numbers[at], address - self._starts[at]

    def staging(self, nbytes: int) -> Bytes | None:
        """A free staging buffer of at least that size, or None when a new one is needed."""
        free = self._free.get(staging_size(nbytes))
        return free.pop() if free else None

    def free(self, staging: Bytes) -> None:
        """Keep a staging buffer for the next message of its size."""
        self._free.setdefault(staging.nbytes, []).append(staging)

    def close(self) -> None:
        """Close the descriptors; the memory goes with the last array that looks at it."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self._memory.clear()
        self._starts.clear()


def map_segment(fd: int, nbytes: int) -> Bytes:
    """Map a peer's segment, to read and to write; raises OSError for one that could vanish while it is used."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("shared memory that could vanish")
    found = os.fstat(fd)
    if min(found.st_size, found.st_blocks * _BLOCK_BYTES) < nbytes:  # in a hole, an access might find no memory
        raise OSError(f"{nbytes} bytes of shared memory that are not there")
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


def check_bell(fd: int) -> None:
    """Raise OSError unless a descriptor is an eventfd to which writing never waits."""
    kind = str(Path(f"/proc/self/fd/{fd}").readlink())
    if kind != "anon_inode:[eventfd]" or os.get_blocking(fd):
        raise OSError(f"{kind}, where an eventfd that does not block was expected")


def staging_size(nbytes: int) -> int:
    """The size of the staging buffer for a message: a power of two, so that few sizes serve all."""
    return 1 << max(nbytes - 1, 4095).bit_length()
