"""Peers on MPI, through mpi4py: an MPI library's own collectives, a ring on its messages, and a ring on its windows.

``mpi`` is the first installed library of Open MPI, MPICH and Intel MPI; their names select one. A script begins with
``from mpi4py import MPI``, which initialises MPI with mpi4py's thread level; the communicator is MPI_COMM_WORLD. MPI
ends with the process.

No setting is the best at every size. The bench chooses among those of ``SETTINGS``, each of which was the fastest at
some size with 2 or 4 ranks on 2 cores. The documentation of the library describes the variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from syncline.launch.mpi_library import LIBRARIES
from syncline.registry import register

from . import Array, Seat, Settings
from ._ring import PIECE_BYTES, PostedRing, Ring

_YIELDING: Mapping[str, Settings] = {
    # The first one also serves ranks that outnumber the cores, and labs.
    "openmpi": {
        "yield=on": {"OMPI_MCA_mpi_yield_when_idle": "1"},
        "yield=off": {"OMPI_MCA_mpi_yield_when_idle": "0"},
    },
    "mpich": {
        # A heavy yield sleeps, which takes 17 times as long at 1 KB with 4 ranks on 2 cores.
        "yield=on": {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "0"},
        "yield=off": {"MPIR_CVAR_POLLS_BEFORE_YIELD": "0", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "0"},
    },
    "intelmpi": {
        "yield=on": {"I_MPI_THREAD_YIELD": "2"},
        "yield=off": {"I_MPI_THREAD_YIELD": "0"},
    },
}
_ALGORITHMS: Mapping[str, Settings] = {
    "openmpi": {
        # By itself the library takes no ring at large sizes, nor these segments.
        "segmented_ring": {
            "OMPI_MCA_mpi_yield_when_idle": "0",
            "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
            "OMPI_MCA_coll_tuned_allreduce_algorithm": "5",
            "OMPI_MCA_coll_tuned_allreduce_algorithm_segmentsize": str(1 << 20),
        },
    },
    "mpich": {
        # Over shared flags, which needs a single thread and does not yield.
        "release_gather": {
            "MPI4PY_RC_THREAD_LEVEL": "single",
            "MPIR_CVAR_POSIX_NUM_COLLS_THRESHOLD": "0",
            **{f"MPIR_CVAR_{name}_POSIX_INTRA_ALGORITHM": "release_gather" for name in ("ALLREDUCE", "BCAST")},
        },
        # Its composition is of messages alone.
        "reduce_scatter_allgather": {
            "MPIR_CVAR_ENABLE_HEAVY_YIELD": "0",
            "MPIR_CVAR_ALLREDUCE_COMPOSITION": "2",
            "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "reduce_scatter_allgather",
        },
    },
    "intelmpi": {"intranode=pt2pt": {"I_MPI_THREAD_YIELD": "2", "I_MPI_COLL_INTRANODE": "pt2pt"}},
}
SETTINGS: Mapping[str, Settings] = {name: {**found, **_ALGORITHMS[name]} for name, found in _YIELDING.items()}
"""The settings of each library's own collectives. Rings and windows have those of ``_YIELDING``."""

_AHEAD = 2
_HALVES = ("allreduce", "reduce-scatter", "all-gather")

Peer = TypeVar("Peer", bound=Callable[..., Any])


def _registered(
    algorithm: str, collectives: tuple[str, ...] = _HALVES, settings: Mapping[str, Settings] = _YIELDING
) -> Callable[[Peer], Peer]:
    """Register a peer under the name of every library."""

    def enter(peer: Peer) -> Peer:
        for library in ("mpi", *LIBRARIES):
            declared = {"moves": "memory", "needs": "mpi", "library": library, "settings": settings}
            register("peers", f"{library}:{algorithm}", collectives=collectives, **declared)(peer)
        return peer

    return enter


def _version(mpi: Any) -> str:
    """The library's name and version; the rest of its text describes its build."""
    return " ".join(mpi.Get_library_version().split(",")[0].splitlines()[0].replace(":", " ").split())


@_registered("native", (*_HALVES, "broadcast"), SETTINGS)
class MpiNative:
    """MPI_Allreduce, MPI_Reduce_scatter_block, MPI_Allgather and MPI_Bcast, in place if MPI supports that.

    The library chooses its algorithm by size.
    """

    run: Callable[[], None]
    """The library's call."""

    def __init__(self, seat: Seat) -> None:
        from mpi4py import MPI

        self._mpi, self._seat = MPI, seat
        self._all = np.zeros(seat.elements, np.float32)
        self._own = np.zeros(seat.elements // seat.world if seat.collective == "reduce-scatter" else 0, np.float32)
        self._result: Array = self._all

    def select(self, elements: int) -> Array:
        """Memory of this process. The call is prepared: to look it up would take nearly as long as MPI itself."""
        world, in_place = self._mpi.COMM_WORLD, self._mpi.IN_PLACE
        whole = self._result = self._all[:elements]
        match self._seat.collective:
            case "allreduce":
                self.run = partial(world.Allreduce, in_place, whole)
            case "reduce-scatter":
                # In place, MPI writes every rank's sum over part 0, so users pass a separate buffer.
                self._result = self._own[: elements // self._seat.world]
                self.run = partial(world.Reduce_scatter_block, whole, self._result)
            case "all-gather":
                self.run = partial(world.Allgather, in_place, whole)
            case _:
                self.run = partial(world.Bcast, whole, 0)
        return whole

    def result(self) -> Array:
        """The array, or the part that the reduce-scatter has filled."""
        return self._result

    def chosen(self) -> str:
        return _version(self._mpi)

    def close(self) -> None:
        """MPI itself ends with the process."""


@_registered("ring")
class MpiRing(PostedRing):
    """Ring allreduce, or one of its halves, on Isend, Irecv and Sendrecv, in a simple form with mpi4py.

    The scatter-reduce in pieces was the fastest simple form here. Nothing else is tuned.
    """

    def __init__(self, seat: Seat) -> None:
        from mpi4py import MPI

        super().__init__(seat, _version(MPI))
        self._world, self._wait_all = MPI.COMM_WORLD, MPI.Request.Waitall
        self._to, self._source = (seat.rank + 1) % seat.world, (seat.rank - 1) % seat.world

    def close(self) -> None:
        """MPI itself ends with the process."""

    def _send(self, data: Array) -> Any:
        return self._world.Isend(data, self._to)

    def _receive(self, into: Array) -> Any:
        return self._world.Irecv(into, self._source)

    def _wait(self, *requests: Any) -> None:
        if len(requests) == 1:
            requests[0].Wait()
        else:
            self._wait_all(list(requests))

    def _all_gather(self) -> None:
        for turn in range(self._ranks - 1):
            leaving, into = self._part(self._rank - turn), self._part(self._rank - turn - 1)
            self._world.Sendrecv(leaving, self._to, recvbuf=into, source=self._source)


@_registered("windows")
class MpiWindows(Ring):
    """Ring allreduce, or one of its halves, on Win_allocate and Rget instead of messages.

    The array lies in a window that MPI itself has allocated, which libraries serve best. A rank reads its neighbour's
    parts from there (passive target, one lock for the whole run). In the scatter-reduce it reads in pieces: one is
    added while the next two travel. Empty messages report that a part is ready, and that it has been read, because a
    window has no operation to wait with.
    """

    def __init__(self, seat: Seat) -> None:
        from mpi4py import MPI

        super().__init__(seat, f"the windows of {_version(MPI)}")
        self._world = MPI.COMM_WORLD
        self._to, self._source = (seat.rank + 1) % seat.world, (seat.rank - 1) % seat.world
        self._window = MPI.Win.Allocate(4 * seat.elements, 4, MPI.INFO_NULL, self._world)
        self._all = np.frombuffer(self._window.tomemory(), np.float32)
        self._arriving: Array = np.empty((_AHEAD + 1, PIECE_BYTES // 4), np.float32)
        self._nothing = np.zeros(1, np.uint8)
        self._window.Lock_all(MPI.MODE_NOCHECK)

    def close(self) -> None:
        self._window.Unlock_all()
        del self._all, self._whole
        self._window.Free()

    def _reduce_scatter(self) -> None:
        self._go_round(self._add, 1)

    def _all_gather(self) -> None:
        self._go_round(self._copy, 0)

    def _go_round(self, take: Callable[[Array, int], None], behind: int) -> None:
        """In each step, take the part that the previous rank has finished. On return this rank's reader has ended."""
        for turn in range(1, self._ranks):
            self._window.Sync()
            self._world.Sendrecv(self._nothing, self._to, 1, self._nothing.copy(), self._source, 1)  # it is ready
            part = self._part(self._rank - turn - behind)
            take(part, (part.ctypes.data - self._all.ctypes.data) // 4)
        self._world.Sendrecv(self._nothing, self._source, 2, self._nothing.copy(), self._to, 2)  # it has been read

    def _add(self, part: Array, place: int) -> None:
        step = PIECE_BYTES // 4
        starts = range(0, part.size, step)
        under_way: list[Any] = []
        for number in range(len(starts) + _AHEAD):
            if number < len(starts):
                into = self._arriving[number % (_AHEAD + 1), : min(step, part.size - starts[number])]
                request = self._window.Rget(into, self._source, (place + starts[number], into.size))
                under_way.append((request, into))
            if number >= _AHEAD:
                request, came = under_way.pop(0)
                request.Wait()
                piece = part[starts[number - _AHEAD] :][: came.size]
                np.add(piece, came, out=piece)

    def _copy(self, part: Array, place: int) -> None:
        self._window.Rget(part, self._source, (place, part.size)).Wait()
