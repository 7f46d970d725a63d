"""Decides where buckets may cut compressed tensors: at multiples of the codec's block, or not at all.

A schedule cuts tensors by size, but scales and selections belong to whole tensors or blocks. If a schedule cuts
elsewhere, the tensor is rejoined: it travels in one bucket, whose payload is sent in segments that more urgent buckets
can overtake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..codecs import Codec, codec_of
from ..nouns import Bucket, Layer, Slice, Spec


def may_cut(codec: Codec, part: Slice, spec: Spec) -> bool:
    """Whether a codec can compress a slice of a tensor by itself."""
    if part.start == 0 and part.stop == spec.elements:
        return True
    unit = codec.block
    return bool(unit) and part.start % unit == 0 and (part.stop % unit == 0 or part.stop == spec.elements)


def join_cuts(codec: Codec, layers: Sequence[Layer], buckets: Sequence[Bucket]) -> list[Bucket]:
    """The same buckets, with every tensor that must stay whole moved to the first bucket that holds a part of it."""
    parts = [part for bucket in buckets for part in bucket.slices]
    whole: set[int] = set()
    for part in parts:
        spec = layers[part.tensor].spec
        if not may_cut(codec_of(codec, replace(spec, dtype="float32")).codec, part, spec):
            whole.add(part.tensor)
    made, placed = [], set[int]()
    for bucket in buckets:
        slices = []
        for part in bucket.slices:
            if part.tensor not in whole:
                slices.append(part)
            elif part.tensor not in placed:
                placed.add(part.tensor)
                slices.append(Slice(part.tensor, 0, layers[part.tensor].spec.elements))
        if slices:
            made.append(replace(bucket, slices=tuple(slices)))
    return made
