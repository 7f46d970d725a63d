"""Buckets by measured times: tensors are merged where that lets the last exchange end soonest.

Sent alone, each tensor pays the latency of an exchange; sent with later ones, it waits for their gradients. Where the
times of both are known, the best way to merge is, too: MG-WFBP (Shi, Chu and Li, INFOCOM 2019; ToN 2021).

Theory. Backward ends tensor k at r(k), an exchange of n bytes takes c(n), and one begins when the one before has ended
and its last tensor is there. With E(k) for the soonest end of everything up to tensor k, E(0) = 0,

    E(k) = min over j < k of  max(E(j), r(k)) + c(bytes of j+1 .. k)

since an exchange ends no later when the one before does. Cost: quadratic in the tensors at most; cutting further back
stops paying as soon as r(k) + c is no better than what has been found, since c grows with the bytes.

The first steps, in which times are measured, have buckets that double in size, so that c shows at all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from ..nouns import Bucket, Layer, Slice
from ..registry import register
from . import Cost
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


def _best(layers: Sequence[Layer], order: Sequence[int], cost: Cost) -> list[int]:
    """The same where the last exchange ends soonest; fewer buckets where that makes no difference."""
    ready_s = list(accumulate(layers[index].backward_s for index in order))
    soonest_s, after = [0.0], [0]
    for count in range(1, len(order) + 1):
        sizes: dict[str, int] = {}
        best_s, best = math.inf, 0
        for start in range(count - 1, -1, -1):
            spec = layers[order[start]].spec
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.nbytes
            exchange_s = sum(map(cost, sizes.values()))
            if ready_s[count - 1] + exchange_s > best_s:
                break
            end_s = max(soonest_s[start], ready_s[count - 1]) + exchange_s
            if end_s <= best_s:
                best_s, best = end_s, start
        soonest_s.append(best_s)
        after.append(best)
    ends, count = [], len(order)
    while count > 0:
        ends.append(count)
        count = after[count]
    return ends[::-1]


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
