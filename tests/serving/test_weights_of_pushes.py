"""How much pushes by themselves count at an owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.serving.shares import Shares, shared_rate


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=65))
def test_shares_of_a_round_add_up_once_all_are_known(weights: list[float]) -> None:
    shares = Shares(len(weights))
    for worker, weight in enumerate(weights):
        shares.of(worker, weight)
    found = [shares.of(worker, weight) for worker, weight in enumerate(weights)]
    assert sum(found) == pytest.approx(len(weights))
    assert found[0] * weights[-1] == pytest.approx(found[-1] * weights[0])


@pytest.mark.parametrize("weight", [1.0, 3.0, 256.0])
@pytest.mark.parametrize("workers", [1, 2, 3, 65])
def test_equal_workers_count_alike_from_the_first_push_on(workers: int, weight: float) -> None:
    shares = Shares(workers)
    assert [shares.of(worker, weight) for worker in range(workers)] == [1.0] * workers


def test_without_samples_a_push_counts_nothing() -> None:
    shares = Shares(2)
    assert shares.of(0, 0.0) == 0.0
    assert shares.of(1, 4.0) == 2.0


def test_an_optimizer_without_a_rate_is_named() -> None:
    with pytest.raises(UsageError, match=r"sync=asp .* group 1 has no number as 'lr': use asp\(rate=own\)"):
        shared_rate([{"lr": 1.0}, {}], 2, "asp")
