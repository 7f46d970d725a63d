"""Buckets by measured times: tensors are merged where that lets the last exchange end soonest.

Sent alone, each tensor pays the latency of an exchange; sent with later ones, it waits for their gradients. Where the
times of both are known, the best way to merge is, too: MG-WFBP (Shi, Chu and Li, INFOCOM 2019; ToN 2021).

Theory. Backward ends tensor k at r(k), an exchange of n bytes takes c(n), and one begins when the one before has ended
and its last tensor is there. With E(k) for the soonest end of everything up to tensor k, E(0) = 0,

    E(k) = min over j < k of  max(E(j), r(k)) + c(bytes of j+1 .. k)

since an exchange ends no later when the one before does. Cost: quadratic in the tensors at most; cutting further back
stops paying as soon as r(k) + c is no better than what has been found, since c grows with the bytes.

Where others hold the weights an exchange is a push of c(n) and a pull of p(n). Pulls go the other way, beside the
pushes that follow, once backward has ended at b and the owners have been told:

    E as above, and  P(k) = max(P(j), E(k), b) + p(bytes of j+1 .. k)

Best is what lets the last pull end soonest. Of the ways to cut the first k tensors those count of which no other one is
as soon in E and in P, since a sooner E may be worth a later P; there are few.

The first steps, in which times are measured, have buckets that double in size, so that c shows at all of them.
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
    """The buckets that end soonest, once layers and exchanges have been timed for some steps."""

    in_flight: ClassVar[int] = 2
    measures: ClassVar[int] = 6

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:
        """The best cuts by the times of layers and exchanges; without them, buckets that double in size."""
        order = range(len(layers))[::-1]
        if cost is None or not any(layer.backward_s for layer in layers):
            return _cut(layers, order, _doubling(layers, order))
        return _cut(layers, order, _best(layers, order, cost))


def _doubling(layers: Sequence[Layer], order: Sequence[int]) -> list[int]:
    """Where buckets end, as counts of tensors in this order."""
    ends, held, limit = [], 0, _FIRST_BYTES
    for count, index in enumerate(order, 1):
        held += layers[index].spec.nbytes
        if held >= limit:
            ends.append(count)
            held, limit = 0, 2 * limit
    return ends if ends and ends[-1] == len(order) else [*ends, len(order)]


class _Way(NamedTuple):
    """A way to cut the first tensors: when its last push has ended, and its last pull, where there are pulls."""

    push_s: float
    pull_s: float
    end: int
    before: _Way | None

    def beats(self, other: _Way) -> bool:
        """Whether the other one is sooner in nothing, and later in something."""
        mine, theirs = self[:2], other[:2]
        return mine != theirs and mine[0] <= theirs[0] and mine[1] <= theirs[1]


def _best(layers: Sequence[Layer], order: Sequence[int], cost: Cost) -> list[int]:
    """The same where the last exchange ends soonest; fewer buckets where that makes no difference."""
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
    """A way with one piece more, of buckets of these sizes, whose last gradient is ready then."""
    if not isinstance(cost, PushAndPull):
        return _Way(max(way.push_s, ready_s) + sum(map(cost, sizes)), 0.0, end, way)
    push_s = max(way.push_s, ready_s) + sum(map(cost.push, sizes))
    return _Way(push_s, max(way.pull_s, push_s, backward_s) + sum(map(cost.pull, sizes)), end, way)


def _ends(way: _Way) -> list[int]:
    """Where the buckets of a way end."""
    found: list[int] = []
    while way.before is not None:
        found.append(way.end)
        way = way.before
    return found[::-1]


def _cut(layers: Sequence[Layer], order: Sequence[int], ends: Sequence[int]) -> list[Bucket]:
    """Buckets that end there, one of each element type."""
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
