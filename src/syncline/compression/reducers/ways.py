"""Maps every codec to its way of combining payloads and groups a bucket's parts accordingly.

Only this module reads ``Codec.combine``; all other code asks the ``Way``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from ...codecs import Codec, Combine
from ...errors import UsageError
from . import Operand, Participant, Reducer, Traffic, Way, gathered, merged, owners, rounds, summed

WAYS: Mapping[Combine, Way] = {
    "sum": summed.WAY,
    "rounds": rounds.WAY,
    "owner": owners.WAY,
    "gather": gathered.WAY,
    "merge": merged.WAY,
}
"""Ordered: the ways that a plan sums come first, so that they start before the other ways' messages."""

OWNERS = owners.WAY
"""The way of all payloads that go through servers."""


def way_of(codec: Codec) -> Way:
    """The way of combining a codec's payloads; raises UsageError if the codec declares none."""
    found = WAYS.get(codec.combine)
    if found is None:
        raise UsageError(f"{codec} says combine={codec.combine!r}: choose one of {', '.join(WAYS)}")
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
        if part.array.size:
            by[OWNERS if served else way_of(part.codec)].append(part)
    return ((way, its) for way, its in by.items() if its)


def _one_by_one(chain: Sequence[Callable[[], Reducer]]) -> Reducer:
    """Run the sums of one bucket one after the other: their messages carry the same key, that of the bucket."""
    for reducer in chain:
        yield from reducer()
