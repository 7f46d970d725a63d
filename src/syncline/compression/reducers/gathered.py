"""All-gather: every rank sends its payload to all others and adds the received payloads in rank order.

Meant for sparse payloads: N ranks of k pairs each have up to N k distinct elements, which no longer fit a payload of k
pairs. Cost per rank: N-1 payloads sent and received, N decoded. From some number of ranks on this exceeds an allreduce
(see ``merged``); in return no element is dropped a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from . import Computing, Message, Operand, Participant, Reducer, Round, Traffic, Way
from .formats import MessageFormat, Packet, name_of
from .owners import cut

PIECE_ELEMENTS = 1 << 22


def pieces(parts: Sequence[Operand], me: Participant) -> list[Callable[[], Reducer]]:
    """One reducer per piece of about ``PIECE_ELEMENTS`` elements; tensors stay whole."""
    return [partial(reduce, piece, MessageFormat(piece), me) for piece in cut(parts, PIECE_ELEMENTS)]


def traffic(parts: Sequence[Operand], workers: int, owners: Sequence[int]) -> list[Traffic]:  # noqa: ARG001
    """For every piece, one message from each worker to each other worker."""
    src, dst = np.nonzero(~np.eye(workers, dtype=bool))
    return [[MessageFormat(piece).flows(src, dst)] for piece in cut(parts, PIECE_ELEMENTS)]


def computing(workers: int) -> Computing:
    """Every rank decodes all payloads."""
    return Computing(1, workers, 0)


def reduce(piece: Sequence[Operand], form: MessageFormat, me: Participant) -> Reducer:
    """Exchange and add one piece."""
    arrays, states = [part.array for part in piece], [part.state for part in piece]
    packets: dict[int, Packet] = {me.index: form.write(me.room, arrays, states, me.report)}
    others = me.others()
    packets |= {other: form.room(me.room) for other in others}
    sends = [Message(other, packets[me.index].data, form.fixed) for other in others]
    lengths = yield Round(sends, [Message(other, packets[other].data, form.fixed) for other in others])
    for other, length in zip(others, lengths, strict=True):
        packets[other].nbytes = length
    for worker in range(me.workers):
        form.read(packets[worker], arrays, states, name_of(worker, me), add=worker > 0)
        packets[worker].free()


WAY = Way(pieces, traffic, computing, "all payloads are gathered by all", carrier="direct")
