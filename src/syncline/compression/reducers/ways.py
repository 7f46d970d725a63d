"""Maps every codec to its way of combining payloads, and makes the reducers of a bucket's parts.

Only this module reads ``Codec.combine``; all other code asks the ``Way``. ``owners`` has the way through owners. The
others are here:

**Summed**: the architecture's plan adds payloads that can be added, like uncompressed gradients.

**Rounds**: the codec alternates between computing and sums over the ranks; all tensors of a bucket share each sum.

**Gathered**: every rank sends its payload to all others and adds the received payloads in rank order. Meant for sparse
payloads: N ranks of k pairs each have up to N k distinct elements, which no longer fit a payload of k pairs. Cost per
rank: N-1 payloads sent and received, N decoded. Beyond some number of ranks this costs more than an allreduce; in
return no element is dropped a second time.

**Merged**: two payloads become one of the same size along a binomial tree until one is left, which returns to all. For
codecs whose payloads can be merged (global top-k, Shi et al., ICDCS 2019). One payload travels ceil(lg N) times up and
down the tree, whatever the number of ranks. A merge adds the elements that it drops to the merging rank's residual, so
no gradient is lost.

The module also describes the messages of a bucket without any gradients (``parts_of``, ``traffic``), for
predictions. The sizes come from the code that cuts, encodes and sends, so predictions match runs. Payloads without
a fixed size count with their expected bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest

import numpy as np

from ...codecs import Applied, Codec, Combine, Floats, Rounds, State, Sums, codec_of
from ...codecs.dense import Uncompressed
from ...errors import UsageError
from ...nouns import Bucket, Layer, Spec, numpy_dtype
from . import Computing, Flows, Message, Operand, Participant, Reducer, Round, Sum, Summed, Traffic, Way, owners
from .formats import (
    MessageFormat,
    Packet,
    decode,
    decode_there,
    encode,
    encode_there,
    free,
    landed,
    name_of,
    spec_of,
    split,
)
from .owners import cut

# Sums by a plan -------------------------------------------------------------------------------------------------------


def _sum_pieces(parts: Sequence[Operand], me: Participant) -> list[Callable[[], Reducer]]:
    """One reducer per number type."""
    return [partial(_sum, found, me) for found in _alike(parts)]


def _sum_traffic(parts: Sequence[Operand], workers: int, at: Sequence[int]) -> list[Traffic]:  # noqa: ARG001
    """One sum per number type."""
    return [[Summed(4 * sum(_words(found)))] for found in _alike(parts)]


def _summing(workers: int) -> Computing:
    """A bandwidth-optimal plan adds all but one share on each rank."""
    return Computing(1, 1, (workers - 1) / workers)


def _alike(parts: Sequence[Operand]) -> list[list[Operand]]:
    """The parts, grouped by the number type of their payloads."""
    found: dict[str, list[Operand]] = {}
    for part in parts:
        found.setdefault(_number_of(part.codec), []).append(part)
    return list(found.values())


def _number_of(codec: Codec) -> str:
    """The number type of the payloads of a codec whose payloads can be added."""
    if not isinstance(codec, Sums):
        raise UsageError(f"{codec} declares combine='sum' but no number type: give it ``number``")
    return codec.number


def _sum(parts: Sequence[Operand], me: Participant) -> Reducer:
    """Encode all payloads into one buffer, sum it, decode it."""
    lengths, queue = _words(parts), me.encoding
    arrays, states = [part.array for part in parts], [part.state for part in parts]
    total_bytes, told_bytes = 4 * sum(lengths), 0 if queue is None else 4 * len(parts)
    buffer = me.room.take(total_bytes + told_bytes)
    words = buffer[:total_bytes].view(np.uint32)
    if queue is None:
        _, finite = encode(parts, lengths, arrays, states, words)
    else:
        told = buffer[total_bytes : total_bytes + told_bytes].view(np.uint32)
        encode_there(parts, lengths, arrays, states, words, told, queue)
        yield from landed(queue)
        finite = told.tolist()
    for part, is_finite in zip(parts, finite, strict=True):
        if not is_finite:
            me.report(part.name)
    yield Sum(words.view(numpy_dtype(_number_of(parts[0].codec))))
    if me.decoding is None:
        decode(parts, split(words, lengths), arrays, states, "the sum", add=False)
    else:
        decode_there(parts, lengths, words, arrays, states, "the sum", me.decoding, add=False)
    me.give([buffer])


def _words(parts: Sequence[Operand]) -> list[int]:
    """The lengths of the payloads in 32-bit words. They are fixed, so that the ranks' payloads align in a sum."""
    return [part.codec.wire_bytes(spec_of(part))[1] // 4 for part in parts]


# Rounds ---------------------------------------------------------------------------------------------------------------


def _round_pieces(parts: Sequence[Operand], me: Participant) -> list[Callable[[], Reducer]]:
    """One reducer for all parts."""
    return [partial(_run_rounds, parts, me)]


def _round_traffic(parts: Sequence[Operand], workers: int, at: Sequence[int]) -> list[Traffic]:  # noqa: ARG001
    """One sum per round of the codec with the most rounds."""
    elements = [_in_rounds(part.codec).rounds(part.state.spec) for part in parts]
    return [[Summed(4 * sum(together)) for together in zip_longest(*elements, fillvalue=0)]]


def _run_rounds(parts: Sequence[Operand], me: Participant) -> Reducer:
    """Run all tensors' rounds together, with one sum per round."""
    going = [(part.name, _begun(part, me)) for part in parts]
    while True:
        asked: list[Floats] = []
        for name, one in list(going):
            try:
                asked.append(next(one))
            except StopIteration as end:
                going.remove((name, one))
                if not end.value:
                    me.report(name)
        if not asked:
            return
        buffer = me.room.take(4 * sum(array.size for array in asked))
        together = buffer[: 4 * sum(array.size for array in asked)].view(np.float32)
        np.concatenate([array.reshape(-1) for array in asked], out=together)
        yield Sum(together)
        at = 0
        for array in asked:
            array.reshape(-1)[:] = together[at : at + array.size]
            at += array.size
        me.room.give(buffer)


def _begun(part: Operand, me: Participant) -> Generator[Floats, None, bool]:
    return _in_rounds(part.codec).average(part.array, part.state, me.workers)


def _in_rounds(codec: Codec) -> Rounds:
    if not isinstance(codec, Rounds):
        raise UsageError(f"{codec} declares combine='rounds': give it average() and rounds()")
    return codec


# Payloads of all to all, and merged on a tree -------------------------------------------------------------------------


def _piecewise(
    reduce: Callable[[Sequence[Operand], MessageFormat, Participant], Reducer],
    parts: Sequence[Operand],
    me: Participant,
) -> list[Callable[[], Reducer]]:
    """One reducer per piece of about ``PIECE_ELEMENTS`` elements; tensors stay whole."""
    return [partial(reduce, piece, MessageFormat(piece), me) for piece in cut(parts, owners.PIECE_ELEMENTS)]


def _gather_traffic(parts: Sequence[Operand], workers: int, at: Sequence[int]) -> list[Traffic]:  # noqa: ARG001
    """For every piece, one message from each worker to each other worker."""
    src, dst = np.nonzero(~np.eye(workers, dtype=bool))
    return [[MessageFormat(piece).flows(src, dst)] for piece in cut(parts, owners.PIECE_ELEMENTS)]


def _gather(piece: Sequence[Operand], form: MessageFormat, me: Participant) -> Reducer:
    """Exchange and add one piece."""
    arrays, states = [part.array for part in piece], [part.state for part in piece]
    packets: dict[int, Packet] = {me.index: form.write(me.room, arrays, states, me.encoding)}
    yield from landed(me.encoding)
    form.report(packets[me.index], me.report)
    others = me.others()
    packets |= {other: form.room(me.room) for other in others}
    sends = [Message(other, packets[me.index].data, form.fixed) for other in others]
    lengths = yield Round(sends, [Message(other, packets[other].data, form.fixed) for other in others])
    for other, length in zip(others, lengths, strict=True):
        packets[other].nbytes = length
    for worker in range(me.workers):
        form.read(packets[worker], arrays, states, name_of(worker, me), add=worker > 0, queue=me.decoding)
    free(packets.values(), me)


def _merge_traffic(parts: Sequence[Operand], workers: int, at: Sequence[int]) -> list[Traffic]:  # noqa: ARG001
    """For every piece, messages up the tree level by level, then down again."""
    return [_levels(MessageFormat(piece), workers) for piece in cut(parts, owners.PIECE_ELEMENTS)]


def _levels(form: MessageFormat, workers: int) -> Traffic:
    steps: list[Flows] = []
    for distance in reversed(_halves(1 << (workers - 1).bit_length())):
        children = np.arange(distance, workers, 2 * distance)
        steps.append(form.flows(children, children - distance))
    return [*steps, *(form.flows(up.dst, up.src) for up in reversed(steps))]


def _merge(piece: Sequence[Operand], form: MessageFormat, me: Participant) -> Reducer:
    """Merge one piece up the tree to rank 0, return it, and decode it."""
    arrays, states = [part.array for part in piece], [part.state for part in piece]
    packet = form.write(me.room, arrays, states)
    form.report(packet, me.report)
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


# All ways -------------------------------------------------------------------------------------------------------------

WAYS: Mapping[Combine, Way] = {
    "sum": Way(_sum_pieces, _sum_traffic, _summing, "payloads are summed by {architecture}"),
    "rounds": Way(_round_pieces, _round_traffic, _summing, "factors are summed by {architecture}", servable=False),
    "owner": owners.WAY,
    "gather": Way(
        partial(_piecewise, _gather),
        _gather_traffic,
        lambda workers: Computing(1, workers, 0),
        "every worker gathers all payloads",
        carrier="direct",
    ),
    # the root merges on every level; a merge takes as long as a decoding
    "merge": Way(
        partial(_piecewise, _merge),
        _merge_traffic,
        lambda workers: Computing(1, (workers - 1).bit_length() + 1, 0),
        "payloads are merged on a tree",
        carrier="tree",
    ),
}
"""Ordered: the ways that a plan sums come first, so that they start before the other ways' messages."""

OWNERS = owners.WAY
"""The way of all payloads that go through servers."""


def way_of(codec: Codec) -> Way:
    """The way of combining a codec's payloads; raises UsageError if the codec declares none."""
    found = WAYS.get(codec.combine)
    if found is None:
        raise UsageError(f"{codec} declares combine={codec.combine!r}: choose one of {', '.join(WAYS)}")
    return found


def pieces(parts: Sequence[Operand], me: Participant, *, served: bool = False) -> list[Callable[[], Reducer]]:
    """The reducers of a bucket. They may run concurrently, and all processes list them in the same order.

    With ``served`` the payloads of every codec go through the servers.
    """
    chain: list[Callable[[], Reducer]] = []
    found: list[Callable[[], Reducer]] = []
    for way, its in _by_way(parts, served):
        (chain if way.carrier is None else found).extend(way.pieces(its, me))
    return [partial(_one_by_one, chain), *found] if chain else found


def traffic(parts: Sequence[Operand], workers: int, owners_at: Sequence[int], *, served: bool = False) -> list[Traffic]:
    """The communication of each of ``pieces``, in the same order. Only the parts' sizes are read."""
    chain: Traffic = []
    found: list[Traffic] = []
    for way, its in _by_way(parts, served):
        made = way.traffic(its, workers, owners_at)
        if way.carrier is None:
            chain += [step for one in made for step in one]
        else:
            found += made
    return [chain, *found] if chain else found


def _by_way(parts: Sequence[Operand], served: bool) -> Iterator[tuple[Way, list[Operand]]]:
    by: dict[Way, list[Operand]] = {way: [] for way in WAYS.values()}
    for part in parts:
        if part.elements:
            by[OWNERS if served else way_of(part.codec)].append(part)
    return ((way, its) for way, its in by.items() if its)


def _one_by_one(chain: Sequence[Callable[[], Reducer]]) -> Reducer:
    """Run the sums of one bucket one after the other: their messages carry the same key, the bucket's."""
    for reducer in chain:
        yield from reducer()


def codec_at(applied: Applied, step: int | None) -> Codec:
    """The codec of a tensor's gradients at ``step``. Without a step, its warm-up has ended."""
    warming = step is not None and step < applied.warmup
    return Uncompressed(applied.codec.block) if warming else applied.codec


# Predictions ----------------------------------------------------------------------------------------------------------


def parts_of(codec: Codec, layers: Sequence[Layer], bucket: Bucket, step: int | None = None) -> list[Operand]:
    """A bucket's parts without data, as ``ways.traffic`` and the halves of ``owners`` need them.

    ``layers`` are the model's. ``step`` counts from 0, for codecs that warm up; without it all warm-ups have ended.
    """
    found = []
    for part in bucket.slices:
        spec = replace(layers[part.tensor].spec, dtype="float32")
        applied = codec_of(codec, spec)
        found.append(without_data(spec.name, codec_at(applied, step), spec, part.start, part.stop))
    return found


def without_data(name: str, codec: Codec, spec: Spec, start: int, stop: int) -> Operand:
    """Elements ``start`` to ``stop`` of a tensor, with a broadcast zero for its gradients."""
    state = State(spec, 0)
    return Operand(name, codec, np.broadcast_to(np.float32(0), stop - start), state, state, start)
