"""Delayed updates: weights are updated with the previous step's gradients, so that no step waits for its exchange.

An exchange has a whole iteration to arrive; its result is one step old. With ``local=off`` this is stochastic gradient
descent with a delay of one. With ``local=on`` every worker continues from weights that are ahead by a plain step with
its own gradient, which compensates most of the delay ("OD-SGD", Xu et al., ACM TACO 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..nouns import Bucket, Layer, Size
from ..registry import register
from . import Application, Cost
from ._slices import InOrder, check_size, greedy
from .fixed import DEFAULT_BUCKET


@register("schedules", "delayed")
@dataclass(frozen=True)
class Delayed(InOrder):
    """Uses the buckets of ``fixed``; with ``local=on``, workers continue with a step of their own gradients."""

    local: bool = True
    bucket: Size = DEFAULT_BUCKET
    apply: ClassVar[Application] = "next_step"

    def __post_init__(self) -> None:
        check_size(self, "bucket", self.bucket, "25MiB is usual")

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:  # noqa: ARG002
        return greedy(layers, self.bucket)
