"""Two exchanges in place of one: gradients are reduced during backward, and the sums gathered during the next forward.

An allreduce is a reduce-scatter, which only backward can feed, and an all-gather, which only the next forward pass
waits for. Apart from each other the two hide behind both halves of the computation, without any bucket overtaking
another ("DeAR", Zhang et al., ICDCS 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..nouns import Bucket, Layer, Size
from ..registry import register
from . import Application, Cost, Phases, Release
from ._slices import DEFAULT_SLICE, check_slice, first_layer, sliced


@register("schedules", "split")
@dataclass(frozen=True)
class Split:
    """Slices of up to ``slice`` bytes; those that the forward pass needs first are gathered first."""

    slice: Size = DEFAULT_SLICE
    release: ClassVar[Release] = "ready"
    phases: ClassVar[Phases] = "split"
    apply: ClassVar[Application] = "layer"
    in_flight: ClassVar[int] = 4
    measures: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_slice("split", self.slice)

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:  # noqa: ARG002
        """Large tensors cut, small neighbours together."""
        return sliced(layers, self.slice)

    def priority(self, bucket: Bucket) -> float:
        """By the first layer that is in it."""
        return first_layer(bucket)
