"""All-gather: every rank sends its payload to all others and adds up what comes, in rank order.

For sparse payloads: N ranks of k pairs each make up to N k different elements, which would not fit a payload of k pairs
again. Cost per rank: (N-1) payloads sent and received, N decoded; more than an allreduce from some number of ranks on
(see ``merged``), which is the price of losing nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from . import Computing, Message, Operand, Participant, Reducer, Round, Traffic, Way
from .letters import Letter, Post, name_of
from .owners import cut

PIECE_ELEMENTS = 1 << 22


def pieces(parts: Sequence[Operand], me: Participant) -> list[Callable[[], Reducer]]:
    """One reducer for every piece of about ``PIECE_ELEMENTS`` elements; tensors stay whole."""
    return [partial(reduce, piece, Letter(piece), me) for piece in cut(parts, PIECE_ELEMENTS)]


def traffic(parts: Sequence[Operand], workers: int, owners: Sequence[int]) -> list[Traffic]:  # noqa: ARG001
    """Of every piece, everybody's message to everybody else."""
    src, dst = np.nonzero(~np.eye(workers, dtype=bool))
    return [[Letter(piece).flows(src, dst)] for piece in cut(parts, PIECE_ELEMENTS)]


def computing(workers: int) -> Computing:
    """All payloads are decoded everywhere."""
    return Computing(1, workers, 0)


def reduce(piece: Sequence[Operand], letter: Letter, me: Participant) -> Reducer:
    """One piece."""
    arrays, states = [part.array for part in piece], [part.state for part in piece]
    posts: dict[int, Post] = {me.index: letter.write(me.room, arrays, states, me.report)}
    others = me.others()
    posts |= {other: letter.room(me.room) for other in others}
    sends = [Message(other, posts[me.index].data, letter.fixed) for other in others]
    lengths = yield Round(sends, [Message(other, posts[other].data, letter.fixed) for other in others])
    for other, length in zip(others, lengths, strict=True):
        posts[other].nbytes = length
    for worker in range(me.workers):
        letter.read(posts[worker], arrays, states, name_of(worker, me), add=worker > 0)
        posts[worker].free()


WAY = Way(pieces, traffic, computing, "all payloads are gathered by all", carrier="direct")
