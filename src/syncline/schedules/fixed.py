"""Buckets that do not depend on measurements: all at once, each tensor alone, or up to a size.

``fifo`` waits for the whole backward pass and sends everything in one message per element type (algorithm 2 of Zhu, Liu
and Fang 2020; "FIFO" in Dong and Ouyang 2020). ``wait_free`` sends each tensor as soon as its gradient exists
(wait-free backpropagation, Poseidon, Zhang et al., USENIX ATC 2017): the most overlap and one latency per tensor.
``fixed`` lies between: tensors are collected until a bucket is full (Li et al., "PyTorch Distributed", VLDB 2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..errors import UsageError
from ..nouns import Bucket, Layer, Size, Slice
from ..registry import register
from . import Application, Cost, Phases, Release

DEFAULT_BUCKET = Size(25 * 1024 * 1024)
"""DDP's default, so that the two compare with equal buckets."""

_IN_FLIGHT = 4
"""Enough to hide one bucket's latency behind the others' bytes; more only spreads the same bandwidth."""


@register("schedules", "fixed")
@dataclass(frozen=True)
class Fixed:
    """Buckets are closed when they reach a size; a larger tensor travels alone."""

    bucket: Size = DEFAULT_BUCKET
    release: ClassVar[Release] = "ready"
    phases: ClassVar[Phases] = "whole"
    apply: ClassVar[Application] = "step"
    in_flight: ClassVar[int] = _IN_FLIGHT
    measures: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.bucket < 1:
            raise UsageError("fixed(bucket=...) must be at least 1B; one bucket per tensor is schedule=wait_free")

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:  # noqa: ARG002
        """Greedy, from the last layer to the first."""
        return greedy(layers, self.bucket)

    def priority(self, bucket: Bucket) -> float:  # noqa: ARG002
        """All alike: buckets go in the order in which they are complete."""
        return 0.0


@register("schedules", "wait_free")
@dataclass(frozen=True)
class WaitFree:
    """Each tensor is sent alone, as soon as its gradient exists."""

    release: ClassVar[Release] = "ready"
    phases: ClassVar[Phases] = "whole"
    apply: ClassVar[Application] = "step"
    in_flight: ClassVar[int] = _IN_FLIGHT
    measures: ClassVar[int] = 0

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:  # noqa: ARG002
        """One bucket per tensor, from the last layer to the first."""
        return greedy(layers, 0)

    def priority(self, bucket: Bucket) -> float:  # noqa: ARG002
        """All alike: tensors go in the order in which backward produces them."""
        return 0.0


@register("schedules", "fifo")
@dataclass(frozen=True)
class Fifo:
    """Everything is sent after backward, in one bucket per element type."""

    release: ClassVar[Release] = "backward_end"
    phases: ClassVar[Phases] = "whole"
    apply: ClassVar[Application] = "step"
    in_flight: ClassVar[int] = 1
    measures: ClassVar[int] = 0

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:  # noqa: ARG002
        """One bucket per element type, from the last layer to the first."""
        return greedy(layers, math.inf)

    def priority(self, bucket: Bucket) -> float:  # noqa: ARG002
        """All alike: there is one bucket per element type."""
        return 0.0


def greedy(layers: Sequence[Layer], limit_bytes: float) -> list[Bucket]:
    """Fill one bucket per element type from the last layer on; it is closed when it has ``limit_bytes``."""
    done: list[Bucket] = []
    filling: dict[str, list[Slice]] = {}
    held: dict[str, int] = {}

    def close(dtype: str) -> None:
        done.append(Bucket(tuple(filling.pop(dtype)), dtype))
        del held[dtype]

    for index in reversed(range(len(layers))):
        spec = layers[index].spec
        if spec.dtype in filling and spec.nbytes >= limit_bytes:
            close(spec.dtype)
        filling.setdefault(spec.dtype, []).append(Slice(index, 0, spec.elements))
        held[spec.dtype] = held.get(spec.dtype, 0) + spec.nbytes
        if held[spec.dtype] >= limit_bytes:
            close(spec.dtype)
    for dtype in list(filling):
        close(dtype)
    # A bucket is complete when the tensor nearest to the input is: its last slice.
    return sorted(done, key=lambda bucket: -bucket.slices[-1].tensor)
