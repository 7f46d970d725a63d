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
from ._ring import PIECE_BYTES, Ring


@register("peers", "ucxx:ring", collectives=("allreduce", "reduce-scatter", "all-gather"), moves="memory", needs="ucxx")
class UcxRing(Ring):
    """Ring allreduce, or one of its halves, on tag_send and tag_recv."""

    def __init__(self, seat: Seat) -> None:
        import ucxx
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array as Memory
        from ucxx.types import Tag

        self._memory_of, self._tag = Memory, Tag
        super().__init__(seat, f"UCX {'.'.join(map(str, ucxx.get_ucx_version()))}")
        context = libucxx.UCXContext({}, (libucxx.Feature.TAG,))
        self._worker = libucxx.UCXWorker(context)
        to = bytes.fromhex(seat.share(bytes(self._worker.address).hex())[(seat.rank + 1) % seat.world])
        self._next = self._worker.create_endpoint_from_worker_address(libucxx.UCXAddress.create_from_buffer(to), False)
        self._arriving: Array = np.empty(seat.elements // seat.world + 1, np.float32)

    def close(self) -> None:
        """Nobody needs anything any more: all ranks end together."""
        self._next.close_blocking()
        del self._next, self._worker

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
        """Part r goes from rank r to all: in step s a rank passes on part r-s."""
        for turn in range(self._ranks - 1):
            receiving = self._receive(self._part(self._rank - turn - 1))
            self._wait(self._send(self._part(self._rank - turn)), receiving)
