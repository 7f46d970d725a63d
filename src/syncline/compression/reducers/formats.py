"""The message format: the payloads of several parts in one message with a header.

    word 0   a checksum of the parts' codecs
    word 1   their number of elements
    word 2   the step, which determines the seeds of random numbers
    then     the length of each payload in words, unless all lengths are fixed
    then     the payloads

A message that does not match the receiver's own parts is refused before anything is decoded.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...codecs import Floats, Merges, Payload, PayloadError, State
from ...nouns import Spec
from ...wire.scratch import Scratch
from . import Bytes, Flows, Operand, Participant, ReduceError

Column = NDArray[np.int64]

_HEAD = 3


class MessageFormat:
    """The format of a message with given parts. It is made once and used for every rank's message of a round."""

    def __init__(self, parts: Sequence[Operand]) -> None:
        self.parts = tuple(parts)
        sizes = [part.codec.wire_bytes(spec_of(part)) for part in parts]
        self._greatest = [size[1] // 4 for size in sizes]
        self.fixed = all(expected == greatest for expected, greatest in sizes)
        """Whether every message has exactly ``greatest_bytes``."""
        texts = "+".join(dict.fromkeys(repr(part.codec) for part in parts))
        self._check = zlib.crc32(texts.encode())
        self._elements = sum(part.array.size for part in parts) & 0xFFFFFFFF
        self._first = _HEAD + (0 if self.fixed else len(parts))
        self.greatest_bytes = 4 * (self._first + sum(self._greatest))
        self.expected_bytes = 4 * self._first + sum(expected for expected, _ in sizes)

    def flows(self, src: Column, dst: Column) -> Flows:
        """The sizes of such messages between processes, without writing one."""
        return Flows(src, dst, np.full(len(src), self.expected_bytes), np.full(len(src), self.greatest_bytes))

    def write(
        self, room: Scratch, inputs: Sequence[Floats], states: Sequence[State], report: Callable[[str], None]
    ) -> Packet:
        """Encode ``inputs``, one per part, into a new message."""
        packet = self.room(room)
        words = packet.words
        words[0], words[1], words[2] = self._check, self._elements, states[0].step & 0xFFFFFFFF
        at = self._first
        for number, (part, x, state) in enumerate(zip(self.parts, inputs, states, strict=True)):
            made = part.codec.encode(x, words[at : at + self._greatest[number]], state, part.start)
            if not made.finite:
                report(part.name)
            if not self.fixed:
                words[_HEAD + number] = made.words
            at += made.words
        packet.nbytes = 4 * at
        return packet

    def room(self, room: Scratch) -> Packet:
        """A buffer for an incoming message."""
        return Packet(room.take(self.greatest_bytes), self.greatest_bytes, room)

    def step_of(self, packet: Packet, sender: str) -> int:
        """The step of a message; raises ReduceError if its header does not match."""
        self.payloads(packet, sender)
        return int(packet.words[2])

    def payloads(self, packet: Packet, sender: str) -> list[Payload]:
        """The payloads in a message; raises ReduceError if its header does not match."""
        words = packet.words[: packet.nbytes // 4]
        names = f"{sender}: a message of {packet.nbytes} bytes for {self._text()}"
        if packet.nbytes % 4 or words.size < self._first:
            raise ReduceError(f"{names} is too short")
        if words[0] != self._check:
            raise ReduceError(f"{names} was made by another codec")
        if words[1] != self._elements:
            raise ReduceError(f"{names} has {words[1]} elements instead of {self._elements}")
        lengths = self._greatest if self.fixed else words[_HEAD : self._first].tolist()
        if any(length > most for length, most in zip(lengths, self._greatest, strict=True)):
            raise ReduceError(f"{names} declares a payload that is longer than its codec allows")
        if self._first + sum(lengths) != words.size:
            raise ReduceError(f"{names} should have {4 * (self._first + sum(lengths))} bytes")
        edges = np.cumsum([self._first, *lengths]).tolist()
        return [words[start:stop] for start, stop in pairwise(edges)]

    def read(
        self, packet: Packet, outputs: Sequence[Floats], states: Sequence[State], sender: str, *, add: bool
    ) -> None:
        """Decode a message into ``outputs``, or add it to them."""
        payloads = self.payloads(packet, sender)
        self._check_step(packet, states[0].step, sender)
        for part, payload, out, state in zip(self.parts, payloads, outputs, states, strict=True):
            try:
                part.codec.decode(payload, out, state, add=add, start=part.start)
            except PayloadError as error:
                raise ReduceError(f"{sender}: the payload of {part.name!r} ({part.codec}): {error}") from None

    def _check_step(self, packet: Packet, step: int, sender: str) -> None:
        found = int(packet.words[2])
        if found != step & 0xFFFFFFFF:
            raise ReduceError(
                f"{sender}: a message for {self._text()} belongs to step {found}, but this process is at step {step}:"
                " resume all ranks from the same checkpoint"
            )

    def merge(self, room: Scratch, mine: Packet, theirs: Packet, states: Sequence[State], sender: str) -> Packet:
        """Merge two messages into one and free both. Elements that do not fit go into the residuals of ``states``."""
        self._check_step(theirs, states[0].step, sender)
        merged = self.room(room)
        words = merged.words
        words[: self._first] = mine.words[: self._first]
        at = self._first
        both = zip(self.parts, self.payloads(mine, "this rank"), self.payloads(theirs, sender), states, strict=True)
        for number, (part, here, there, state) in enumerate(both):
            assert isinstance(part.codec, Merges)
            try:
                length = part.codec.merge(here, there, words[at : at + self._greatest[number]], state)
            except PayloadError as error:
                raise ReduceError(f"{sender}: the payload of {part.name!r} ({part.codec}): {error}") from None
            if not self.fixed:
                words[_HEAD + number] = length
            at += length
        merged.nbytes = 4 * at
        mine.free()
        theirs.free()
        return merged

    def _text(self) -> str:
        first, last = self.parts[0], self.parts[-1]
        names = repr(first.name) if first.name == last.name else f"{first.name!r} to {last.name!r}"
        return f"{names} ({first.codec})"


class Packet:
    """A message in ``buffer``. ``nbytes`` is its length, once it is written or received.

    ``room`` gets the buffer back; without a room it belongs to the caller.
    """

    __slots__ = ("_room", "buffer", "nbytes")

    def __init__(self, buffer: Bytes, nbytes: int, room: Scratch | None = None) -> None:
        self.buffer, self.nbytes, self._room = buffer, nbytes, room

    @property
    def words(self) -> Payload:
        """The whole buffer as 32-bit words."""
        return self.buffer[: self.buffer.nbytes // 4 * 4].view(np.uint32)

    @property
    def data(self) -> Bytes:
        """The bytes that travel."""
        return self.buffer[: self.nbytes]

    def free(self) -> None:
        """Return the buffer to its pool."""
        if self._room is not None:
            self._room.give(self.buffer)


def name_of(process: int, me: Participant) -> str:
    """The name of a process in error messages."""
    number = me.called[process] if me.called else process
    return f"rank {number}" if process < me.workers else f"server rank {number}"


def spec_of(part: Operand) -> Spec:
    """The shape that determines a codec's sizes: the tensor's shape or a slice's."""
    return part.state.spec if part.array.size == part.state.spec.elements else Spec(part.name, (part.array.size,))
