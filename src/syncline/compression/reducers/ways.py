"""The ways in which payloads become one, by what codecs declare, and a bucket's parts sorted by them.

The only place that reads ``Codec.combine``: all others ask the ``Way``.
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
"""Those that a plan sums come first: they begin before the others' messages."""

OWNERS = owners.WAY
"""Also that of all payloads that go through servers."""


def way_of(codec: Codec) -> Way:
    """How the payloads of a codec become one; raises UsageError when it does not say."""
    found = WAYS.get(codec.combine)
    if found is None:
        raise UsageError(f"{codec} says combine={codec.combine!r}: choose one of {', '.join(WAYS)}")
    return found


def pieces(parts: Sequence[Operand], me: Participant, *, served: bool = False) -> list[Callable[[], Reducer]]:
    """What has to be done for a bucket: reducers that may run at the same time, in this order on all processes.

    Where the gradients go through servers (``served``), every codec's payloads do.
    """
    chain: list[Callable[[], Reducer]] = []
    found: list[Callable[[], Reducer]] = []
    for way, its in _by_way(parts, served):
        (chain if way.carrier is None else found).extend(way.pieces(its, me))
    return [partial(_one_by_one, chain), *found] if chain else found


def traffic(parts: Sequence[Operand], workers: int, owners_at: Sequence[int], *, served: bool = False) -> list[Traffic]:
    """What travels for each of ``pieces``, in the same order: reads the parts' sizes, and none of their elements."""
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
    """Sums of one bucket follow one another: plans tell their messages apart by the bucket alone."""
    for reducer in chain:
        yield from reducer()
