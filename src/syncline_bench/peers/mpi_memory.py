"""Parts of all peers on MPI: the communicator, the array, and this rank's part of it.

As a script has it that begins with ``from mpi4py import MPI``, which initialises MPI with the thread level that mpi4py
asks for: the communicator is MPI_COMM_WORLD. MPI ends with the process.
"""

from __future__ import annotations

import numpy as np

from . import Array, Seat


class MpiMemory:
    """An array of this process and its parts, with the communicator to move it on."""

    def __init__(self, seat: Seat) -> None:
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD
        self.in_place = MPI.IN_PLACE
        self.wait_all = MPI.Request.Waitall
        # The first line says who; the rest is about how it was built.
        self.version = " ".join(MPI.Get_library_version().split(",")[0].splitlines()[0].replace(":", " ").split())
        self.rank, self.ranks = seat.rank, seat.world
        self._all = np.zeros(seat.elements, np.float32)
        self._own = np.zeros(seat.elements // seat.world if seat.collective == "reduce-scatter" else 0, np.float32)
        self.whole: Array = self._all
        self.part: Array = self._own

    def select(self, elements: int) -> Array:
        """The first ``elements`` as the array to work on."""
        self.whole = self._all[:elements]
        self.part = self._own[: elements // self.ranks]
        return self.whole

    def piece(self, number: int) -> Array:
        """Part ``number`` (counted around the ring) of the array."""
        number %= self.ranks
        start, stop = (self.whole.size * edge // self.ranks for edge in (number, number + 1))
        return self.whole[start:stop]
