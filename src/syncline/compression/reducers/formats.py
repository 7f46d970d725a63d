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
from functools import partial
from itertools import accumulate, pairwise

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
        told_bytes = 0 if queue is None else 4 * len(self.parts)
        packet = Packet(room.take(self.greatest_bytes + told_bytes), self.greatest_bytes, room)
        words = packet.words
        words[0], words[1], words[2] = self._check, self._elements, states[0].step & 0xFFFFFFFF
        payloads = words[self._first : self.greatest_bytes // 4]
        if queue is None:
            lengths, packet.finite = encode(self.parts, self._greatest, inputs, states, payloads)
            self._note(packet, lengths)
        else:
            note, told = partial(self._note, packet), self._told(packet)
            encode_there(self.parts, self._greatest, inputs, states, payloads, told, queue, note)
        return packet

    def _note(self, packet: Packet, lengths: Sequence[int]) -> None:
        """Write the lengths of a message's payloads."""
        if not self.fixed:
            packet.words[_HEAD : self._first] = lengths
        packet.nbytes = 4 * (self._first + sum(lengths))

    def report(self, packet: Packet, report: Callable[[str], None]) -> None:
        """Call ``report`` with every part whose gradient, in this message of this process, is not finite."""
        told = self._told(packet).tolist() if packet.finite is None else packet.finite
        for part, finite in zip(self.parts, told, strict=True):
            if not finite:
                report(part.name)

    def _told(self, packet: Packet) -> Payload:
        """Whether each part was finite, in a message that a device has encoded here."""
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
        payloads = self.payloads(packet, sender)
        self._check_step(packet, states[0].step, sender)
        if queue is None:
            decode(self.parts, payloads, outputs, states, sender, add=add)
        else:
            words = packet.words[self._first : packet.nbytes // 4]
            decode_there(self.parts, list(map(len, payloads)), words, outputs, states, sender, queue, add=add)

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

    __slots__ = ("_room", "buffer", "finite", "nbytes")

    def __init__(self, buffer: Bytes, nbytes: int, room: Scratch | None = None) -> None:
        self.buffer, self.nbytes, self._room = buffer, nbytes, room
        self.finite: list[bool] | None = None  # of each part, in a message that the processor has encoded here

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
    parts: Sequence[Operand], greatest: Sequence[int], inputs: Sequence[Floats], states: Sequence[State], into: Payload
) -> tuple[list[int], list[bool]]:
    """Encode ``inputs``, one per part, one after the other. A part takes up to its ``greatest`` words.

    Returns the lengths of the payloads, and whether each input was finite, as ``Encoded`` has it.
    """
    at, lengths, finite = 0, [], []
    for part, most, x, state in zip(parts, greatest, inputs, states, strict=True):
        made = part.codec.encode(x, into[at : at + most], state, part.start)
        lengths.append(made.words)
        finite.append(made.finite)
        at += made.words
    return lengths, finite


def encode_there(
    parts: Sequence[Operand],
    greatest: Sequence[int],
    inputs: Sequence[Floats],
    states: Sequence[State],
    words: Payload,
    told: Payload,
    queue: Queue,
    note: Callable[[Sequence[int]], None] = lambda _: None,
) -> None:
    """``encode`` on a device. The payloads come down to ``words``, and whether each input was finite to ``told``.

    ``note`` gets the lengths of the payloads.
    """
    states = [copy.copy(state) for state in states]  # at the present step

    def act() -> None:
        into = room_for(len(words), inputs[0])
        lengths, finite = encode(parts, greatest, inputs, states, into)
        note(lengths)
        bring_down(into[: sum(lengths)], words[: sum(lengths)])
        bring_down(all_in_one(finite), told)

    queue.run(act)


def decode(
    parts: Sequence[Operand],
    payloads: Sequence[Payload],
    outputs: Sequence[Floats],
    states: Sequence[State],
    sender: str,
    *,
    add: bool,
) -> None:
    """Decode the payloads of ``parts`` into ``outputs``, or add them."""
    for part, payload, out, state in zip(parts, payloads, outputs, states, strict=True):
        try:
            part.codec.decode(payload, out, state, add=add, start=part.start)
        except PayloadError as error:
            raise ReduceError(f"{sender}: the payload of {part.name!r} ({part.codec}): {error}") from None


def decode_there(
    parts: Sequence[Operand],
    lengths: Sequence[int],
    words: Payload,
    outputs: Sequence[Floats],
    states: Sequence[State],
    sender: str,
    queue: Queue,
    *,
    add: bool,
) -> None:
    """``decode`` on a device, of payloads that lie one after the other in ``words``.

    ``words`` must not change before everything that was queued is done.
    """
    states = [copy.copy(state) for state in states]  # at the present step
    queue.run(lambda: decode(parts, split(bring_up(words, outputs[0]), lengths), outputs, states, sender, add=add))


def split(words: Payload, lengths: Sequence[int]) -> list[Payload]:
    """Payloads that lie one after the other."""
    return [words[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]


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
