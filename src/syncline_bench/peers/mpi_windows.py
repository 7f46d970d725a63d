"""A ring on MPI's windows, as one writes it with mpi4py where messages are not wanted.

Scatter-reduce, then all-gather, N-1 steps each (Patarasuk and Yuan, 2009). The array lies in a window that MPI itself
has allocated, which libraries serve best; the neighbour's parts are read from there (MPI_Rget, passive target, one lock
for the whole run), the scatter-reduce in pieces of which one is added while the next two are on their way. That a part
is ready, and that it has been read, are empty messages: a window has nothing to wait for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from syncline.registry import register

from . import Array, Seat
from .mpi_memory import MpiMemory

_PIECE_BYTES = 1 << 20
_AHEAD = 2
_DECLARED = {"collectives": ("allreduce", "reduce-scatter", "all-gather"), "moves": "memory", "needs": "mpi"}


@register("peers", "mpi:windows", library="mpi", **_DECLARED)
@register("peers", "openmpi:windows", library="openmpi", **_DECLARED)
@register("peers", "mpich:windows", library="mpich", **_DECLARED)
class MpiWindows:
    """Ring allreduce, or one of its halves, on Win_allocate and Rget."""

    def __init__(self, seat: Seat) -> None:
        from mpi4py import MPI

        self._memory = MpiMemory(seat)
        self._collective = seat.collective
        self._window = MPI.Win.Allocate(4 * seat.elements, 4, MPI.INFO_NULL, self._memory.world)
        self._all: Array = np.frombuffer(self._window.tomemory(), np.float32)
        self._arriving: Array = np.empty((_AHEAD + 1, _PIECE_BYTES // 4), np.float32)
        self._nothing = np.zeros(1, np.uint8)
        self._window.Lock_all(MPI.MODE_NOCHECK)

    def select(self, elements: int) -> Array:
        """In the window, where the others read."""
        self._memory.select(elements)
        self._memory.whole = self._all[:elements]
        return self._memory.whole

    def run(self) -> None:
        if self._collective != "all-gather":
            self._go_round(self._add, 1)
        if self._collective != "reduce-scatter":
            self._go_round(self._copy, 0)

    def result(self) -> Array:
        """The array; after a reduce-scatter this rank's part of it, summed in place."""
        memory = self._memory
        return memory.piece(memory.rank) if self._collective == "reduce-scatter" else memory.whole

    def chosen(self) -> str:
        return f"ring on the windows of {self._memory.version}"

    def close(self) -> None:
        self._window.Unlock_all()
        del self._all, self._memory.whole
        self._window.Free()

    def _go_round(self, take: Any, behind: int) -> None:
        """In each step the part that the rank before has just finished is taken; all its readers have ended then."""
        memory = self._memory
        to, source = (memory.rank + 1) % memory.ranks, (memory.rank - 1) % memory.ranks
        for turn in range(1, memory.ranks):
            self._window.Sync()
            memory.world.Sendrecv(self._nothing, to, 1, self._nothing.copy(), source, 1)  # it is ready
            part = memory.piece(memory.rank - turn - behind)
            take(part, source, (part.ctypes.data - self._all.ctypes.data) // 4)
        memory.world.Sendrecv(self._nothing, source, 2, self._nothing.copy(), to, 2)  # it has been read

    def _add(self, part: Array, source: int, place: int) -> None:
        step = _PIECE_BYTES // 4
        starts = range(0, part.size, step)
        under_way: list[Any] = []
        for number in range(len(starts) + _AHEAD):
            if number < len(starts):
                into = self._arriving[number % (_AHEAD + 1), : min(step, part.size - starts[number])]
                under_way.append((self._window.Rget(into, source, (place + starts[number], into.size)), into))
            if number >= _AHEAD:
                request, came = under_way.pop(0)
                request.Wait()
                piece = part[starts[number - _AHEAD] :][: came.size]
                np.add(piece, came, out=piece)

    def _copy(self, part: Array, source: int, place: int) -> None:
        self._window.Rget(part, source, (place, part.size)).Wait()
