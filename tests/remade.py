"""A schedule for tests that makes other buckets once layers have been timed: in another order, and cut if told so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from syncline.nouns import Bucket, Layer, Slice
from syncline.schedules import Cost
from syncline.schedules.fixed import WaitFree


@dataclass(frozen=True)
class Remade(WaitFree):
    """First a tensor each, then those with an even number before the others, two or two parts in a bucket."""

    measures: ClassVar[int] = 2
    halves: bool = False

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:
        if not any(layer.backward_s for layer in layers):
            return super().buckets(layers, cost)
        parts = list(self.parts(layers))
        pairs = [parts[at : at + 2] for at in range(0, len(parts), 2)]
        return [Bucket(tuple(pair), layers[0].spec.dtype) for pair in pairs]

    def parts(self, layers: Sequence[Layer]) -> Iterator[Slice]:
        for tensor in [*range(0, len(layers), 2), *range(1, len(layers), 2)]:
            elements = layers[tensor].spec.elements
            edges = [0, elements // 3, elements] if self.halves else [0, elements]
            yield from (Slice(tensor, start, stop) for start, stop in pairwise(edges))
