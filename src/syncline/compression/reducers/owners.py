"""Reduce to owners, encode the sums, send them to all: for payloads that cannot be added.

Every owner (each worker, or each server) owns a part of every piece. All workers send it their payloads of that part.
The owner decodes and adds them in rank order, encodes the sum (with its own residual if there is error feedback), and
sends it to all. Its own contribution also passes through the codec, so the result does not depend on ownership. This is
``direct``, or a parameter server, with codes instead of numbers.

Cost per rank if all N workers are owners: it sends and receives 2(N-1)/N of the payload, and encodes and decodes the
whole array once. As an owner it also decodes N payloads of its part, and encodes the sum of that part. Tang et al.,
"DoubleSqueeze", ICML 2019, have both residuals.

The first half, ``collect``, leaves the sums with their owners; the second half, ``answer``, encodes an owner's values
for all. Servers that hold the weights send updates of weights in the second half (``updates``).

Ownership follows from the bucket and the codecs alone (``share_out``). Shares are cut into pieces, so that one piece is
encoded while another travels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest

import numpy as np

from ...codecs import Floats, relay_of
from . import Computing, Flows, Message, Operand, Participant, Reducer, Round, Traffic, Way
from .formats import Column, MessageFormat, Packet, free, landed, name_of, spec_of

PIECE_BYTES = 2_000_000
PIECE_ELEMENTS = 1 << 22
"""The most payload and elements in a piece: a large bucket has several, and costs per message stay small."""


@dataclass(frozen=True, eq=False)
class OwnedPiece:
    """Parts that are reduced together, by owner, and the formats of their messages."""

    shares: Sequence[Sequence[Operand]]

    @cached_property
    def formats(self) -> list[MessageFormat]:
        """The formats of the workers' messages to the owners."""
        return [MessageFormat(share) for share in self.shares]

    @cached_property
    def relayed(self) -> list[list[Operand]]:
        """The parts with the codecs of the second encoding."""
        return [[replace(part, codec=relay_of(part.codec)) for part in share] for share in self.shares]

    @cached_property
    def answers(self) -> list[MessageFormat]:
        """The formats of the owners' messages to the workers."""
        return [MessageFormat(share) for share in self.relayed]


def pieces(parts: Sequence[Operand], me: Participant) -> list[Callable[[], Reducer]]:
    """One reducer per piece."""
    return [partial(reduce, piece, me) for piece in divide(share_out(parts, len(me.owners)))]


def collecting(parts: Sequence[Operand], me: Participant) -> list[Callable[[], Reducer]]:
    """One reducer per piece, for the first half alone."""
    return [partial(collect, piece, me) for piece in divide(share_out(parts, len(me.owners)))]


def pushing(parts: Sequence[Operand], me: Participant) -> list[Callable[[], Reducer]]:
    """One reducer per piece, for the payloads that one worker pushes by itself."""
    return [partial(push, piece, me) for piece in divide(share_out(parts, len(me.owners)))]


def taking(parts: Sequence[Operand], me: Participant, worker: int) -> list[Callable[[], Reducer]]:
    """One reducer per piece of ``parts``, for an owner that takes the payloads of ``worker`` alone."""
    return [partial(take, piece, me, worker) for piece in divide(share_out(parts, len(me.owners)))]


def traffic(parts: Sequence[Operand], workers: int, owners: Sequence[int]) -> list[Traffic]:
    """For every piece, the workers' messages to the owners and the owners' messages to the workers."""
    divided = divide(share_out(parts, len(owners)))
    return [[_to_owners(piece, workers, owners), _from_owners(piece, workers, owners)] for piece in divided]


def push_traffic(parts: Sequence[Operand], workers: int, owners: Sequence[int]) -> list[Traffic]:
    """For every piece, the messages of the first half."""
    return [[_to_owners(piece, workers, owners)] for piece in divide(share_out(parts, len(owners)))]


def pull_traffic(parts: Sequence[Operand], workers: int, owners: Sequence[int]) -> list[Traffic]:
    """For every piece, the messages of the second half."""
    return [[_from_owners(piece, workers, owners)] for piece in divide(share_out(parts, len(owners)))]


def _to_owners(piece: OwnedPiece, workers: int, owners: Sequence[int]) -> Flows:
    return joined([form.flows(*_others(owner, workers)) for owner, form in _asked(piece.formats, owners)])


def _from_owners(piece: OwnedPiece, workers: int, owners: Sequence[int]) -> Flows:
    return joined([form.flows(*_others(owner, workers)[::-1]) for owner, form in _asked(piece.answers, owners)])


def _asked(formats: Sequence[MessageFormat], owners: Sequence[int]) -> list[tuple[int, MessageFormat]]:
    """The owners with a share of a piece, and the formats of the messages about it."""
    return [(owner, form) for owner, form in zip(owners, formats, strict=True) if form.parts]


def _others(owner: int, workers: int) -> tuple[Column, Column]:
    """The workers other than ``owner``, and ``owner`` repeated as often."""
    others = np.delete(np.arange(workers), [owner] if owner < workers else [])
    return others, np.full_like(others, owner)


def joined(flows: Sequence[Flows]) -> Flows:
    """Messages that all travel concurrently."""
    return Flows(*(np.concatenate(columns) for columns in zip(*(one.columns for one in flows), strict=True)))


def computing(workers: int) -> Computing:
    """An owner decodes every payload of its part and encodes the sum; all ranks decode the whole result."""
    return Computing(1 + 1 / workers, 2, 0)


def divide(shares: Sequence[Sequence[Operand]]) -> list[OwnedPiece]:
    """The pieces of the owners' shares."""
    at_most = max(1, most_elements([part for share in shares for part in share]) // len(shares))
    return [OwnedPiece(found) for found in zip_longest(*(cut(share, at_most) for share in shares), fillvalue=[])]


def most_elements(parts: Sequence[Operand]) -> int:
    """The number of elements in a piece: limited by ``PIECE_ELEMENTS`` and by ``PIECE_BYTES`` of expected payload."""
    elements = sum(part.elements for part in parts)
    payload_bytes = sum(part.codec.wire_bytes(spec_of(part))[0] for part in parts)
    return min(PIECE_ELEMENTS, PIECE_BYTES * elements // max(payload_bytes, 1))


def cut(parts: Sequence[Operand], elements: int) -> list[list[Operand]]:
    """Consecutive pieces of up to ``elements`` elements, cut at blocks; a part that cannot be cut may exceed that."""
    found: list[list[Operand]] = []
    left = 0
    for part in parts:
        at = 0
        while at < part.elements:
            if left <= 0:
                found.append([])
                left = elements
            take = _to_block(part, at + left, up=True) - at
            found[-1].append(part.cut(at, at + take))
            at, left = at + take, left - take
    return found


def share_out(parts: Sequence[Operand], owners: int) -> list[list[Operand]]:
    """The parts of each owner: consecutive, cut at blocks, with about equal numbers of elements."""
    total = sum(part.elements for part in parts)
    edges = [total * owner // owners for owner in range(1, owners)]
    found: list[list[Operand]] = [[] for _ in range(owners)]
    passed = 0
    for part in parts:
        size = part.elements
        cuts = [_to_block(part, min(max(edge - passed, 0), size)) for edge in edges]
        for owner, (start, stop) in enumerate(zip([0, *cuts], [*cuts, size], strict=True)):
            if start < stop:
                found[owner].append(part.cut(start, stop))
        passed += size
    return found


def _to_block(part: Operand, at: int, up: bool = False) -> int:
    """The cut that is nearest to ``at``, or the next one with ``up``. Parts begin at possible cuts."""
    size, block = part.elements, part.codec.block or part.elements
    if at >= size:
        return size  # the end need not be a multiple of a block
    nearest = -(-at // block) * block if up else (at + block // 2) // block * block
    return min(nearest, size)


def reduce(piece: OwnedPiece, me: Participant) -> Reducer:
    """Reduce one piece: both halves."""
    yield from collect(piece, me)
    shares = piece.shares
    owned = shares[me.owner] if me.owner >= 0 else ()
    for part in owned:
        part.again.step = part.state.step
        if me.means:
            part.array /= np.float32(me.workers)
    sums = [part.array for part in owned]
    wanted = {owner: [part.array for part in share] for owner, share in enumerate(shares) if me.works}
    yield from answer(piece, me, sums, wanted, add=False)


def collect(piece: OwnedPiece, me: Participant) -> Reducer:
    """First half: every owner decodes the workers' payloads of its parts and adds them to its arrays in rank order.

    The arrays of other parts stay as they are.
    """
    shares, formats = piece.shares, piece.formats
    mine = me.owner
    owned = shares[mine] if mine >= 0 else ()
    outgoing = _written(formats, shares, me)
    yield from _told(outgoing, formats, me)
    own = {me.index: outgoing.pop(mine)} if mine in outgoing else {}
    came = {worker: formats[mine].room(me.room) for worker in me.others()} if owned else {}
    sends = [Message(me.owners[owner], packet.data, formats[owner].fixed) for owner, packet in outgoing.items()]
    lengths = yield Round(sends, [Message(worker, packet.data, formats[mine].fixed) for worker, packet in came.items()])
    _note(came, lengths)
    free(outgoing.values(), me)
    if owned:
        packets = {**came, **own}
        if not me.works:
            step = formats[mine].step_of(packets[0], name_of(0, me))
            for part in owned:  # a server takes the step from the message: in a resumed run it does not start at 0
                part.state.step = step
        sums, states = [part.array for part in owned], [part.state for part in owned]
        # In rank order, whatever the order of arrival: sums have the same bits in every run.
        for worker in range(me.workers):
            sender = name_of(worker, me)
            formats[mine].read(packets[worker], sums, states, sender, add=worker > 0, queue=me.decoding)
        free(packets.values(), me)


def push(piece: OwnedPiece, me: Participant) -> Reducer:
    """A worker's half of an exchange with the owners alone. Its own parts are replaced by their decoded payloads."""
    outgoing = _written(piece.formats, piece.shares, me)
    yield from _told(outgoing, piece.formats, me)
    own = outgoing.pop(me.owner, None)
    yield Round([Message(me.owners[owner], packet.data) for owner, packet in outgoing.items()], [])
    free(outgoing.values(), me)
    if own is not None:
        share = piece.shares[me.owner]
        arrays, states = [part.array for part in share], [part.state for part in share]
        piece.formats[me.owner].read(own, arrays, states, name_of(me.index, me), add=False, queue=me.decoding)
        free([own], me)


def take(piece: OwnedPiece, me: Participant, worker: int) -> Reducer:
    """An owner's half of ``push``: its arrays are replaced by the worker's decoded payload."""
    owned, form = piece.shares[me.owner], piece.formats[me.owner]
    if not owned:
        return
    came, sender = form.room(me.room), name_of(worker, me)
    (came.nbytes,) = yield Round([], [Message(worker, came.data)])
    arrays, states = [part.array for part in owned], [part.state for part in owned]
    step = form.step_of(came, sender)
    for state in states:
        state.step = step  # each worker counts its own steps
    form.read(came, arrays, states, sender, add=False)
    came.free()


def answer(
    piece: OwnedPiece,
    me: Participant,
    said: Sequence[Floats],
    wanted: Mapping[int, Sequence[Floats]],
    *,
    add: bool,
) -> Reducer:
    """Second half: every owner encodes its values and sends them to all workers.

    ``said`` are this owner's arrays. ``wanted`` maps owners to the arrays into which their answers are decoded, or to
    which they are added; a worker wants the answers of all owners. Arrays of ``said`` may be among those of ``wanted``.
    """
    relayed, formats = piece.relayed, piece.answers
    mine = me.owner
    packets: dict[int, Packet] = {}
    sends: list[Message] = []
    if said:
        states = [part.again for part in relayed[mine]]
        packets[mine] = formats[mine].write(me.room, said, states, me.decoding)
        yield from landed(me.decoding)
        sends = [Message(worker, packets[mine].data, formats[mine].fixed) for worker in me.others()]
    others = {owner: formats[owner].room(me.room) for owner in wanted if relayed[owner] and owner != mine}
    receives = [Message(me.owners[owner], packet.data, formats[owner].fixed) for owner, packet in others.items()]
    lengths = yield Round(sends, receives)
    _note(others, lengths)
    packets |= others
    for owner, packet in packets.items():
        if owner in wanted:
            states = [part.again for part in relayed[owner]]
            sender = name_of(me.owners[owner], me)
            formats[owner].read(packet, wanted[owner], states, sender, add=add, queue=me.decoding)
    free(packets.values(), me)


def _written(
    formats: Sequence[MessageFormat], shares: Sequence[Sequence[Operand]], me: Participant
) -> dict[int, Packet]:
    """This worker's payloads by owner, starting after its own index."""
    found: dict[int, Packet] = {}
    if me.works:
        count = len(me.owners)
        for k in range(1, count + 1):
            owner = (me.index + k) % count
            share = shares[owner]
            if share:
                arrays, states = [part.array for part in share], [part.state for part in share]
                found[owner] = formats[owner].write(me.room, arrays, states, me.encoding)
    return found


def _told(outgoing: Mapping[int, Packet], formats: Sequence[MessageFormat], me: Participant) -> Reducer:
    """Wait for the payloads of ``_written``, and report the gradients that are not finite."""
    if outgoing:
        yield from landed(me.encoding)
    for owner, packet in outgoing.items():
        formats[owner].report(packet, me.report)


def _note(came: dict[int, Packet], lengths: Sequence[int]) -> None:
    for packet, length in zip(came.values(), lengths, strict=True):
        packet.nbytes = length


WAY = Way(
    pieces,
    traffic,
    computing,
    "{owners} add up payloads, encode the sums and send them to all workers",
    carrier="direct",
    again=True,
)
