"""The collectives of an MPI library, through mpi4py: what a cluster's users have had for thirty years.

``mpi`` is the library that is installed (Open MPI before MPICH); ``openmpi`` and ``mpich`` say which. Both choose their
algorithm by size themselves. The setting that matters here is to yield the core while waiting, which
``launch.mpi_library`` makes: ranks may outnumber cores, and an MPI rank otherwise spins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from syncline.registry import register

from . import Array, Seat
from .mpi_memory import MpiMemory

_DECLARED = {
    "collectives": ("allreduce", "reduce-scatter", "all-gather", "broadcast"),
    "moves": "memory",
    "needs": "mpi",
}


@register("peers", "mpi:native", library="mpi", **_DECLARED)
@register("peers", "openmpi:native", library="openmpi", **_DECLARED)
@register("peers", "mpich:native", library="mpich", **_DECLARED)
class MpiNative:
    """MPI_Allreduce, MPI_Reduce_scatter_block, MPI_Allgather and MPI_Bcast, in place where MPI has that."""

    run: Callable[[], None]
    """The library's call."""

    def __init__(self, seat: Seat) -> None:
        self._memory = MpiMemory(seat)
        self._collective = seat.collective

    def select(self, elements: int) -> Array:
        """Memory of this process; the call is made ready, since MPI takes little longer than Python to find it."""
        memory = self._memory
        whole = memory.select(elements)
        match self._collective:
            case "allreduce":
                self.run = partial(memory.world.Allreduce, memory.in_place, whole)
            case "reduce-scatter":
                # In place, MPI puts every rank's sum where part 0 was: a separate buffer is what users write.
                self.run = partial(memory.world.Reduce_scatter_block, whole, memory.part)
            case "all-gather":
                self.run = partial(memory.world.Allgather, memory.in_place, whole)
            case _:
                self.run = partial(memory.world.Bcast, whole, 0)
        return whole

    def result(self) -> Array:
        """The array, or the part that the reduce-scatter has filled."""
        return self._memory.part if self._collective == "reduce-scatter" else self._memory.whole

    def chosen(self) -> str:
        return self._memory.version

    def close(self) -> None:
        """MPI itself ends with the process."""
