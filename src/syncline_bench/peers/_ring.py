"""The parts of a ring that are common to all message libraries: memory, halves, results.

A ring is the allreduce of Sunway's Caffe and of baidu-allreduce: scatter-reduce, then all-gather, N-1 steps each
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from . import Array, Seat

PIECE_BYTES = 1 << 20
"""Parts travel in pieces, so that one piece is added while the next travels."""


class Ring(ABC):
    """Ring allreduce, or one of its halves, over an array in this process's memory.

    A library's ring implements ``_reduce_scatter`` and ``_all_gather``, which move the parts. ``version`` names it.
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

    @abstractmethod
    def _reduce_scatter(self) -> None:
        """Rank r ends with the sum of part r."""

    @abstractmethod
    def _all_gather(self) -> None:
        """Part r goes from rank r to all."""


class PostedRing(Ring):
    """A ring over a library whose receives are posted before their messages, so no message is copied in between."""

    def __init__(self, seat: Seat, version: str) -> None:
        super().__init__(seat, version)
        self._arriving: Array = np.empty(seat.elements // seat.world + 1, np.float32)

    @abstractmethod
    def _send(self, data: Array) -> Any:
        """Begin to send to the next rank. Returns the request."""

    @abstractmethod
    def _receive(self, into: Array) -> Any:
        """Post a receive from the rank before. Returns the request."""

    @abstractmethod
    def _wait(self, *requests: Any) -> None:
        """Wait for the end of these requests."""

    def _reduce_scatter(self) -> None:
        """In step s, rank r passes on part r-1-s."""
        step = PIECE_BYTES // 4
        for turn in range(1, self._ranks):
            leaving, into = self._part(self._rank - turn), self._part(self._rank - turn - 1)
            starts = range(0, into.size, step)
            arriving = [self._receive(self._arriving[at : min(at + step, into.size)]) for at in starts]
            sending = [self._send(leaving[at : at + step]) for at in range(0, leaving.size, step)]
            for at, message in zip(starts, arriving, strict=True):
                self._wait(message)
                piece = into[at : at + step]
                np.add(piece, self._arriving[at : at + piece.size], out=piece)
            self._wait(*sending)

    def _all_gather(self) -> None:
        """In step s, rank r passes on part r-s."""
        for turn in range(self._ranks - 1):
            receiving = self._receive(self._part(self._rank - turn - 1))
            self._wait(self._send(self._part(self._rank - turn)), receiving)


def pieces(part: Array) -> list[Array]:
    """A part in pieces of ``PIECE_BYTES``."""
    step = PIECE_BYTES // 4
    return [part[at : at + step] for at in range(0, part.size, step)]
