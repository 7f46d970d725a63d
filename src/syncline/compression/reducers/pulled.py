"""Owners hold weights: what an update has changed goes to all workers as a code, and all add it to what they have.

Weights are never encoded, only the difference between the owner's and those that all workers have, the *known* ones.
The owner adds to these what its payload says, as the workers do, so that all have the same bits. What a payload does
not say is still in the difference, and so in the next payload: the known weights make up for every error, as a residual
would. Gruntkowska, Tyurin, Richtarik, "EF21-P and friends: improved theoretical communication complexity for
distributed optimization with bidirectional compression", ICML 2023.

That needs a codec that is a contraction. Around one that is not, the difference would grow from step to step; there the
owner takes the known weights for its own, and an update is what its payload says of it, right in the mean.

Differences are float32. Weights of another type are subtracted and added in the wider of both, and rounded to their
type alike everywhere. Cost per rank with S owners: one decoding of everything; 1/S encoding of everything at an owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ...codecs import Floats
from ...kernels import cpu
from . import Bytes, Operand, Participant, Reducer, Room
from .owners import OwnedPiece, answer, divide


def pieces(shares: Sequence[Sequence[Operand]], me: Participant) -> list[Callable[[], Reducer]]:
    """What has to be done for a bucket: reducers that may run at the same time, in this order on all processes.

    The arrays of the parts are the known weights, of any floating-point type; the own share's parts have ``held``.
    """
    return [partial(reduce, piece, me) for piece in divide(shares)]


def reduce(piece: OwnedPiece, me: Participant) -> Reducer:
    """One piece."""
    shares = piece.shares
    own = shares[me.owner] if me.owner >= 0 else ()
    numbers = range(len(shares)) if me.works else range(me.owner, me.owner + 1)
    wanted = {number: shares[number] for number in numbers}
    buffer, changes = _room_for(own, me.room)
    for part, change in zip(own, changes, strict=True):
        assert part.held is not None
        cpu.difference(part.held.weights, part.array, change)
    if all(part.array.dtype == np.float32 for share in shares for part in share):
        known = {number: [part.array for part in share] for number, share in wanted.items()}
        yield from answer(piece, me, changes, known, add=True)
    else:
        yield from _through_float32(piece, me, changes, wanted)
    me.room.give(buffer)
    for part in own:
        if part.held is not None and not part.held.keeps:
            part.held.weights[:] = part.array


def _through_float32(
    piece: OwnedPiece, me: Participant, changes: list[Floats], wanted: dict[int, Sequence[Operand]]
) -> Reducer:
    """The same where a payload cannot be added to the known weights as it is decoded."""
    parts = [part for share in wanted.values() for part in share]
    buffer, decoded = _room_for(parts, me.room)
    arrays = iter(decoded)
    yield from answer(
        piece, me, changes, {number: [next(arrays) for _ in share] for number, share in wanted.items()}, add=False
    )
    for part, change in zip(parts, decoded, strict=True):
        cpu.add_difference(part.array, change)
    me.room.give(buffer)


def _room_for(parts: Sequence[Operand], room: Room) -> tuple[Bytes, list[Floats]]:
    """A buffer, and arrays in it as large as the parts."""
    buffer = room.take(4 * sum(part.array.size for part in parts))
    found: list[Floats] = []
    at = 0
    for part in parts:
        found.append(buffer[4 * at : 4 * (at + part.array.size)].view(np.float32))
        at += part.array.size
    return buffer, found
