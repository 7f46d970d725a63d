"""A schedule for tests that makes other buckets once layers have been timed: pairs of tensors, or of parts of them."""

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
    """First a tensor each, then two in a bucket; with ``cut`` the end of one and the beginning of the next.

    Parts begin at multiples of it. ``swapped`` are tensors in another order than memory has.
    """

    measures: ClassVar[int] = 2
    cut: int = 0
    swapped: bool = False

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:
        if not any(layer.backward_s for layer in layers):
            return super().buckets(layers, cost)
        parts = list(self.parts(layers))
        if self.swapped:
            parts[:2] = parts[1::-1]
        first = 1 if self.cut else 2
        pairs = [parts[:first], *(parts[at : at + 2] for at in range(first, len(parts), 2))]
        return [Bucket(tuple(pair), layers[0].spec.dtype) for pair in pairs]

    def parts(self, layers: Sequence[Layer]) -> Iterator[Slice]:
        for tensor in reversed(range(len(layers))):
            elements = layers[tensor].spec.elements
            edges = [0, elements // 3 // self.cut * self.cut, elements] if self.cut else [0, elements]
            yield from (Slice(tensor, start, stop) for start, stop in pairwise(edges))
