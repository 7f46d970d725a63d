"""A ring on UCX's tagged messages, as fast as ucxx allows.

It uses ucxx's synchronous objects, which have no event loop to wake. These settings matter: endpoints without error
handling, because UCX otherwise uses its slow paths through memory; receives posted before their messages, so that each
is read once, directly from the sender's memory; the scatter-reduce in pieces, so that a piece is added while the next
one travels. A waiting rank yields its core, because ranks may outnumber cores.
"""

from __future__ import annotations

import os
from typing import Any

from syncline.registry import register

from . import Array, Seat
from ._ring import PostedRing


@register("peers", "ucxx:ring", collectives=("allreduce", "reduce-scatter", "all-gather"), moves="memory", needs="ucxx")
class UcxRing(PostedRing):
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

    def close(self) -> None:
        """All ranks end together, so no rank still needs this one."""
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
