"""Two levels: hosts sum their gradients uncompressed, and only payloads cross between hosts.

    inside    reduce-scatter: each rank adds its host's gradients for its share of the bucket, in float32
    between   the ranks of all hosts with the same share, a *rail*, reduce the hosts' sums with the codec
    inside    all-gather: every rank gets all shares of the result

A payload crosses the link between hosts once per host instead of once per rank, and a rank encodes 1/p of the gradients
on a host of p ranks. The price is a reduce-scatter and an all-gather at memory speed. Cho et al., "BlueConnect", MLSys
2019, have these levels without a codec. With ``Participant.native`` the collectives inside are those of the message
library, which adds in its own order.

Sums are always added in rank order, and between hosts the reducers run as if each host were one worker. The result
therefore has the bits that one worker per host would get from the host's sum; it depends neither on the assignment of
shares nor on the number of ranks per host.

There are as many rails as the smallest host has ranks; the other ranks of larger hosts only send and receive. This
costs no time, because each rank of the smallest host has the most to encode anyway. Parts are cut only where their
codecs allow it. If a codec must see whole tensors, a rail's share consists of whole tensors, and a bucket with a single
tensor keeps only one rank per host busy. A hash of the name of a bucket's first tensor therefore selects the rank of
the first share, which spreads such buckets over the ranks.

Payloads that can be added are added by owners of their words, in host order. A bucket is cut into pieces: one piece
travels between hosts while others are added or encoded.

Without servers the hosts of a rail share out the ownership of its sums. With servers every server has rails of its own,
which together carry the server's part of the bucket; it joins each of them as one more process. A worker that serves
carries all rails of its part for its own host, so that the other ranks of the host send their gradients to it directly.
If servers hold the weights, one exchange ends with the sums at the servers, and another begins with their updates.

Cost per rank with m hosts of p ranks, n bytes of gradients and b bytes of payload, reduced by owners: 2(p-1)/p n
inside, 2(m-1)/m b/p between; 2(m-1)/m b on a host's link. With S servers apart: 2 b/p between, 2b on a host's link,
and 2m b/S on a server's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise, zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import (
    Flows,
    HostCollective,
    Lengths,
    Message,
    Operand,
    Participant,
    Reducer,
    Round,
    Sum,
    Summed,
    Total,
    Traffic,
    ways,
)
from .formats import Column
from .owners import cut, joined, most_elements, share_out

_UNIT = 16
"""Sums of payloads are cut at multiples of 16 bytes, which keeps numbers of all types whole."""

Hosts = Sequence[Sequence[int]]
Pieces = Callable[[Sequence[Operand], Participant], list[Callable[[], Reducer]]]
"""Makes the reducers of some parts among hosts."""
Foreseen = Callable[[Sequence[Operand], int, Sequence[int]], list[Traffic]]
"""The communication of these reducers, by the number of hosts and the owners."""


class Rail(NamedTuple):
    """The processes that reduce one share: a rank of each host, and then the share's server unless it is one of them.

    ``owners`` are the positions of the processes that own parts of the share.
    """

    processes: tuple[int, ...]
    owners: tuple[int, ...]


@dataclass(frozen=True)
class RailedPiece:
    """Parts that are reduced together, by rail, and their ranges of elements in the bucket."""

    rails: Sequence[Rail]
    shares: Sequence[Sequence[Operand]]
    ranges: Sequence[tuple[int, int]]

    def sums(self, host: int) -> list[tuple[int, int, int]]:
        """The ranks of a host that add its gradients, with their ranges of elements; adjacent ranges of a rank are
        merged."""
        found: list[tuple[int, int, int]] = []
        for rail, (start, stop) in zip(self.rails, self.ranges, strict=True):
            rank = rail.processes[host]
            if found and found[-1][0] == rank and found[-1][2] == start:
                start = found.pop()[1]
            if start < stop:
                found.append((rank, start, stop))
        return found


def pieces(
    parts: Sequence[Operand],
    array: NDArray[Any],
    me: Participant,
    between: Pieces,
    *,
    servers: Sequence[int] = (),
    up: bool = True,
    down: bool = True,
) -> list[Callable[[], Reducer]]:
    """One reducer per piece of a bucket whose ``parts`` lie one after the other in ``array``.

    Hosts first sum if ``up``, and pass results on inside if ``down``. ``servers`` own the sums if there are any.
    """
    found: list[Callable[[], Reducer]] = []
    for piece in divide(parts, me.hosts, servers):
        over = [partial(_over, between(share, part), rail, part.index) for rail, share, part in _of(piece, me)]
        found.append(partial(_reduce, _inside(piece, array, me, up=up, down=down), over))
    return found


def divide(parts: Sequence[Operand], hosts: Hosts, servers: Sequence[int] = ()) -> list[RailedPiece]:
    """The pieces of a bucket; the same on all ranks."""
    parts = [part for part in parts if part.elements]
    if not parts:
        return []
    rails, shares = _rails(parts, hosts, servers)
    begin = list(accumulate((_elements(share) for share in shares), initial=0))
    found = []
    largest = max(_elements(share) for share in shares)
    # Pieces stay slightly below ``most_elements``, so that the reducers between hosts do not cut them again. A rank has
    # a share for every server.
    count = largest // max(1, most_elements(parts) // max(1, len(servers))) + 1
    for piece in zip_longest(*(cut(share, -(-largest // count)) for share in shares), fillvalue=[]):
        ranges = []
        for rail, share in enumerate(piece):
            ranges.append((begin[rail], begin[rail] + _elements(share)))
            begin[rail] = ranges[-1][1]
        found.append(RailedPiece(rails, piece, ranges))
    return found


def encoded(parts: Sequence[Operand], me: Participant, servers: Sequence[int] = ()) -> list[Operand]:
    """The parts of a bucket that this process encodes for its host."""
    parts = [part for part in parts if part.elements]
    if not parts or not me.works:
        return []
    rails, shares = _rails(parts, me.hosts, servers)
    here = me.encoder
    return [
        part for rail, share in zip(rails, shares, strict=True) if rail.processes[here] == me.index for part in share
    ]


def owned(parts: Sequence[Operand], me: Participant) -> Iterator[Operand]:
    """The parts of a bucket that this process encodes a second time, after all hosts' payloads have been added.

    There are no servers.
    """
    for piece in divide(parts, me.hosts):
        for _, share, host in _of(piece, me):
            wanted = [part for part in share if ways.way_of(part.codec).again]
            yield from share_out(wanted, host.workers)[host.index]


def traffic(
    parts: Sequence[Operand],
    hosts: Hosts,
    between: Foreseen = ways.traffic,
    *,
    servers: Sequence[int] = (),
    up: bool = True,
    down: bool = True,
    element_bytes: int = 4,
) -> list[Traffic]:
    """The communication of each of ``pieces``: inside hosts, between them, and inside again.

    ``element_bytes`` is the size of an element inside hosts.
    """
    found: list[Traffic] = []
    for piece in divide(parts, hosts, servers):
        inside = _sums_of(piece, hosts, element_bytes)
        rails = [
            [flows for one in between(share, len(hosts), rail.owners) for step in one for flows in _among(step, rail)]
            for rail, share in zip(piece.rails, piece.shares, strict=True)
            if share
        ]
        steps: Traffic = [joined([step for step in some if step is not None]) for some in zip_longest(*rails)]
        back = Flows(inside.dst, inside.src, inside.nbytes, inside.most_bytes)
        found.append([*([inside] if up else []), *steps, *([back] if down else [])])
    return found


class _Inside(NamedTuple):
    """The exchange of a piece inside this process's host: before the exchange between hosts, and after it."""

    up: Round | HostCollective | None
    down: Round | HostCollective | None


def _inside(piece: RailedPiece, array: NDArray[Any], me: Participant, *, up: bool, down: bool) -> _Inside:
    if not me.works:
        return _Inside(None, None)
    ranks = me.hosts[me.encoder]
    if me.native and len(ranks) > 1:
        owned = {rank: array[start:stop].view(np.float32) for rank, start, stop in piece.sums(me.encoder)}
        parts = [owned.get(rank, np.empty(0, np.float32)) for rank in ranks]
        gathers = HostCollective("all_gather", parts) if down else None
        return _Inside(HostCollective("reduce_scatter", parts) if up else None, gathers)
    # not all ranks address the same one first
    near = [*ranks[ranks.index(me.index) + 1 :], *ranks[: ranks.index(me.index)]]
    views = [(rank, array[start:stop].view(np.uint8)) for rank, start, stop in piece.sums(me.encoder)]
    mine = [view for rank, view in views if rank == me.index]
    there = [Message(rank, view) for rank in near for other, view in views if other == rank]
    before, after = ([rank for rank in ranks if rank < me.index], [rank for rank in ranks if rank > me.index])
    totals = [Total(view.view(np.float32), before, after) for view in mine] if up else []
    back = [Message(rank, view) for rank in near for view in mine]
    return _Inside(Round(there, [], totals) if up else None, Round(back, there) if down else None)


def _reduce(inside: _Inside, over: Sequence[Callable[[], Reducer]]) -> Reducer:
    """Reduce one piece; ``over`` are the reducers of this process's rails, whose rounds are made together."""
    if inside.up is not None:
        yield inside.up
    yield from over[0]() if len(over) == 1 else _side_by_side(over)
    if inside.down is not None:
        yield inside.down


def _side_by_side(starts: Sequence[Callable[[], Reducer]]) -> Reducer:
    """Run reducers of several rails together: their rounds become one."""
    going = _asked((start(), None) for start in starts)
    while going:
        rounds = [one for _, one in going]
        sends = [message for one in rounds for message in one.sends]
        lengths = iter((yield Round(sends, [message for one in rounds for message in one.receives])))
        going = _asked((reducer, [next(lengths) for _ in one.receives]) for reducer, one in going)


def _asked(going: Iterable[tuple[Reducer, Lengths | None]]) -> list[tuple[Reducer, Round]]:
    """The next rounds of the reducers that have not ended; those without the lengths of a round begin."""
    found = []
    for reducer, lengths in going:
        try:
            asked = next(reducer) if lengths is None else reducer.send(lengths)
        except StopIteration:
            continue
        assert isinstance(asked, Round)
        assert not asked.totals  # only payloads travel on several rails
        assert asked.after is None  # no device encodes on two levels
        found.append((reducer, asked))
    return found


def _over(starts: Sequence[Callable[[], Reducer]], rail: Rail, here: int) -> Reducer:
    """Run reducers among hosts one after the other, by messages between the processes of a rail.

    ``here`` is this process's position in it.
    """
    for start in starts:
        reducer = start()
        asked = next(reducer, None)
        while asked is not None:
            lengths: list[int] = []
            if isinstance(asked, Sum):
                yield from _sum(asked.array, rail.processes, here)
            elif isinstance(asked, Round):
                sends, receives = (
                    [Message(rail.processes[one.peer], one.data) for one in messages]
                    for messages in (asked.sends, asked.receives)
                )
                assert not asked.totals  # sums between hosts are a ``Sum``
                assert asked.after is None  # no device encodes on two levels
                lengths = yield Round(sends, receives)
            try:
                asked = reducer.send(lengths)
            except StopIteration:
                break


def _sum(array: NDArray[Any], rail: Sequence[int], here: int) -> Reducer:
    """Sum all hosts' arrays by owners: each host owns a part."""
    whole = array.view(np.uint8)
    parts = [whole[start:stop] for start, stop in pairwise(_edges(array.nbytes, len(rail)))]
    others = [(rail[host], parts[host]) for host in (*range(here + 1, len(rail)), *range(here))]
    there = [Message(rank, part) for rank, part in others if part.size]
    mine = parts[here]
    totals = [Total(mine.view(array.dtype), rail[:here], rail[here + 1 :])] if mine.size else []
    yield Round(there, [], totals)
    yield Round([Message(rank, mine) for rank, _ in others if mine.size], there)


def _edges(nbytes: int, hosts: int) -> list[int]:
    """The bounds of the parts of a sum, in bytes."""
    return [*(nbytes // _UNIT * host // hosts * _UNIT for host in range(hosts)), nbytes]


def _rails(parts: Sequence[Operand], hosts: Hosts, servers: Sequence[int]) -> tuple[list[Rail], list[list[Operand]]]:
    """The rails and the share of each. The rails of a server carry its part of the bucket (``share_out``)."""
    turn = zlib.crc32(parts[0].name.encode(errors="surrogatepass"))
    fewest = min(len(ranks) for ranks in hosts)
    count = fewest * (len(servers) or 1)
    across = [tuple(ranks[(number + turn) % len(ranks)] for ranks in hosts) for number in range(count)]
    if servers:
        rails = [_to_server(servers[number // fewest], ranks, hosts) for number, ranks in enumerate(across)]
    else:
        rails = [Rail(ranks, tuple(range(len(hosts)))) for ranks in across]
    return rails, share_out(parts, count)


def _to_server(server: int, across: tuple[int, ...], hosts: Hosts) -> Rail:
    """The rail of a server, which takes the place of its own host's rank if it is a worker."""
    at = next((number for number, ranks in enumerate(hosts) if server in ranks), len(hosts))
    return Rail((*across[:at], server, *across[at + 1 :]), (at,))


def _of(piece: RailedPiece, me: Participant) -> list[tuple[Rail, Sequence[Operand], Participant]]:
    """This process's rails with their shares of a piece, and its part in each of them."""
    return [
        (rail, share, _part_in(rail, me))
        for rail, share in zip(piece.rails, piece.shares, strict=True)
        if share and me.index in rail.processes
    ]


def _part_in(rail: Rail, me: Participant) -> Participant:
    """This process's part in the reducers of a rail, where hosts are the workers."""
    here = rail.processes.index(me.index)
    called = tuple(me.called[one] for one in rail.processes) if me.called else rail.processes
    return replace(me, index=here, workers=len(me.hosts), owners=rail.owners, hosts=(), called=called)


def _elements(share: Sequence[Operand]) -> int:
    return sum(part.elements for part in share)


def _sums_of(piece: RailedPiece, hosts: Hosts, element_bytes: int) -> Flows:
    """Messages from every rank to the ranks that add up its host's gradients."""
    return _flows(
        [
            (rank, adds, element_bytes * (stop - start))
            for host, ranks in enumerate(hosts)
            for adds, start, stop in piece.sums(host)
            for rank in ranks
            if rank != adds
        ]
    )


def _among(step: Flows | Summed, rail: Rail) -> list[Flows]:
    """Messages between hosts as messages between the ranks of a rail."""
    numbers = np.array(rail.processes)
    if isinstance(step, Flows):
        return [replace(step, src=numbers[step.src], dst=numbers[step.dst])]
    ranks = rail.processes
    sizes = [stop - start for start, stop in pairwise(_edges(step.nbytes, len(ranks)))]
    up = _flows(
        [(src, dst, size) for dst, size in zip(ranks, sizes, strict=True) for src in ranks if src != dst and size]
    )
    return [up, Flows(up.dst, up.src, up.nbytes, up.most_bytes)]


def _flows(rows: Sequence[tuple[int, int, int]]) -> Flows:
    columns: Column = np.array(rows, np.int64).reshape(-1, 3)
    src, dst, nbytes = columns.T
    return Flows(src, dst, nbytes, nbytes)
