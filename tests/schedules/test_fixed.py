"""Buckets of one size, of one tensor, of everything: the laws of schedules, and buckets no larger than asked."""

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
from syncline.testing import check_schedule
from syncline.testing.schedules import LAWS

LAYERS = st.lists(
    st.builds(
        lambda size, dtype: Layer(Spec("w", (size,), dtype)),
        st.integers(0, 60),
        st.sampled_from(["float32", "float16", "bfloat16"]),
    ),
    max_size=30,
).map(tuple)
SCHEDULES = st.one_of(st.just(Fifo()), st.just(WaitFree()), st.builds(Fixed, st.integers(1, 400).map(Size)))
TEXTS = [*registry.names("schedules"), "fixed(bucket=1B)", "fixed(bucket=400B)", "fixed(bucket=1MiB)"]


@pytest.mark.parametrize("text", TEXTS)
def test_every_schedule_keeps_all_laws(text: str) -> None:
    assert check_schedule(text, examples=20) == LAWS.names


@given(LAYERS, SCHEDULES)
def test_inside_a_bucket_tensors_are_whole_and_lie_as_backward_produces_them(
    layers: tuple[Layer, ...], schedule: Schedule
) -> None:
    for bucket in schedule.buckets(layers):
        tensors = [part.tensor for part in bucket.slices]
        assert tensors == sorted(tensors, reverse=True)
        for part in bucket.slices:
            assert (part.start, part.stop) == (0, layers[part.tensor].spec.elements)


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


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="wait_free"):
        Fixed(Size(0))
