"""The window through which processes of an MPI job read each other's memory: ``mpi(onesided=on)``.

Owns MPI's dynamic window over all processes, and which memory of this one is attached to it. It is made once per
process, since making and freeing it are collective, and locked for all from then on (passive target): a read needs no
call of the owner's. What is read, and when the owner may change it again, is for ``mpi`` to say and to tell.

Dynamic windows because buckets are made at different times on every rank; ``MPI_Win_allocate`` is collective.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Any

from ..errors import UsageError
from ..wire.scratch import address_of
from . import Bytes

MOST_REGIONS = 60
"""Regions attached at a time: Open MPI takes 64, and its window is not to be used any more after one too many."""


class Window:
    """A window over ``comm``; all processes make theirs together. UsageError where the library cannot have one."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        library = " ".join(mpi.Get_library_version().splitlines()[0].split(",")[0].split())
        try:
            self._window = mpi.Win.Create_dynamic(mpi.INFO_NULL, comm)
        except mpi.Exception as error:
            raise UsageError(
                f"transport=mpi(onesided=on): {library} has no dynamic windows here ({error}): use transport=mpi"
            ) from error
        self._window.Set_errhandler(mpi.ERRORS_RETURN)
        if self._window.Get_attr(mpi.WIN_MODEL) != mpi.WIN_UNIFIED:
            raise UsageError(
                f"transport=mpi(onesided=on): {library} keeps two copies of a window's memory here: use transport=mpi"
            )
        self._window.Lock_all(mpi.MODE_NOCHECK)
        self._byte = mpi.BYTE
        self._regions: list[tuple[int, int]] = []  # first address and bytes, in order

    def attach(self, memory: Bytes) -> bool:
        """Let others read some memory; False where the library takes no more."""
        if len(self._regions) >= MOST_REGIONS:
            return False
        self._window.Attach(memory)
        insort(self._regions, (address_of(memory), memory.nbytes))
        return True

    def detach(self, memory: Bytes) -> None:
        """Nobody reads there any more."""
        self._regions.remove((address_of(memory), memory.nbytes))
        self._window.Detach(memory)

    def place_of(self, data: Bytes) -> int:
        """Where others find some bytes; 0 where they do not lie in attached memory."""
        address = address_of(data)
        found = bisect_right(self._regions, (address, 1 << 62)) - 1
        if found < 0:
            return 0
        first, nbytes = self._regions[found]
        return address if address + data.nbytes <= first + nbytes else 0

    def show(self) -> None:
        """What this process has written is what others read from now on."""
        self._window.Sync()

    def read(self, into: Bytes, rank: int, place: int) -> Any:
        """Begin to read from another process; the request that is done when it is here."""
        return self._window.Rget([into, into.nbytes, self._byte], rank, (place, into.nbytes, self._byte))

    def free(self) -> None:
        """All processes together."""
        self._window.Unlock_all()
        self._window.Free()
