"""Two levels: gradients are summed inside hosts as they are, and become payloads between hosts only.

    inside    reduce-scatter: a rank adds up its host's gradients of the part that it stands for, in float32
    between   the ranks of all hosts that stand for the same part, a *rail*, reduce the hosts' sums by the codec's way
    inside    all-gather: every rank gets all parts of the result

So a payload crosses the link between hosts once per host instead of once per rank, and a rank encodes 1/p of the
gradients, p being the ranks of a host. The price is a reduce-scatter and an all-gather at the speed of memory. Cho et
al., "BlueConnect", MLSys 2019, have the levels without a codec.

A host counts as one worker. Sums are made in the order of ranks whoever makes them, and the rest is what it is among
so many workers as there are hosts, so that the result has the bits that these would have, were the hosts' sums their
gradients: nothing depends on who stands for what, or on how many ranks a host has beside.

Rails are as many as the smallest host has ranks; further ranks of larger hosts give and take only. That costs no time:
the smallest host has most to encode for each of its ranks. Parts are cut where their codecs may be cut: where tensors
are seen whole a rail stands for whole tensors, and of a bucket that is one tensor one rank of each host does all the
work. Who stands for the first part is therefore drawn by the name of the bucket's first tensor.

Payloads that can be added are added here by owners of the words, in the order of hosts. A bucket goes in pieces: while
one travels between hosts others are added up or encoded.

Cost per rank with m hosts of p ranks, n bytes of gradients, and payloads of b bytes that go by owners: 2(p-1)/p n
inside, 2(m-1)/m b/p between; 2(m-1)/m b for a host's link.
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
from .letters import Column
from .owners import cut, most_elements, share_out

_UNIT = 16
"""Sums of payloads are cut at multiples of so many bytes: numbers of all types stay whole."""

Hosts = Sequence[Sequence[int]]
Rail = tuple[int, ...]
"""The ranks that stand for the same part, one of each host."""


@dataclass(frozen=True)
class RailedPiece:
    """Parts that are reduced together, by rail, and which elements of the bucket they are."""

    rails: Sequence[Rail]
    shares: Sequence[Sequence[Operand]]
    ranges: Sequence[tuple[int, int]]


def pieces(parts: Sequence[Operand], array: NDArray[Any], me: Participant) -> list[Callable[[], Reducer]]:
    """One reducer for every piece of a bucket, whose ``parts`` lie one behind the other in ``array``."""
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
    """The pieces of a bucket, for all ranks."""
    parts = [part for part in parts if part.array.size]
    if not parts:
        return []
    rails, shares = _rails(parts, hosts)
    begin = list(accumulate((_elements(share) for share in shares), initial=0))
    found = []
    largest = max(_elements(share) for share in shares)
    count = (
        largest // max(1, most_elements(parts)) + 1
    )  # a little less than a piece between hosts has, which is one then
    for piece in zip_longest(*(cut(share, -(-largest // count)) for share in shares), fillvalue=[]):
        ranges = []
        for rail, share in enumerate(piece):
            ranges.append((begin[rail], begin[rail] + _elements(share)))
            begin[rail] = ranges[-1][1]
        found.append(RailedPiece(rails, piece, ranges))
    return found


def encoded(parts: Sequence[Operand], me: Participant) -> list[Operand]:
    """What this process encodes of a bucket for its host."""
    parts = [part for part in parts if part.array.size]
    if not parts:
        return []
    rails, shares = _rails(parts, me.hosts)
    return [part for rail, share in zip(rails, shares, strict=True) if me.index in rail for part in share]


def owned(parts: Sequence[Operand], me: Participant) -> Iterator[Operand]:
    """What this process encodes of a bucket a second time, when all hosts' payloads have been added."""
    for piece in divide(parts, me.hosts):
        for _, share in _of(piece, me):
            wanted = [part for part in share if ways.way_of(part.codec).again]
            yield from share_out(wanted, len(me.hosts))[me.encoder]


def traffic(parts: Sequence[Operand], hosts: Hosts) -> list[Traffic]:
    """What travels for each of ``pieces``: inside hosts, between them, inside again."""
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
    """One piece. ``views`` are its parts' memory by rail, ``between`` what this rank does with other hosts."""
    here = me.encoder
    ranks = me.hosts[here]
    near = [*ranks[ranks.index(me.index) + 1 :], *ranks[: ranks.index(me.index)]]  # not all turn to the same one first
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
    """A reducer among hosts, whose messages go between the ranks of a rail; ``here`` is this one's host."""
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
    """The sum of all hosts' arrays: each host owns a part."""
    whole = array.view(np.uint8)
    parts = [whole[start:stop] for start, stop in pairwise(_edges(array.nbytes, len(rail)))]
    others = [(rail[host], parts[host]) for host in (*range(here + 1, len(rail)), *range(here))]
    there = [Message(rank, part) for rank, part in others if part.size]
    mine = parts[here]
    total = Total(mine.view(array.dtype), rail[:here], rail[here + 1 :]) if mine.size else None
    yield Round(there, [], total)
    yield Round([Message(rank, mine) for rank, _ in others if mine.size], there)


def _edges(nbytes: int, hosts: int) -> list[int]:
    """Where the parts of a sum begin and end."""
    return [*(nbytes // _UNIT * host // hosts * _UNIT for host in range(hosts)), nbytes]


def _rails(parts: Sequence[Operand], hosts: Hosts) -> tuple[list[Rail], list[list[Operand]]]:
    """The rails and what each stands for."""
    turn = zlib.crc32(parts[0].name.encode(errors="surrogatepass"))
    count = min(len(ranks) for ranks in hosts)
    rails = [tuple(ranks[(rail + turn) % len(ranks)] for ranks in hosts) for rail in range(count)]
    return rails, share_out(parts, count)


def _of(piece: RailedPiece, me: Participant) -> list[tuple[Rail, Sequence[Operand]]]:
    """The rail that this process is of, if any, and what it stands for in a piece."""
    both = zip(piece.rails, piece.shares, strict=True)
    return [(rail, share) for rail, share in both if me.index in rail and share]


def _elements(share: Sequence[Operand]) -> int:
    return sum(part.array.size for part in share)


def _inside(piece: RailedPiece, hosts: Hosts) -> Flows:
    """From every rank to those of its host that stand for something."""
    rows = [
        (rank, rail[host], 4 * (stop - start))
        for host, ranks in enumerate(hosts)
        for rail, (start, stop) in zip(piece.rails, piece.ranges, strict=True)
        for rank in ranks
        if rank != rail[host] and start < stop
    ]
    return _flows(rows)


def _among(step: Flows | Summed, rail: Rail) -> list[Flows]:
    """What travels between hosts, between the ranks of a rail."""
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
