"""The parts of a ring that are the same over every message library: memory, halves, results."""

from __future__ import annotations

import numpy as np

from . import Array, Seat

PIECE_BYTES = 1 << 20
"""Parts travel in pieces, so that one is added while the next is on its way."""


class Ring:
    """Ring allreduce, or one of its halves, over an array in this process's memory.

    A library's ring says how ``_reduce_scatter`` and ``_all_gather`` move the parts. ``version`` names the library.
    """

    def __init__(self, seat: Seat, version: str) -> None:
        self._rank, self._ranks, self._collective, self._version = seat.rank, seat.world, seat.collective, version
        self._all: Array = np.zeros(seat.elements, np.float32)
        self._whole = self._all

    def select(self, elements: int) -> Array:
        """The first ``elements`` as the array to work on."""
        self._whole = self._all[:elements]
        return self._whole

    def run(self) -> None:
        if self._collective != "all-gather":
            self._reduce_scatter()
        if self._collective != "reduce-scatter":
            self._all_gather()

    def result(self) -> Array:
        """The array; after a reduce-scatter this rank's part of it, summed in place."""
        return self._part(self._rank) if self._collective == "reduce-scatter" else self._whole

    def chosen(self) -> str:
        return f"ring on {self._version}"

    def _part(self, number: int) -> Array:
        """Part ``number`` (counted around the ring) of the array."""
        number %= self._ranks
        start, stop = (self._whole.size * edge // self._ranks for edge in (number, number + 1))
        return self._whole[start:stop]

    def _reduce_scatter(self) -> None:
        """Rank r ends with the sum of part r."""
        raise NotImplementedError

    def _all_gather(self) -> None:
        """Part r goes from rank r to all."""
        raise NotImplementedError


def pieces(part: Array) -> list[Array]:
    """A part in pieces of ``PIECE_BYTES``."""
    step = PIECE_BYTES // 4
    return [part[at : at + step] for at in range(0, part.size, step)]
