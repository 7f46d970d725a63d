"""How a model's tensors travel: its layers, and the buckets that hold slices of them.

The schedule makes the buckets, on rank 0, which tells all others, servers too: a schedule of somebody else's may go by
the order of a set, a clock, or times that each rank has measured, and ranks whose buckets differ would add up what does
not belong together. What it has made is checked before it is told.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..nouns import Bucket, Layer, Slice
from ..schedules import Cost
from .session import MODEL_KEYS, Session


@dataclass(frozen=True)
class Layout:
    """The layers of a model in forward order, and the buckets in the order in which they go."""

    layers: tuple[Layer, ...]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies: element type and the range of elements in that type's block of memory."""

    dtype: str
    start: int
    stop: int


def place_tensors(elements: Sequence[int], buckets: Sequence[Bucket]) -> tuple[Placed, ...]:
    """Tensors of so many elements one behind the other, in the order in which buckets first name them."""
    placed: dict[int, Placed] = {}
    ends: dict[str, int] = {}
    for bucket in buckets:
        for part in bucket.slices:
            if part.tensor not in placed:
                start = ends.get(bucket.dtype, 0)
                ends[bucket.dtype] = stop = start + elements[part.tensor]
                placed[part.tensor] = Placed(bucket.dtype, start, stop)
    return tuple(placed[index] for index in range(len(elements)))


def place_bucket(bucket: Bucket, tensors: Sequence[Placed]) -> int:
    """Where a bucket begins in its block; raises UsageError unless its slices follow one another there."""
    places = [tensors[part.tensor].start + part.start for part in bucket.slices]
    at = first = places[0] if places else 0
    for part, found in zip(bucket.slices, places, strict=True):
        if found != at:
            raise UsageError("this schedule's buckets cannot be laid out contiguously")
        at += part.elements
    return first


def decide_layout(session: Session, layers: Sequence[Layer], cost: Cost | None = None) -> Layout:
    """The layout that rank 0's schedule makes of ``layers``, on all processes, which call it together.

    ``cost`` and the layers' times count on rank 0. Raises UsageError on all of them where a schedule has made something
    else than every element of every tensor in one bucket of its type.
    """
    told = b""
    if session.index == 0:
        told = _decide(session, layers, cost)
    answer = json.loads(session.tell_everyone(told, "telling the buckets"))
    if "fault" in answer:
        raise UsageError(answer["fault"])
    buckets = (Bucket(tuple(Slice(*part) for part in slices), dtype) for dtype, slices in answer["buckets"])
    return Layout(tuple(layers), tuple(buckets))


def _decide(session: Session, layers: Sequence[Layer], cost: Cost | None) -> bytes:
    try:
        buckets = session.strategy.schedule_object().buckets(layers, cost)
        check_buckets(layers, buckets)
    except UsageError as error:
        return json.dumps({"fault": f"schedule={session.strategy.schedule.name}: {error}"}).encode()
    rows = [[bucket.dtype, [[part.tensor, part.start, part.stop] for part in bucket.slices]] for bucket in buckets]
    return json.dumps({"buckets": rows}).encode()


def check_buckets(layers: Sequence[Layer], buckets: Sequence[Bucket]) -> None:
    """Raise UsageError unless each element is in exactly one bucket, which has one element type, and keys suffice."""
    if len(buckets) >= MODEL_KEYS:
        raise UsageError(
            f"there are {len(buckets)} buckets of this model, up to {MODEL_KEYS - 1} are possible: use schedule=fixed"
        )
    slices: list[list[Slice]] = [[] for _ in layers]
    for number, bucket in enumerate(buckets):
        if not bucket.slices:
            raise UsageError(f"bucket {number} is empty")
        for part in bucket.slices:
            if not 0 <= part.tensor < len(layers):
                raise UsageError(f"bucket {number} has a slice of tensor {part.tensor}, there are {len(layers)}")
            spec = layers[part.tensor].spec
            if bucket.dtype != spec.dtype:
                raise UsageError(f"bucket {number} is of {bucket.dtype}, and {spec.name!r} in it of {spec.dtype}")
            slices[part.tensor].append(part)
    for layer, found in zip(layers, slices, strict=True):
        at, name = 0, layer.spec.name
        for part in sorted(found, key=lambda part: (part.start, part.stop)):
            if part.start != at or part.stop < part.start:
                what = "are twice" if part.start < at else "are missing"
                raise UsageError(f"elements {min(at, part.start)} to {max(at, part.start)} of {name!r} {what}")
            at = part.stop
        if at > layer.spec.elements:
            raise UsageError(f"{name!r} has {layer.spec.elements} elements, and a slice of it ends at {at}")
        if at < layer.spec.elements or not found:
            raise UsageError(f"elements {at} to {layer.spec.elements} of {name!r} are missing")
