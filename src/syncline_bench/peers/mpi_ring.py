"""A ring on MPI's point-to-point messages, as one writes it on an afternoon with mpi4py.

This is the allreduce of Sunway's Caffe and of baidu-allreduce: scatter-reduce, then all-gather, N-1 steps each
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). The scatter-reduce
receives each part in pieces, so that a piece is added while the next one is on its way: the simple form that was
fastest here. Nothing is tuned beyond that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from syncline.registry import register

from . import Array, Seat
from .mpi_memory import MpiMemory

_PIECE_BYTES = 1 << 20
_DECLARED = {"collectives": ("allreduce", "reduce-scatter", "all-gather"), "moves": "memory", "needs": "mpi"}


@register("peers", "mpi:ring", library="mpi", **_DECLARED)
@register("peers", "openmpi:ring", library="openmpi", **_DECLARED)
@register("peers", "mpich:ring", library="mpich", **_DECLARED)
class MpiRing:
    """Ring allreduce, or one of its halves, on Isend, Irecv and Sendrecv."""

    def __init__(self, seat: Seat) -> None:
        self._memory = MpiMemory(seat)
        self._collective = seat.collective
        self._arriving: Array = np.empty(seat.elements // seat.world + 1, np.float32)

    def select(self, elements: int) -> Array:
        return self._memory.select(elements)

    def run(self) -> None:
        if self._collective != "all-gather":
            self._reduce_scatter()
        if self._collective != "reduce-scatter":
            self._all_gather()

    def result(self) -> Array:
        """The array; after a reduce-scatter this rank's part of it, summed in place."""
        memory = self._memory
        return memory.piece(memory.rank) if self._collective == "reduce-scatter" else memory.whole

    def chosen(self) -> str:
        return f"ring on {self._memory.version}"

    def close(self) -> None:
        """MPI itself ends with the process."""

    def _reduce_scatter(self) -> None:
        """Rank r ends with the sum of part r: in step s it passes on part r-1-s."""
        memory, step = self._memory, _PIECE_BYTES // 4
        to, source = (memory.rank + 1) % memory.ranks, (memory.rank - 1) % memory.ranks
        for turn in range(1, memory.ranks):
            leaving, into = memory.piece(memory.rank - turn), memory.piece(memory.rank - turn - 1)
            starts = range(0, into.size, step)
            arriving: list[Any] = [
                memory.world.Irecv(self._arriving[at : min(at + step, into.size)], source) for at in starts
            ]
            sending = [memory.world.Isend(leaving[at : at + step], to) for at in range(0, leaving.size, step)]
            for at, message in zip(starts, arriving, strict=True):
                message.Wait()
                piece = into[at : at + step]
                np.add(piece, self._arriving[at : at + piece.size], out=piece)
            memory.wait_all(sending)

    def _all_gather(self) -> None:
        """Part r goes from rank r to all: in step s a rank passes on part r-s."""
        memory = self._memory
        to, source = (memory.rank + 1) % memory.ranks, (memory.rank - 1) % memory.ranks
        for turn in range(memory.ranks - 1):
            leaving, into = memory.piece(memory.rank - turn), memory.piece(memory.rank - turn - 1)
            memory.world.Sendrecv(leaving, to, recvbuf=into, source=source)
