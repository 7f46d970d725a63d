"""Laws of buckets: everything once, one element type each, in the order of backward, no larger than asked."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import registry
from syncline.errors import UsageError
from syncline.nouns import Layer, Size, Spec
from syncline.schedules import Schedule
from syncline.schedules.fixed import Fifo, Fixed, WaitFree

LAYERS = st.lists(
    st.builds(
        lambda size, dtype: Layer(Spec("w", (size,), dtype)),
        st.integers(0, 60),
        st.sampled_from(["float32", "float16", "bfloat16"]),
    ),
    max_size=30,
).map(tuple)
SCHEDULES = st.one_of(st.just(Fifo()), st.just(WaitFree()), st.builds(Fixed, st.integers(1, 400).map(Size)))


@given(LAYERS, SCHEDULES)
def test_every_tensor_is_in_one_bucket_of_its_type(layers: tuple[Layer, ...], schedule: Schedule) -> None:
    buckets = schedule.buckets(layers)
    parts = Counter(part.tensor for bucket in buckets for part in bucket.slices)
    assert parts == Counter(range(len(layers)))
    for bucket in buckets:
        for part in bucket.slices:
            spec = layers[part.tensor].spec
            assert (part.start, part.stop, bucket.dtype) == (0, spec.elements, spec.dtype)


@given(LAYERS, SCHEDULES)
def test_buckets_are_listed_as_backward_completes_them(layers: tuple[Layer, ...], schedule: Schedule) -> None:
    buckets = schedule.buckets(layers)
    inside = [[part.tensor for part in bucket.slices] for bucket in buckets]
    assert all(tensors == sorted(tensors, reverse=True) for tensors in inside)
    complete = [min(tensors) for tensors in inside]
    assert complete == sorted(complete, reverse=True)


@given(LAYERS, st.integers(1, 400).map(Size))
def test_a_bucket_is_closed_when_it_reaches_its_size(layers: tuple[Layer, ...], size: Size) -> None:
    buckets = Fixed(size).buckets(layers)
    for bucket in buckets:
        last = layers[bucket.slices[-1].tensor].spec.nbytes
        # Without its last tensor it was not full yet; a tensor of its size or more is alone.
        assert bucket.nbytes - last < size
        sizes = [layers[part.tensor].spec.nbytes for part in bucket.slices]
        assert len(sizes) == 1 or max(sizes) < size
    left_open = Counter(bucket.dtype for bucket in buckets if bucket.nbytes < size)
    for dtype, count in left_open.items():
        large = sum(layer.spec.nbytes >= size for layer in layers if layer.spec.dtype == dtype)
        assert count <= 1 + large  # one at the end, and one before each large tensor


@given(LAYERS)
def test_the_two_ends_of_the_scale(layers: tuple[Layer, ...]) -> None:
    assert len(WaitFree().buckets(layers)) == len(layers)
    assert len(Fifo().buckets(layers)) == len({layer.spec.dtype for layer in layers})


def test_what_the_engine_reads() -> None:
    assert (Fifo().release, Fifo().in_flight) == ("backward_end", 1)
    assert WaitFree().release == Fixed().release == "ready"
    for entry in registry.entries("schedules"):
        schedule: Schedule = entry.target()
        assert schedule.phases in ("whole", "split")
        assert schedule.apply in ("step", "layer", "next_step")
        assert schedule.in_flight >= 1


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="wait_free"):
        Fixed(Size(0))
