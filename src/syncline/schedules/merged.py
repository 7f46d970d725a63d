"""Buckets from measured times: tensors are merged so that the last exchange ends as early as possible.

Sent alone, each tensor pays the latency of an exchange; merged, it waits for the gradients of later tensors. With both
times known, the optimal merge can be computed: MG-WFBP (Shi, Chu and Li, INFOCOM 2019; ToN 2021).

Theory. Backward completes tensor k at r(k), and an exchange of n bytes takes c(n). It starts when the previous one has
ended and its last tensor is ready. With E(k) the earliest end of everything up to tensor k, and E(0) = 0,

    E(k) = min over j < k of  max(E(j), r(k)) + c(bytes of j+1 .. k)

because an exchange ends no later if the previous one ends earlier. Cost: at most quadratic in the number of tensors.
The search over j stops as soon as r(k) + c is no better than the best so far, because c grows with the bytes.

If owners hold the weights, an exchange is a push of c(n) and a pull of p(n). Pulls use the other direction,
concurrently with later pushes, once backward has ended at b and the owners know it:

    E as above, and  P(k) = max(P(j), E(k), b) + p(bytes of j+1 .. k)

The last pull should end as early as possible. An earlier E may be worth a later P, so all cuts of the first k tensors
are kept that no other cut matches or beats in both E and P; there are few.

The first steps, which are measured, use buckets of doubling sizes, so that they sample c at all scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import ClassVar, NamedTuple

from ..nouns import Bucket, Layer, Slice
from ..registry import register
from . import Cost, PushAndPull
from ._slices import InOrder

_FIRST_BYTES = 16 * 1024


@register("schedules", "merged")
@dataclass(frozen=True)
class Merged(InOrder):
    """Merges tensors so that the last exchange ends earliest, by the times measured in the first steps."""

    in_flight: ClassVar[int] = 2
    measures: ClassVar[int] = 6

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:
        """The best cuts for the measured times. Before those exist, buckets of doubling sizes."""
        order = range(len(layers))[::-1]
        if cost is None or not any(layer.backward_s for layer in layers):
            return _cut(layers, order, _doubling(layers, order))
        return _cut(layers, order, _best(layers, order, cost))


def _doubling(layers: Sequence[Layer], order: Sequence[int]) -> list[int]:
    """The ends of the buckets, as counts of tensors in this order."""
    ends, held, limit = [], 0, _FIRST_BYTES
    for count, index in enumerate(order, 1):
        held += layers[index].spec.nbytes
        if held >= limit:
            ends.append(count)
            held, limit = 0, 2 * limit
    return ends if ends and ends[-1] == len(order) else [*ends, len(order)]


class _Way(NamedTuple):
    """A cut of the first tensors: the end of its last push and, with pulls, of its last pull."""

    push_s: float
    pull_s: float
    end: int
    before: _Way | None

    def beats(self, other: _Way) -> bool:
        """Whether ``other`` is earlier in neither value and later in at least one."""
        mine, theirs = self[:2], other[:2]
        return mine != theirs and mine[0] <= theirs[0] and mine[1] <= theirs[1]


def _best(layers: Sequence[Layer], order: Sequence[int], cost: Cost) -> list[int]:
    """The cuts whose last exchange ends earliest; among equals, the one with the fewest buckets."""
    ready_s = list(accumulate(layers[index].backward_s for index in order))
    ways = [[_Way(0.0, 0.0, 0, None)]]
    for count in range(1, len(order) + 1):
        sizes: dict[str, int] = {}
        found: list[_Way] = []
        for start in range(count - 1, -1, -1):
            spec = layers[order[start]].spec
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.nbytes
            longer = partial(_longer, cost, list(sizes.values()), ready_s[count - 1], ready_s[-1], count)
            soonest = longer(ways[0][0])
            if any(way.push_s < soonest.push_s and way.pull_s <= soonest.pull_s for way in found):
                break
            for made in map(longer, ways[start]):
                if not any(way.beats(made) for way in found):
                    found = [way for way in found if not (made.beats(way) or made[:2] == way[:2])] + [made]
        ways.append(found)
    return _ends(min(ways[-1], key=lambda way: max(way.push_s, way.pull_s)))


def _longer(cost: Cost, sizes: Sequence[int], ready_s: float, backward_s: float, end: int, way: _Way) -> _Way:
    """A cut extended by one group of tensors: buckets of these sizes, whose last gradient is ready at that time."""
    if not isinstance(cost, PushAndPull):
        return _Way(max(way.push_s, ready_s) + sum(map(cost, sizes)), 0.0, end, way)
    push_s = max(way.push_s, ready_s) + sum(map(cost.push, sizes))
    return _Way(push_s, max(way.pull_s, push_s, backward_s) + sum(map(cost.pull, sizes)), end, way)


def _ends(way: _Way) -> list[int]:
    """The ends of a cut's groups."""
    found: list[int] = []
    while way.before is not None:
        found.append(way.end)
        way = way.before
    return found[::-1]


def _cut(layers: Sequence[Layer], order: Sequence[int], ends: Sequence[int]) -> list[Bucket]:
    """The buckets between these ends, one per element type."""
    found: list[Bucket] = []
    start = 0
    for end in ends:
        parts: dict[str, list[Slice]] = {}
        for index in order[start:end]:
            spec = layers[index].spec
            parts.setdefault(spec.dtype, []).append(Slice(index, 0, spec.elements))
        made = [Bucket(tuple(slices), dtype) for dtype, slices in parts.items()]
        found += sorted(made, key=lambda bucket: -bucket.slices[-1].tensor)
        start = end
    return found
