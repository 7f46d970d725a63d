"""Buckets that do not depend on measurements: everything at once, each tensor alone, or up to a size.

``fifo`` waits for the whole backward pass and sends everything in one message per element type (algorithm 2 of Zhu, Liu
and Fang 2020; "FIFO" in Dong and Ouyang 2020). ``wait_free`` sends each tensor as soon as its gradient exists
(wait-free backpropagation, Poseidon, Zhang et al., USENIX ATC 2017): the most overlap, at one latency per tensor.
``fixed`` is in between: tensors are collected until a bucket is full (Li et al., "PyTorch Distributed", VLDB 2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..nouns import Bucket, Layer, Size
from ..registry import register
from . import Cost, Release
from ._slices import InOrder, check_size, greedy

DEFAULT_BUCKET = Size(25 * 1024 * 1024)
"""The default of PyTorch's DDP, for comparisons with equal buckets. ``auto`` leaves it by measured times."""


@register("schedules", "fixed")
@dataclass(frozen=True)
class Fixed(InOrder):
    """Buckets are closed when they reach a size; a larger tensor travels alone."""

    bucket: Size = DEFAULT_BUCKET

    def __post_init__(self) -> None:
        check_size(self, "bucket", self.bucket, "one bucket per tensor is schedule=wait_free")

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:  # noqa: ARG002
        return greedy(layers, self.bucket)


@register("schedules", "wait_free")
@dataclass(frozen=True)
class WaitFree(InOrder):
    """Each tensor is sent alone, as soon as its gradient exists."""

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:  # noqa: ARG002
        return greedy(layers, 0)


@register("schedules", "fifo")
@dataclass(frozen=True)
class Fifo(InOrder):
    """Everything is sent after backward, in one bucket per element type."""

    release: ClassVar[Release] = "backward_end"
    in_flight: ClassVar[int] = 1

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:  # noqa: ARG002
        return greedy(layers, math.inf)
