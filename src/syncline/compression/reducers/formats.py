"""The message format: the payloads of several parts in one message with a header.

    word 0   a checksum of the parts' codecs
    word 1   their number of elements
    word 2   the step, which determines the seeds of random numbers
    then     the length of each payload in words, unless all lengths are fixed
    then     the payloads

A message that does not match the receiver's own parts is refused before anything is decoded.

After the message its buffer has a word for each part: whether the encoded gradient was finite. On a device (``Queue``)
these words and the payloads come down together, after the call has returned.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...codecs import Floats, Merges, Payload, PayloadError, State
from ...codecs._device import all_in_one, bring_down, bring_up, room_for
from ...nouns import Spec
from ...wire.scratch import Scratch
from . import Bytes, Flows, Operand, Participant, Queue, ReduceError, Reducer, Round

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
        self._elements = sum(part.elements for part in parts) & 0xFFFFFFFF
        self._first = _HEAD + (0 if self.fixed else len(parts))
        self.greatest_bytes = 4 * (self._first + sum(self._greatest))
        self.expected_bytes = 4 * self._first + sum(expected for expected, _ in sizes)

    def flows(self, src: Column, dst: Column) -> Flows:
        """The sizes of such messages between processes, without writing one."""
        return Flows(src, dst, np.full(len(src), self.expected_bytes), np.full(len(src), self.greatest_bytes))

    def write(
        self, room: Scratch, inputs: Sequence[Floats], states: Sequence[State], queue: Queue | None = None
    ) -> Packet:
        """Encode ``inputs``, one per part, into a new message; in ``queue`` if they are on a device."""
        packet = Packet(room.take(self.greatest_bytes + 4 * len(self.parts)), self.greatest_bytes, room)
        words = packet.words
        words[0], words[1], words[2] = self._check, self._elements, states[0].step & 0xFFFFFFFF

        def note(lengths: Sequence[int]) -> None:
            if not self.fixed:
                words[_HEAD : self._first] = lengths
            packet.nbytes = 4 * (self._first + sum(lengths))

        payloads = words[self._first : self.greatest_bytes // 4]
        encode(self.parts, self._greatest, inputs, states, payloads, self._told(packet), note, queue)
        return packet

    def report(self, packet: Packet, report: Callable[[str], None]) -> None:
        """Call ``report`` with every part whose gradient, in this message of this process, is not finite."""
        for number in np.flatnonzero(self._told(packet) == 0).tolist():
            report(self.parts[number].name)

    def _told(self, packet: Packet) -> Payload:
        """Whether each part was finite, in a message of this process."""
        return packet.words[self.greatest_bytes // 4 :][: len(self.parts)]

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
        self,
        packet: Packet,
        outputs: Sequence[Floats],
        states: Sequence[State],
        sender: str,
        *,
        add: bool,
        queue: Queue | None = None,
    ) -> None:
        """Decode a message into ``outputs``, or add it to them; in ``queue`` if they are on a device."""
        lengths = [len(payload) for payload in self.payloads(packet, sender)]
        self._check_step(packet, states[0].step, sender)
        payloads = packet.words[self._first : packet.nbytes // 4]
        decode(self.parts, lengths, payloads, outputs, states, sender, add=add, queue=queue)

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


def encode(
    parts: Sequence[Operand],
    greatest: Sequence[int],
    inputs: Sequence[Floats],
    states: Sequence[State],
    words: Payload,
    told: Payload,
    note: Callable[[Sequence[int]], None] = lambda _: None,
    queue: Queue | None = None,
) -> None:
    """Encode ``inputs``, one per part, one after the other into ``words``. A part takes up to its ``greatest`` words.

    ``note`` gets the lengths of the payloads, and ``told`` whether each input was finite.
    """

    def fill(into: Payload) -> tuple[int, list[bool]]:
        at, lengths, finite = 0, [], []
        for part, most, x, state in zip(parts, greatest, inputs, states, strict=True):
            made = part.codec.encode(x, into[at : at + most], state, part.start)
            lengths.append(made.words)
            finite.append(made.finite)
            at += made.words
        note(lengths)
        return at, finite

    def fill_there() -> None:
        into = room_for(len(words), inputs[0])
        length, finite = fill(into)
        bring_down(into[:length], words[:length])
        bring_down(all_in_one(finite), told)

    if queue is None:
        _, told[:] = fill(words)
        return
    states = [copy.copy(state) for state in states]  # at the present step
    queue.run(fill_there)


def decode(
    parts: Sequence[Operand],
    lengths: Sequence[int],
    words: Payload,
    outputs: Sequence[Floats],
    states: Sequence[State],
    sender: str,
    *,
    add: bool,
    queue: Queue | None = None,
) -> None:
    """Decode the payloads of ``parts``, which lie one after the other in ``words``, into ``outputs``, or add them.

    With a ``queue``, ``words`` must not change before everything that was queued there is done.
    """

    def empty(payloads: Payload) -> None:
        at = 0
        for part, length, out, state in zip(parts, lengths, outputs, states, strict=True):
            try:
                part.codec.decode(payloads[at : at + length], out, state, add=add, start=part.start)
            except PayloadError as error:
                raise ReduceError(f"{sender}: the payload of {part.name!r} ({part.codec}): {error}") from None
            at += length

    if queue is None:
        empty(words)
        return
    states = [copy.copy(state) for state in states]  # at the present step
    queue.run(lambda: empty(bring_up(words, outputs[0])))


def landed(queue: Queue | None) -> Reducer:
    """Continue when all encodings in ``queue``, if there is one, are in host memory."""
    if queue is not None:
        yield Round([], [], after=queue)


def free(packets: Iterable[Packet], me: Participant) -> None:
    """Return the buffers of messages, from which a device may still read."""
    me.give(packet.buffer for packet in packets)


def name_of(process: int, me: Participant) -> str:
    """The name of a process in error messages."""
    number = me.called[process] if me.called else process
    return f"rank {number}" if process < me.workers else f"server rank {number}"


def spec_of(part: Operand) -> Spec:
    """The shape that determines a codec's sizes: the tensor's shape or a slice's."""
    return part.state.spec if part.elements == part.state.spec.elements else Spec(part.name, (part.elements,))
