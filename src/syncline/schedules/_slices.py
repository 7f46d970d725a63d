"""Shared parts of schedules: common answers, and the packing and cutting of tensors into buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..errors import UsageError
from ..nouns import Bucket, Layer, Size, Slice, Spec, item_bytes
from . import Application, Cost, Phases, Release

DEFAULT_SLICE = Size(4 * 1024 * 1024)
"""A few megabytes were best for P3 and ByteScheduler: quickly overtaken, yet large compared to the latency. In rings of
4 hosts at 1 Gbit/s, slices of 1 MiB took 1.03 times as long, and of 16 MiB 1.26 times; with one server, whose pushes
and pulls share a port, 1 MiB took 0.8 times as long (benchmarks/performance.md)."""

_IN_FLIGHT = 4
"""Enough to hide one bucket's latency behind other buckets' transfers; more only shares the same bandwidth."""

_ALIGNED = 4096
"""Slices of at least this many elements begin at multiples of it, where codecs with blocks can be cut."""


class InOrder:
    """Buckets start when complete, in that order; the optimizer's step waits for all; nothing is measured."""

    release: ClassVar[Release] = "ready"
    phases: ClassVar[Phases] = "whole"
    apply: ClassVar[Application] = "step"
    in_flight: ClassVar[int] = _IN_FLIGHT
    measures: ClassVar[int] = 0

    def priority(self, bucket: Bucket) -> float:  # noqa: ARG002
        return 0.0


@dataclass(frozen=True)
class Sliced:
    """Slices of up to ``slice`` bytes, awaited layer by layer; slices that are needed first have priority."""

    slice: Size = DEFAULT_SLICE
    release: ClassVar[Release] = "ready"
    phases: ClassVar[Phases] = "whole"
    apply: ClassVar[Application] = "layer"
    in_flight: ClassVar[int] = _IN_FLIGHT
    measures: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_size(self, "slice", self.slice, "4MiB is usual; schedule=wait_free does not slice")

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:  # noqa: ARG002
        """Large tensors are cut; small neighbours travel together."""
        return sliced(layers, self.slice)

    def priority(self, bucket: Bucket) -> float:
        """The index of the bucket's first layer: the next forward pass needs the first layers first."""
        return float(min(part.tensor for part in bucket.slices))


def check_size(schedule: object, argument: str, size: Size, instead: str) -> None:
    """Raise UsageError for an empty bucket or slice size. Schedules are named like their classes."""
    if size < 1:
        raise UsageError(f"{type(schedule).__name__.lower()}({argument}=...) must be at least 1B: {instead}")


class Packing:
    """Packs tensors into buckets from the last layer to the first. One bucket per element type is open."""

    def __init__(self) -> None:
        self._done: list[Bucket] = []
        self._open: dict[str, list[Slice]] = {}
        self._held: dict[str, int] = {}

    def held(self, dtype: str) -> int:
        """The bytes in the open bucket of that type."""
        return self._held.get(dtype, 0)

    def add(self, tensor: int, spec: Spec) -> None:
        """Add a whole tensor to the open bucket of its type."""
        self._open.setdefault(spec.dtype, []).append(Slice(tensor, 0, spec.elements))
        self._held[spec.dtype] = self.held(spec.dtype) + spec.nbytes

    def add_alone(self, part: Slice, dtype: str) -> None:
        """Add a slice as a bucket of its own."""
        self._done.append(Bucket((part,), dtype))

    def close(self, dtype: str) -> None:
        """Close the open bucket of that type."""
        if dtype in self._open:
            self._done.append(Bucket(tuple(self._open.pop(dtype)), dtype))
            del self._held[dtype]

    def buckets(self) -> list[Bucket]:
        """All buckets, in the order in which backward completes them."""
        for dtype in list(self._open):
            self.close(dtype)
        # The tensor nearest to the input, the bucket's last slice, completes the bucket.
        return sorted(self._done, key=lambda bucket: -bucket.slices[-1].tensor)


def greedy(layers: Sequence[Layer], limit_bytes: float) -> list[Bucket]:
    """Buckets of whole tensors, closed when they reach ``limit_bytes``. A tensor of that size travels alone."""
    packing = Packing()
    for index in reversed(range(len(layers))):
        spec = layers[index].spec
        if spec.nbytes >= limit_bytes:
            packing.close(spec.dtype)
        packing.add(index, spec)
        if packing.held(spec.dtype) >= limit_bytes:
            packing.close(spec.dtype)
    return packing.buckets()


def sliced(layers: Sequence[Layer], size: Size) -> list[Bucket]:
    """Buckets of at most ``size`` bytes: large tensors are cut into slices, small neighbours travel together."""
    packing = Packing()
    for index in reversed(range(len(layers))):
        spec = layers[index].spec
        if packing.held(spec.dtype) + spec.nbytes > size:
            packing.close(spec.dtype)
        if spec.nbytes > size:
            for start, stop in _cut(spec.elements, max(1, size // item_bytes(spec.dtype))):
                packing.add_alone(Slice(index, start, stop), spec.dtype)
        else:
            packing.add(index, spec)
    return packing.buckets()


def _cut(elements: int, most: int) -> list[tuple[int, int]]:
    """Ranges of up to ``most`` elements of nearly equal length."""
    count = -(-elements // most)
    step = -(-elements // count)
    if most >= _ALIGNED:
        step = min(-(-step // _ALIGNED), most // _ALIGNED) * _ALIGNED
    return [(start, min(start + step, elements)) for start in range(0, elements, step)]
