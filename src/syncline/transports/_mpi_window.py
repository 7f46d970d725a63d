"""The MPI window through which the processes of a job read each other's memory: ``mpi(onesided=on)``.

This module owns the window over all processes and allocates this process's part. Creating and freeing a window is
collective, so there is one per process, locked for all from then on (passive target): a read needs no call of the
owner. ``mpi`` decides what is read and tells the owner when it may change the memory again.

The memory is allocated by MPI (``MPI_Win_allocate``), which lets ranks of one host share it. It is only reserved: pages
that are never written use no memory. Attaching foreign memory to a dynamic window was four to six times slower here,
because both MPI libraries then move it in fragments that need both processes.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import numpy as np

from ..errors import UsageError
from ..wire.scratch import address_of
from . import Bytes

_PAGE_BYTES = 4096
_SHARED = "/dev/shm"

NOWHERE = -1
"""The place of bytes outside the window."""


class Window:
    """A window of ``nbytes`` for every process of ``comm``. Collective. UsageError if the library cannot make it."""

    def __init__(self, mpi: Any, comm: Any, nbytes: int) -> None:
        library = " ".join(mpi.Get_library_version().splitlines()[0].split(",")[0].split())
        try:
            self._window = mpi.Win.Allocate(nbytes, 1, mpi.INFO_NULL, comm)
        except mpi.Exception as error:
            raise UsageError(
                f"transport=mpi(onesided=on): {library} has no window of {nbytes} bytes here ({error}): use a smaller"
                " window= or transport=mpi"
            ) from error
        self._window.Set_errhandler(mpi.ERRORS_RETURN)
        if self._window.Get_attr(mpi.WIN_MODEL) != mpi.WIN_UNIFIED:
            raise UsageError(
                f"transport=mpi(onesided=on): {library} keeps two copies of a window's memory here: use transport=mpi"
            )
        self._window.Lock_all(mpi.MODE_NOCHECK)
        self._byte = mpi.BYTE
        self._memory = memoryview(self._window.tomemory())
        self._first = address_of(np.frombuffer(self._memory, np.uint8))
        self.nbytes = nbytes
        self._taken = 0
        self._begun = 0  # everything from here on is free
        self._free: dict[int, list[int]] = {}  # places by size

    def take(self, nbytes: int) -> Bytes | None:
        """Zeroed memory that other processes can read, owned until it is garbage collected.

        None if the window is full.
        """
        size = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        free = self._free.get(size)
        if free:
            place = free.pop()
        elif self._begun + size <= self.nbytes:
            place, self._begun = self._begun, self._begun + size
        else:
            return None
        memory: Bytes = np.frombuffer(self._memory[place : place + nbytes], np.uint8)
        memory[:] = 0
        self._taken += 1
        weakref.finalize(memory, self._give, place, size).atexit = False
        return memory

    def _give(self, place: int, size: int) -> None:
        self._taken -= 1
        if self._taken:
            self._free.setdefault(size, []).append(place)
        else:  # empty: start again, whatever sizes follow
            self._begun = 0
            self._free.clear()

    def place_of(self, data: Bytes) -> int:
        """The place of some bytes in the window, ``NOWHERE`` if they are not in it."""
        place = address_of(data) - self._first
        return place if 0 <= place <= self.nbytes - data.nbytes else NOWHERE

    def show(self) -> None:
        """Make this process's writes visible to the reads of others."""
        self._window.Sync()

    def read(self, into: Bytes, rank: int, place: int) -> Any:
        """Start to read from another process. Returns the request."""
        return self._window.Rget([into, into.nbytes, self._byte], rank, (place, into.nbytes, self._byte))

    def unlock(self) -> None:
        """Free the window. Call before MPI_Finalize, which takes the memory back."""
        self._window.Unlock_all()
        self._window.Free()


def check_room(nbytes: int) -> None:
    """Raise UsageError if the host has no room for the shared files of its ranks.

    A write beyond a full file system would end in SIGBUS.
    """
    try:
        found = os.statvfs(_SHARED)
    except OSError:
        return
    room = found.f_bavail * found.f_frsize
    if room < nbytes:
        raise UsageError(
            f"transport=mpi(onesided=on, window={nbytes >> 20}MiB): {_SHARED} has room for {room >> 20} MiB: use a"
            " smaller window=, which has to hold the buckets of a rank, or transport=mpi"
        )
