"""Encodes the weights of owners for the workers: all workers together, or each by the version that it has.

Only differences are encoded: the owner's weights minus the *known* weights, which all workers have in their models.
``compression`` owns the codec's state. The owner adds the decoded payload to the known weights, as all workers do, so
all have the same bits. An encoding error remains in the difference and so enters the next payload: the known weights
correct every error, as a residual would. Gruntkowska, Tyurin, Richtarik, "EF21-P and friends: improved theoretical
communication complexity for distributed optimization with bidirectional compression", ICML 2023.

This requires a codec that is a contraction. With any other codec the difference would grow from step to step. The owner
then replaces its weights by the known ones, and a payload is an unbiased estimate of an update.

Differences are float32. Weights of another type are subtracted and added in the wider of both types and rounded alike
everywhere. Cost per rank with S owners: one decoding of everything; 1/S encoding of everything at an owner.

``Updates`` serves workers that pull together. ``UpdateSender`` serves workers that fetch weights one by one. Its known
weights of a version follow from those of the version before and one payload. A worker at version a gets the payloads of
all later versions and adds them in order, or the known weights themselves where those are fewer bytes. A worker that no
other has overtaken gets a single payload. At c versions behind, with payloads c times smaller than the weights, it gets
as many bytes as without a codec. The owner keeps no more bytes of payloads than that. A message to such a worker has

    word 0   the worker's version after this message
    word 1   the number of payloads, or ALL for the weights themselves
    then     the bytes of each payload's message
    then     these messages (``formats``), or the weights
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codecs import Floats, State, relay_of
from ..codecs._device import on_device
from ..kernels import cpu
from ..wire.scratch import Scratch
from .compression import Compression, Divided
from .reducers import Bytes, Held, Operand, Participant, ReduceError, Reducer, levels
from .reducers.formats import MessageFormat, Packet
from .reducers.owners import OwnedPiece, answer, divide, share_out

Array = NDArray[Any]


def _sending(parts: Sequence[Operand], me: Participant) -> list[Callable[[], Reducer]]:
    """The reducers that send the updates, one per piece of an owner."""
    return [partial(_send_update, piece, me) for piece in divide(share_out(parts, len(me.owners)))]


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
    if me.device is not None or all(part.array.dtype == np.float32 for share in shares for part in share):
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


def _room_for(parts: Sequence[Operand], room: Scratch) -> tuple[Bytes, list[Floats]]:
    """A buffer, and arrays in it with the parts' sizes."""
    buffer = room.take(4 * sum(part.elements for part in parts))
    found: list[Floats] = []
    at = 0
    for part in parts:
        found.append(buffer[4 * at : 4 * (at + part.elements)].view(np.float32))
        at += part.elements
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

    They may be on the device of the gradients, in a worker that owns nothing, if all are float32.

    ``owned`` are the ranges of this process, initialized from the known weights. The optimizer writes into their
    arrays, but never between ``pieces`` and the end of its reducers.
    """

    def __init__(self, compression: Compression, known: Sequence[Array]) -> None:
        self._compression, self._known = compression, known
        there = len(known) > 0 and on_device(known[0])
        self._me = compression.participant if there else replace(compression.participant, device=None)
        self._held: list[list[Held]] = []
        self._pieces: dict[int, Divided] = {}  # created by the first update
        owned: list[Owned] = []
        number_of = {name: number for number, name in enumerate(compression.names)}
        for number in range(compression.buckets):
            mine = self._shares(number)[compression.participant.owner] if compression.participant.owner >= 0 else []
            found = [
                Owned(number_of[part.name], part.start, part.start + part.elements, part.array.copy()) for part in mine
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
        shares, me = self._shares(number, step), self._me
        if me.owner >= 0:
            shares[me.owner] = [
                replace(part, held=held) for part, held in zip(shares[me.owner], self._held[number], strict=True)
            ]
        parts = [part for share in shares for part in share]
        if me.hosts:
            reducers = levels.pieces(parts, self._known[number], me, _sending, servers=me.owners, up=False)
        else:
            reducers = _sending(parts, me)
        return Divided(parts, reducers, warming)

    def _shares(self, number: int, step: int | None = None) -> list[list[Operand]]:
        parts = self._compression.parts(number, self._known[number], step)
        return share_out(parts, len(self._compression.participant.owners))


ALL = 0xFFFFFFFF
_HEAD_BYTES = 8


class _Part:
    """One owner's share of a bucket, in arrays of the known weights. Owner and worker each have one."""

    def __init__(self, share: Sequence[Operand]) -> None:
        self._parts = [replace(part, codec=relay_of(part.codec)) for part in share]
        # the threads of both sides may decode at once
        self._states: list[State] = [copy.deepcopy(part.again) for part in share]
        self._format = MessageFormat(self._parts)
        self._whole_bytes = sum(part.array.nbytes for part in share)
        self.version = 0

    @property
    def greatest_bytes(self) -> int:
        """The maximum size of a message."""
        return _HEAD_BYTES + self._whole_bytes

    def _add(self, packet: Packet, version: int, sender: str) -> None:
        """Add a payload to the known weights, which then have that version."""
        for state in self._states:
            state.step = version
        arrays = [part.array for part in self._parts]
        if all(array.dtype == np.float32 for array in arrays):
            self._format.read(packet, arrays, self._states, sender, add=True)
        else:
            changes = [np.empty(array.size, np.float32) for array in arrays]
            self._format.read(packet, changes, self._states, sender, add=False)
            for array, change in zip(arrays, changes, strict=True):
                cpu.add_difference(array, change)
        self.version = version


class UpdateSender(_Part):
    """The owner's side. ``held`` are its weights, whose updates it encodes. Not thread-safe."""

    def __init__(self, share: Sequence[Operand], held: Sequence[Held]) -> None:
        super().__init__(share)
        self._held, self._room = held, Scratch()
        self._sent: deque[Bytes] = deque()  # payloads of the latest versions, the newest last

    def update(self) -> None:
        """Encode the owner's updated weights as the next version."""
        changes = []
        for part, held in zip(self._parts, self._held, strict=True):
            changes.append(np.empty(part.elements, np.float32))
            cpu.difference(held.weights, part.array, changes[-1])
        for state in self._states:
            state.step = self.version + 1
        packet = self._format.write(self._room, changes, self._states)
        self._sent.append(packet.data.copy())
        self._add(packet, self.version + 1, "this owner")
        packet.free()
        for part, held in zip(self._parts, self._held, strict=True):
            if not held.keeps:
                held.weights[:] = part.array
        # More payloads than weights: workers that far behind get the weights themselves.
        while sum(4 + one.nbytes for one in self._sent) > self._whole_bytes:
            self._sent.popleft()

    def renew(self) -> None:
        """Start a version from the owner's weights as they are, which every worker then gets in full."""
        for part, held in zip(self._parts, self._held, strict=True):
            part.array[:] = held.weights
        self._sent.clear()
        self.version += 1

    def since(self, version: int) -> Bytes:
        """The message for a worker that has ``version``."""
        behind = self.version - version
        if behind > len(self._sent):
            return _message(self.version, ALL, [], [part.array.view(np.uint8) for part in self._parts])
        bodies = list(self._sent)[len(self._sent) - behind :]
        return _message(self.version, behind, [body.nbytes for body in bodies], bodies)


class UpdateReceiver(_Part):
    """A worker's known weights, which follow an owner's by its updates."""

    def take(self, data: Bytes, sender: str) -> None:
        """Apply an owner's message; raises ReduceError unless it continues from this version."""
        if data.nbytes < _HEAD_BYTES:
            raise self._nonsense(sender, f"of {data.nbytes} bytes is too short")
        version, count = (int(word) for word in data[:_HEAD_BYTES].view(np.uint32))
        if count == ALL:
            self._take_all(data[_HEAD_BYTES:], sender)
            self.version = version
            return
        at = _HEAD_BYTES + 4 * count
        lengths = data[_HEAD_BYTES:at].view(np.uint32).tolist() if at <= data.nbytes else []
        if version != self.version + count or len(lengths) != count or at + sum(lengths) != data.nbytes:
            why = (
                f"has {count} payloads in {data.nbytes} bytes and leads to version {version}, but this worker has"
                f" version {self.version}"
            )
            raise self._nonsense(sender, why)
        for length in lengths:
            if length % 4:
                raise self._nonsense(sender, f"has a payload of {length} bytes")
            self._add(Packet(data[at : at + length], length), self.version + 1, sender)
            at += length

    def _take_all(self, data: Bytes, sender: str) -> None:
        if data.nbytes != self._whole_bytes:
            raise self._nonsense(sender, f"has {data.nbytes} bytes of weights instead of {self._whole_bytes}")
        at = 0
        for part in self._parts:
            part.array.view(np.uint8)[:] = data[at : at + part.array.nbytes]
            at += part.array.nbytes

    def _nonsense(self, sender: str, why: str) -> ReduceError:
        first = self._parts[0].name
        return ReduceError(f"{sender}: a message about updates of {first!r} {why}; do all run the same version?")


def _message(version: int, count: int, lengths: Sequence[int], bodies: Sequence[Bytes]) -> Bytes:
    head = np.array([version & 0xFFFFFFFF, count, *lengths], np.uint32)
    return np.concatenate([head.view(np.uint8), *bodies])
