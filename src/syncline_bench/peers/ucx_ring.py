"""A ring on UCX's tagged messages, as one writes it on ucxx at its fastest.

The allreduce of baidu-allreduce: scatter-reduce, then all-gather, N-1 steps each (Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009), on ucxx's synchronous objects, which have no event
loop to wake. The settings that matter: endpoints without error handling, since UCX otherwise takes the slow ways
through memory; receives posted before their messages, so that each is read once and straight from the sender's memory;
the scatter-reduce in pieces, so that a piece is added while the next one is on its way. A rank that waits yields its
core, since ranks may outnumber cores.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from syncline.registry import register

from . import Array, Seat

_PIECE_BYTES = 1 << 20


@register("peers", "ucxx:ring", collectives=("allreduce", "reduce-scatter", "all-gather"), moves="memory", needs="ucxx")
class UcxRing:
    """Ring allreduce, or one of its halves, on tag_send and tag_recv."""

    def __init__(self, seat: Seat) -> None:
        import ucxx
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array as Memory
        from ucxx.types import Tag

        self._memory_of, self._tag = Memory, Tag
        self._rank, self._ranks, self._collective = seat.rank, seat.world, seat.collective
        self._version = f"ring on UCX {'.'.join(map(str, ucxx.get_ucx_version()))}"
        context = libucxx.UCXContext({}, (libucxx.Feature.TAG,))
        self._worker = libucxx.UCXWorker(context)
        to = bytes.fromhex(seat.share(bytes(self._worker.address).hex())[(seat.rank + 1) % seat.world])
        self._next = self._worker.create_endpoint_from_worker_address(libucxx.UCXAddress.create_from_buffer(to), False)
        self._all = np.zeros(seat.elements, np.float32)
        self._arriving: Array = np.empty(seat.elements // seat.world + 1, np.float32)
        self._whole: Array = self._all

    def select(self, elements: int) -> Array:
        """The first ``elements`` as the array to work on."""
        self._whole = self._all[:elements]
        return self._whole

    def run(self) -> None:
        """Once around for each half."""
        if self._collective != "all-gather":
            self._reduce_scatter()
        if self._collective != "reduce-scatter":
            self._all_gather()

    def result(self) -> Array:
        """The array; after a reduce-scatter this rank's part of it, summed in place."""
        return self._part(self._rank) if self._collective == "reduce-scatter" else self._whole

    def chosen(self) -> str:
        """The library that carries the messages."""
        return self._version

    def close(self) -> None:
        """Nobody needs anything any more: all ranks end together."""
        self._next.close_blocking()
        del self._next, self._worker

    def _part(self, number: int) -> Array:
        """Part ``number`` (counted around the ring) of the array."""
        number %= self._ranks
        start, stop = (self._whole.size * edge // self._ranks for edge in (number, number + 1))
        return self._whole[start:stop]

    def _send(self, data: Array) -> Any:
        return self._next.tag_send(self._memory_of(data), self._tag(1))

    def _receive(self, into: Array) -> Any:
        return self._worker.tag_recv(self._memory_of(into), self._tag(1))

    def _wait(self, *requests: Any) -> None:
        for request in requests:
            while not request.completed:
                if not self._worker.progress_once():
                    os.sched_yield()
            request.check_error()

    def _reduce_scatter(self) -> None:
        """Rank r ends with the sum of part r: in step s it passes on part r-1-s."""
        step = _PIECE_BYTES // 4
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
        """Part r goes from rank r to all: in step s a rank passes on part r-s."""
        for turn in range(self._ranks - 1):
            receiving = self._receive(self._part(self._rank - turn - 1))
            self._wait(self._send(self._part(self._rank - turn)), receiving)
