"""The first layers first: the next forward pass begins when their gradients have arrived, the others follow it.

Backward produces the last layer's gradients first, and the next forward pass needs the first layer's. In the order in
which they are produced everything has to arrive before that can begin; by priority the exchange goes on during the
forward pass, each layer waiting for itself, and an iteration takes what the wire or the computation takes. A gradient
that is more urgent overtakes one that is under way, so large tensors are cut into slices ("P3", Jayarajan et al., MLSys
2019; "ByteScheduler", Peng et al., SOSP 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..nouns import Bucket, Layer, Size
from ..registry import register
from . import Application, Cost, Phases, Release
from ._slices import DEFAULT_SLICE, check_slice, first_layer, sliced


@register("schedules", "priority")
@dataclass(frozen=True)
class Priority:
    """Slices of up to ``slice`` bytes, those that the forward pass needs first before the others."""

    slice: Size = DEFAULT_SLICE
    release: ClassVar[Release] = "ready"
    phases: ClassVar[Phases] = "whole"
    apply: ClassVar[Application] = "layer"
    in_flight: ClassVar[int] = 4
    measures: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_slice("priority", self.slice)

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:  # noqa: ARG002
        """Large tensors cut, small neighbours together."""
        return sliced(layers, self.slice)

    def priority(self, bucket: Bucket) -> float:
        """By the first layer that is in it."""
        return first_layer(bucket)
