"""Slices: buckets no larger than asked, whatever the tensors are, and the first layers before the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.nouns import Layer, Size, Spec
from syncline.schedules.priority import Priority
from syncline.schedules.split import Split
from syncline.testing import check_schedule
from syncline.testing.schedules import LAWS

CASES = st.tuples(st.lists(st.integers(0, 60), max_size=20), st.integers(4, 400)) | st.tuples(
    st.lists(st.integers(0, 40_000), max_size=20), st.integers(16_000, 70_000)
)
"""Elements of tensors, and bytes of a slice; large ones are cut where codecs with blocks allow it."""


@pytest.mark.parametrize("text", ["priority(slice=1MiB)", "split(slice=1MiB)"])
def test_smaller_slices_keep_all_laws(text: str) -> None:
    assert check_schedule(text) == LAWS.names


@given(CASES, st.sampled_from([Priority, Split]))
def test_no_bucket_is_larger_than_asked(case: tuple[list[int], int], kind: type[Priority] | type[Split]) -> None:
    sizes, size = case[0], Size(case[1])
    layers = [Layer(Spec(f"w{index}", (elements,))) for index, elements in enumerate(sizes)]
    schedule = kind(size)
    buckets = schedule.buckets(layers)
    for bucket in buckets:
        assert bucket.nbytes <= size
        # What is cut travels in pieces of its own, so that no other tensor waits for them.
        assert len(bucket.slices) == 1 or all(
            (part.start, part.stop) == (0, sizes[part.tensor]) for part in bucket.slices
        )
    urgency = [schedule.priority(bucket) for bucket in buckets]
    assert urgency == sorted(urgency, reverse=True)  # backward completes the most urgent ones last
