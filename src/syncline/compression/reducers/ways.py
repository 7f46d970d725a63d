"""Maps every codec to its way of combining payloads and groups a bucket's parts accordingly.

Only this module reads ``Codec.combine``; all other code asks the ``Way``.

It also describes the messages of a bucket without any gradients (``parts_of``, ``traffic``, ``moved_bytes``), for
predictions. The sizes come from the code that cuts, encodes and sends, so predictions match runs. Payloads without a
fixed size count with their expected bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...codecs import Applied, Codec, Combine, State, codec_of
from ...codecs.dense import Uncompressed
from ...errors import UsageError
from ...nouns import Bucket, Layer, Spec
from ...plans.plan import Plan
from . import Flows, Operand, Participant, Reducer, Traffic, Way, gathered, merged, owners, rounds, summed

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


def moved_bytes(traffic: Sequence[Traffic], processes: int, plan: Callable[[int], Plan]) -> NDArray[np.float64]:
    """The bytes from every process (row) to every other (column).

    ``plan(nbytes)`` is the plan that sums an array of that size.
    """
    found = np.zeros((processes, processes))
    for step in (step for one in traffic for step in one):
        if isinstance(step, Flows):
            np.add.at(found, (step.src, step.dst), step.nbytes)
        else:
            summing = plan(step.nbytes)
            np.add.at(found, (summing.src, summing.dst), summing.count * (step.nbytes / summing.chunks))
    return found


def without_data(name: str, codec: Codec, spec: Spec, start: int, stop: int) -> Operand:
    """Elements ``start`` to ``stop`` of a tensor, with a broadcast zero for its gradients."""
    state = State(spec, 0)
    return Operand(name, codec, np.broadcast_to(np.float32(0), stop - start), state, state, start)
