"""Two levels: hosts sum their gradients uncompressed, and only payloads cross between hosts.

    inside    reduce-scatter: each rank adds its host's gradients for its share of the bucket, in float32
    between   the ranks of all hosts with the same share, a *rail*, reduce the hosts' sums with the codec
    inside    all-gather: every rank gets all shares of the result

A payload crosses the link between hosts once per host instead of once per rank, and a rank encodes 1/p of the gradients
on a host of p ranks. The price is a reduce-scatter and an all-gather at memory speed. Cho et al., "BlueConnect", MLSys
2019, have these levels without a codec.

A host counts as one worker. Sums are always added in rank order, and between hosts the reducers run as between as many
workers. The result therefore has the bits that one worker per host would get from the host's sum; it depends neither on
the assignment of shares nor on the number of ranks per host.

There are as many rails as the smallest host has ranks; the other ranks of larger hosts only send and receive. This
costs no time, because each rank of the smallest host has the most to encode anyway. Parts are cut only where their
codecs allow it. If a codec must see whole tensors, a rail's share consists of whole tensors, and a bucket with a single
tensor keeps only one rank per host busy. A hash of the name of a bucket's first tensor therefore selects the rank of
the first share, which spreads such buckets over the ranks.

Payloads that can be added are added by owners of their words, in host order. A bucket is cut into pieces: one piece
travels between hosts while others are added or encoded.

Cost per rank with m hosts of p ranks, n bytes of gradients and b bytes of payload, reduced by owners: 2(p-1)/p n
inside, 2(m-1)/m b/p between; 2(m-1)/m b on a host's link.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import Bytes, Flows, Message, Operand, Participant, Reducer, Round, Sum, Summed, Total, Traffic, ways
from .formats import Column
from .owners import cut, most_elements, share_out

_UNIT = 16
"""Sums of payloads are cut at multiples of 16 bytes, which keeps numbers of all types whole."""

Hosts = Sequence[Sequence[int]]
Rail = tuple[int, ...]
"""The ranks with the same share, one of each host."""


@dataclass(frozen=True)
class RailedPiece:
    """Parts that are reduced together, by rail, and their ranges of elements in the bucket."""

    rails: Sequence[Rail]
    shares: Sequence[Sequence[Operand]]
    ranges: Sequence[tuple[int, int]]


def pieces(parts: Sequence[Operand], array: NDArray[Any], me: Participant) -> list[Callable[[], Reducer]]:
    """One reducer per piece of a bucket whose ``parts`` lie one after the other in ``array``."""
    found: list[Callable[[], Reducer]] = []
    for piece in divide(parts, me.hosts):
        views = [array[start:stop].view(np.uint8) for start, stop in piece.ranges]
        between: list[Callable[[], Reducer]] = []
        for rail, share in _of(piece, me):
            whole = tuple(range(len(rail)))
            host = replace(me, index=me.encoder, workers=len(rail), owners=whole, hosts=(), called=rail)
            between += [partial(_over, start, rail, host.index) for start in ways.pieces(share, host)]
        found.append(partial(reduce, piece, views, between, me))
    return found


def divide(parts: Sequence[Operand], hosts: Hosts) -> list[RailedPiece]:
    """The pieces of a bucket; the same on all ranks."""
    parts = [part for part in parts if part.array.size]
    if not parts:
        return []
    rails, shares = _rails(parts, hosts)
    begin = list(accumulate((_elements(share) for share in shares), initial=0))
    found = []
    largest = max(_elements(share) for share in shares)
    # Pieces stay slightly below ``most_elements``, so that the reducers between hosts do not cut them again.
    count = largest // max(1, most_elements(parts)) + 1
    for piece in zip_longest(*(cut(share, -(-largest // count)) for share in shares), fillvalue=[]):
        ranges = []
        for rail, share in enumerate(piece):
            ranges.append((begin[rail], begin[rail] + _elements(share)))
            begin[rail] = ranges[-1][1]
        found.append(RailedPiece(rails, piece, ranges))
    return found


def encoded(parts: Sequence[Operand], me: Participant) -> list[Operand]:
    """The parts of a bucket that this process encodes for its host."""
    parts = [part for part in parts if part.array.size]
    if not parts:
        return []
    rails, shares = _rails(parts, me.hosts)
    return [part for rail, share in zip(rails, shares, strict=True) if me.index in rail for part in share]


def owned(parts: Sequence[Operand], me: Participant) -> Iterator[Operand]:
    """The parts of a bucket that this process encodes a second time, after all hosts' payloads have been added."""
    for piece in divide(parts, me.hosts):
        for _, share in _of(piece, me):
            wanted = [part for part in share if ways.way_of(part.codec).again]
            yield from share_out(wanted, len(me.hosts))[me.encoder]


def traffic(parts: Sequence[Operand], hosts: Hosts) -> list[Traffic]:
    """The communication of each of ``pieces``: inside hosts, between them, and inside again."""
    found: list[Traffic] = []
    for piece in divide(parts, hosts):
        up = _inside(piece, hosts)
        between = [
            _among(step, rail)
            for rail, share in zip(piece.rails, piece.shares, strict=True)
            for one in ways.traffic(share, len(hosts), range(len(hosts)))
            for step in one
        ]
        down = Flows(up.dst, up.src, up.nbytes, up.most_bytes)
        found.append([up, *(flows for steps in between for flows in steps), down])
    return found


def reduce(
    piece: RailedPiece, views: Sequence[Bytes], between: Sequence[Callable[[], Reducer]], me: Participant
) -> Reducer:
    """Reduce one piece: ``views`` are its shares by rail, ``between`` this rank's reducers with other hosts."""
    here = me.encoder
    ranks = me.hosts[here]
    # not all ranks address the same one first
    near = [*ranks[ranks.index(me.index) + 1 :], *ranks[: ranks.index(me.index)]]
    others = {rail[here]: view for rail, view in zip(piece.rails, views, strict=True) if view.size}
    mine = others.pop(me.index, None)
    total = None
    if mine is not None:
        before, after = ([rank for rank in ranks if rank < me.index], [rank for rank in ranks if rank > me.index])
        total = Total(mine.view(np.float32), before, after)
    there = [Message(rank, others[rank]) for rank in near if rank in others]
    yield Round(there, [], total)
    for start in between:
        yield from start()
    yield Round([] if mine is None else [Message(rank, mine) for rank in near], there)


def _over(start: Callable[[], Reducer], rail: Rail, here: int) -> Reducer:
    """Translate a reducer among hosts into messages between the ranks of a rail; ``here`` is this process's host."""
    reducer = start()
    asked = next(reducer, None)
    while asked is not None:
        lengths: list[int] = []
        if isinstance(asked, Sum):
            yield from _sum(asked.array, rail, here)
        else:
            sends, receives = (
                [Message(rail[one.peer], one.data) for one in messages] for messages in (asked.sends, asked.receives)
            )
            lengths = yield Round(sends, receives)
        try:
            asked = reducer.send(lengths)
        except StopIteration:
            return


def _sum(array: NDArray[Any], rail: Rail, here: int) -> Reducer:
    """Sum all hosts' arrays by owners: each host owns a part."""
    whole = array.view(np.uint8)
    parts = [whole[start:stop] for start, stop in pairwise(_edges(array.nbytes, len(rail)))]
    others = [(rail[host], parts[host]) for host in (*range(here + 1, len(rail)), *range(here))]
    there = [Message(rank, part) for rank, part in others if part.size]
    mine = parts[here]
    total = Total(mine.view(array.dtype), rail[:here], rail[here + 1 :]) if mine.size else None
    yield Round(there, [], total)
    yield Round([Message(rank, mine) for rank, _ in others if mine.size], there)


def _edges(nbytes: int, hosts: int) -> list[int]:
    """The bounds of the parts of a sum, in bytes."""
    return [*(nbytes // _UNIT * host // hosts * _UNIT for host in range(hosts)), nbytes]


def _rails(parts: Sequence[Operand], hosts: Hosts) -> tuple[list[Rail], list[list[Operand]]]:
    """The rails and the share of each."""
    turn = zlib.crc32(parts[0].name.encode(errors="surrogatepass"))
    count = min(len(ranks) for ranks in hosts)
    rails = [tuple(ranks[(rail + turn) % len(ranks)] for ranks in hosts) for rail in range(count)]
    return rails, share_out(parts, count)


def _of(piece: RailedPiece, me: Participant) -> list[tuple[Rail, Sequence[Operand]]]:
    """This process's rail and its share of a piece, if it has one."""
    both = zip(piece.rails, piece.shares, strict=True)
    return [(rail, share) for rail, share in both if me.index in rail and share]


def _elements(share: Sequence[Operand]) -> int:
    return sum(part.array.size for part in share)


def _inside(piece: RailedPiece, hosts: Hosts) -> Flows:
    """Messages from every rank to the ranks of its host that have a share."""
    rows = [
        (rank, rail[host], 4 * (stop - start))
        for host, ranks in enumerate(hosts)
        for rail, (start, stop) in zip(piece.rails, piece.ranges, strict=True)
        for rank in ranks
        if rank != rail[host] and start < stop
    ]
    return _flows(rows)


def _among(step: Flows | Summed, rail: Rail) -> list[Flows]:
    """Messages between hosts as messages between the ranks of a rail."""
    numbers = np.array(rail)
    if isinstance(step, Flows):
        return [replace(step, src=numbers[step.src], dst=numbers[step.dst])]
    sizes = [stop - start for start, stop in pairwise(_edges(step.nbytes, len(rail)))]
    up = _flows(
        [(src, dst, size) for dst, size in zip(rail, sizes, strict=True) for src in rail if src != dst and size]
    )
    return [up, Flows(up.dst, up.src, up.nbytes, up.most_bytes)]


def _flows(rows: Sequence[tuple[int, int, int]]) -> Flows:
    columns: Column = np.array(rows, np.int64).reshape(-1, 3)
    src, dst, nbytes = columns.T
    return Flows(src, dst, nbytes, nbytes)
