"""Merging along a binomial tree: two payloads become one of the same size until one is left, which returns to all.

For codecs whose payloads can be merged (global top-k, Shi et al., ICDCS 2019). One payload travels ceil(lg N) times up
and down the tree, whatever the number of ranks. A merge adds the elements that it drops to the merging rank's residual,
so no gradient is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from . import Computing, Flows, Message, Operand, Participant, Reducer, Round, Traffic, Way
from .formats import MessageFormat, name_of
from .gathered import PIECE_ELEMENTS
from .owners import cut


def pieces(parts: Sequence[Operand], me: Participant) -> list[Callable[[], Reducer]]:
    """One reducer per piece of about ``PIECE_ELEMENTS`` elements; tensors stay whole."""
    return [partial(reduce, piece, MessageFormat(piece), me) for piece in cut(parts, PIECE_ELEMENTS)]


def traffic(parts: Sequence[Operand], workers: int, owners: Sequence[int]) -> list[Traffic]:  # noqa: ARG001
    """For every piece, messages up the tree level by level, then down again."""
    return [_levels(MessageFormat(piece), workers) for piece in cut(parts, PIECE_ELEMENTS)]


def _levels(form: MessageFormat, workers: int) -> Traffic:
    steps: list[Flows] = []
    for distance in reversed(_halves(1 << (workers - 1).bit_length())):
        children = np.arange(distance, workers, 2 * distance)
        steps.append(form.flows(children, children - distance))
    return [*steps, *(form.flows(up.dst, up.src) for up in reversed(steps))]


def computing(workers: int) -> Computing:
    """The root merges on every level; a merge takes as long as a decoding."""
    return Computing(1, (workers - 1).bit_length() + 1, 0)


def reduce(piece: Sequence[Operand], form: MessageFormat, me: Participant) -> Reducer:
    """Merge one piece up the tree to rank 0, return it, and decode it."""
    arrays, states = [part.array for part in piece], [part.state for part in piece]
    packet = form.write(me.room, arrays, states, me.report)
    distance = 1
    while distance < me.workers and me.index % (2 * distance) == 0:
        sender = me.index + distance
        if sender < me.workers:
            theirs = form.room(me.room)
            theirs.nbytes = (yield Round([], [Message(sender, theirs.data)]))[0]
            packet = form.merge(me.room, packet, theirs, states, name_of(sender, me))
        distance *= 2
    if me.index:
        parent = me.index - distance
        yield Round([Message(parent, packet.data)], [])
        packet.free()
        packet = form.room(me.room)
        packet.nbytes = (yield Round([], [Message(parent, packet.data)]))[0]
    children = [me.index + step for step in _halves(distance) if me.index + step < me.workers]
    if children:
        yield Round([Message(child, packet.data) for child in children], [])
    form.read(packet, arrays, states, name_of(0, me), add=False)
    packet.free()


def _halves(distance: int) -> list[int]:
    """The distances to a rank's children, farthest first."""
    return [1 << bit for bit in reversed(range(distance.bit_length() - 1))]


WAY = Way(pieces, traffic, computing, "payloads are merged on a tree", carrier="tree")
