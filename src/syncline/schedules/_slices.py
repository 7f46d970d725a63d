"""Buckets of at most so many bytes: large tensors are cut into slices, small neighbours travel together."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError
from ..nouns import Bucket, Layer, Size, Slice, item_bytes

DEFAULT_SLICE = Size(4 * 1024 * 1024)
"""P3 and ByteScheduler found a few megabytes best: small enough to be overtaken soon, large against a latency."""

_ALIGNED = 4096
"""Slices begin at multiples of so many elements, where they have that many: codecs with blocks allow such cuts."""


def check_slice(schedule: str, size: Size) -> None:
    """Raise UsageError for slices of nothing."""
    if size < 1:
        raise UsageError(f"{schedule}(slice=...) must be at least 1B, 4MiB is usual; schedule=wait_free does not slice")


def sliced(layers: Sequence[Layer], size: Size) -> list[Bucket]:
    """From the last layer to the first; a bucket has one element type."""
    done: list[Bucket] = []
    filling: dict[str, list[Slice]] = {}
    held: dict[str, int] = {}

    def close(dtype: str) -> None:
        if filling.get(dtype):
            done.append(Bucket(tuple(filling.pop(dtype)), dtype))
        held[dtype] = 0

    for index in reversed(range(len(layers))):
        spec = layers[index].spec
        if held.get(spec.dtype, 0) + spec.nbytes > size:
            close(spec.dtype)
        if spec.nbytes > size:
            parts = _cut(spec.elements, max(1, size // item_bytes(spec.dtype)))
            done += [Bucket((Slice(index, start, stop),), spec.dtype) for start, stop in parts]
        else:
            filling.setdefault(spec.dtype, []).append(Slice(index, 0, spec.elements))
            held[spec.dtype] = held.get(spec.dtype, 0) + spec.nbytes
    for dtype in list(filling):
        close(dtype)
    # A bucket is complete when the tensor nearest to the input is: its last slice.
    return sorted(done, key=lambda bucket: -bucket.slices[-1].tensor)


def _cut(elements: int, most: int) -> list[tuple[int, int]]:
    """Ranges of up to ``most`` elements, all of about one length."""
    count = -(-elements // most)
    step = -(-elements // count)
    if most >= _ALIGNED:
        step = min(-(-step // _ALIGNED), most // _ALIGNED) * _ALIGNED
    return [(start, min(start + step, elements)) for start in range(0, elements, step)]


def first_layer(bucket: Bucket) -> float:
    """The priority of buckets where the layers that the next forward pass begins with go first."""
    return float(min(part.tensor for part in bucket.slices))
