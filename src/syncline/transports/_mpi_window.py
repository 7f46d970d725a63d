"""The window through which processes of an MPI job read each other's memory: ``mpi(onesided=on)``.

Owns MPI's window over all processes, and who has which part of this one's memory there. It is made once per process,
since making and freeing it are collective, and locked for all from then on (passive target): a read needs no call of
the owner's. What is read, and when the owner may change it again, is for ``mpi`` to say and to tell.

The memory is MPI's own (``MPI_Win_allocate``), which ranks of one host share, and it is reserved only: pages that
nobody writes take nothing. Memory of somebody else's, attached to a dynamic window, was four to six times slower here:
both libraries move it in fragments that need both processes' turns.
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
"""The place of bytes that do not lie in the window."""


class Window:
    """So many bytes of every process of ``comm``; all make theirs together. UsageError where the library has none."""

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
        self._begun = 0  # what lies from here on is nobody's
        self._free: dict[int, list[int]] = {}  # places by size

    def take(self, nbytes: int) -> Bytes | None:
        """Zeroed memory that others can read, its taker's until nobody has it any more; None where there is no more."""
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
        else:  # whatever sizes come next
            self._begun = 0
            self._free.clear()

    def place_of(self, data: Bytes) -> int:
        """Where others find some bytes; ``NOWHERE`` for those that do not lie here."""
        place = address_of(data) - self._first
        return place if 0 <= place <= self.nbytes - data.nbytes else NOWHERE

    def show(self) -> None:
        """What this process has written is what others read from now on."""
        self._window.Sync()

    def read(self, into: Bytes, rank: int, place: int) -> Any:
        """Begin to read from another process; the request that is done when it is here."""
        return self._window.Rget([into, into.nbytes, self._byte], rank, (place, into.nbytes, self._byte))

    def unlock(self) -> None:
        """Before MPI's end, which takes the memory back."""
        self._window.Unlock_all()
        self._window.Free()


def check_room(nbytes: int) -> None:
    """Ranks of a host share the memory as files, and one without room would end them by SIGBUS."""
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
