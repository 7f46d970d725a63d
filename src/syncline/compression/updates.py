"""Owns this process's share of the weights and sends their updates to the workers through a codec.

An owner has its own weights beside the *known* ones, which all workers have in their models. ``compression`` owns the
codec's state.

Only differences are encoded: those between the owner's weights and the known ones. The owner adds the decoded payload
to the known weights, as all workers do, so all have the same bits. An encoding error remains in the difference and so
enters the next payload: the known weights correct every error, as a residual would. Gruntkowska, Tyurin, Richtarik,
"EF21-P and friends: improved theoretical communication complexity for distributed optimization with bidirectional
compression", ICML 2023.

This requires a codec that is a contraction. With any other codec the difference would grow from step to step. The owner
then replaces its weights by the known ones, and a payload is an unbiased estimate of an update.

Differences are float32. Weights of another type are subtracted and added in the wider of both types and rounded alike
everywhere. Cost per rank with S owners: one decoding of everything; 1/S encoding of everything at an owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codecs import Floats
from ..kernels import cpu
from .compression import Compression, Divided
from .reducers import Bytes, Held, Operand, Participant, Reducer, Room
from .reducers.owners import OwnedPiece, answer, divide, share_out

Array = NDArray[Any]


def _send_update(piece: OwnedPiece, me: Participant) -> Reducer:
    """Send the updates of one piece.

    The parts' arrays are the known weights, of any floating-point type; this owner's parts have ``held``.
    """
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
    # Without a contraction the error would grow: forget it.
    for part in own:
        if part.held is not None and not part.held.keeps:
            part.held.weights[:] = part.array


def _through_float32(
    piece: OwnedPiece, me: Participant, changes: list[Floats], wanted: dict[int, Sequence[Operand]]
) -> Reducer:
    """The same for known weights that are not float32: decode into float32, then add."""
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
    """A buffer, and arrays in it with the parts' sizes."""
    buffer = room.take(4 * sum(part.array.size for part in parts))
    found: list[Floats] = []
    at = 0
    for part in parts:
        found.append(buffer[4 * at : 4 * (at + part.array.size)].view(np.float32))
        at += part.array.size
    return buffer, found


@dataclass(frozen=True, eq=False)
class Owned:
    """Elements ``start`` to ``stop`` of a tensor, and the owner's weights there."""

    tensor: int
    start: int
    stop: int
    weights: Array


class Updates:
    """The updates of one model's weights. ``known`` are the buckets' weights as all workers have them.

    ``owned`` are the ranges of this process, initialized from the known weights. The optimizer writes into their
    arrays, but never between ``pieces`` and the end of its reducers.
    """

    def __init__(self, compression: Compression, known: Sequence[Array]) -> None:
        self._compression, self._known = compression, known
        self._held: list[list[Held]] = []
        self._pieces: dict[int, Divided] = {}  # created by the first update
        owned: list[Owned] = []
        number_of = {name: number for number, name in enumerate(compression.names)}
        for number in range(compression.buckets):
            mine = self._shares(number)[compression.participant.owner] if compression.participant.owner >= 0 else []
            found = [
                Owned(number_of[part.name], part.start, part.start + part.array.size, part.array.copy())
                for part in mine
            ]
            self._held.append([Held(one.weights, compression.keeps_rest(one.tensor)) for one in found])
            owned += found
        self.owned = tuple(owned)

    @property
    def keeps(self) -> bool:
        """Whether an owner's weights may be more precise than the known ones; the same on all processes."""
        return any(self._compression.keeps_rest(tensor) for tensor in range(len(self._compression.names)))

    def pieces(self, number: int) -> Sequence[Callable[[], Reducer]]:
        """The reducers of a bucket whose owned weights have been updated."""
        step = self._compression.answered(number)
        warming, made = self._compression.warming(step), self._pieces.get(number)
        if made is None or made.warming != warming:
            made = self._pieces[number] = self._divided(number, step, warming)
        self._compression.set_answered_step(number, made.parts)
        return made.reducers

    def _divided(self, number: int, step: int, warming: int) -> Divided:
        shares, me = self._shares(number, step), self._compression.participant
        if me.owner >= 0:
            shares[me.owner] = [
                replace(part, held=held) for part, held in zip(shares[me.owner], self._held[number], strict=True)
            ]
        reducers = [partial(_send_update, piece, me) for piece in divide(shares)]
        return Divided([part for share in shares for part in share], reducers, warming)

    def _shares(self, number: int, step: int | None = None) -> list[list[Operand]]:
        parts = self._compression.parts(number, self._known[number], step)
        return share_out(parts, len(self._compression.participant.owners))
