"""The order of an epoch, and fair shares of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.sampling import MOST_SAMPLES, MOST_SEED, SampleOrder


@given(st.integers(1, 60), st.integers(0, 9), st.integers(0, 9))
def test_an_epoch_is_a_permutation_of_its_own(samples: int, seed: int, epoch: int) -> None:
    order = SampleOrder(samples, seed=seed)
    assert sorted(order.indices(epoch)) == list(range(samples))
    np.testing.assert_array_equal(order.indices(epoch), SampleOrder(samples, 4, seed).indices(epoch))
    np.testing.assert_array_equal(SampleOrder(samples, shuffle=False).indices(epoch), np.arange(samples))
    long = SampleOrder(1000, seed=seed)
    assert (long.indices(epoch) != long.indices(epoch + 1)).any()
    assert (long.indices(epoch) != SampleOrder(1000, seed=seed + 1).indices(epoch)).any()


@given(st.integers(1, 60), st.integers(1, 70))
def test_shares_are_those_of_the_distributed_sampler(samples: int, world: int) -> None:
    from torch.utils.data import DistributedSampler

    order = SampleOrder(samples, shuffle=False)
    for rank in range(world):
        theirs = DistributedSampler(range(samples), world, rank, shuffle=False)  # type: ignore[arg-type,var-annotated]
        assert order.positions(rank, world).tolist() == list(theirs)


@given(st.integers(1, 10**9), st.integers(1, 1000))
def test_a_piece_is_a_batch_or_a_small_part_of_a_share(samples: int, workers: int) -> None:
    assert SampleOrder(samples, 7).piece(workers) == 7
    assert 1 <= SampleOrder(samples).piece(workers) <= max(1, samples // workers / 64)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"samples": 0}, "the data set's length must be a number from 1"),
        ({"samples": MOST_SAMPLES + 1}, "the data set's length must be a number from 1"),
        ({"batch_size": 0}, "batch_size must be a number from 1"),
        ({"batch_size": -1}, "batch_size must be a number from 1"),
        ({"batch_size": 2.0}, "batch_size must be a whole number, got 2.0"),
        ({"batch_size": True}, "batch_size must be a whole number, got True"),
        ({"seed": -1}, "seed must be a number from 0"),
        ({"seed": MOST_SEED + 1}, "seed must be a number from 0"),
        ({"seed": "zero"}, "seed must be a whole number"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SampleOrder(**{"samples": 10, **values})  # type: ignore[arg-type]
