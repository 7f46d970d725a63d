"""How much pushes by themselves count at an owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.serving.shares import Shares, shared_rate


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=65))
def test_shares_of_a_round_add_up_to_one_once_all_are_known(weights: list[float]) -> None:
    shares = Shares(len(weights))
    for worker, weight in enumerate(weights):
        shares.of(worker, weight)
    found = [shares.of(worker, weight) for worker, weight in enumerate(weights)]
    assert sum(weight / total for weight, total in found) == pytest.approx(1)


@given(st.integers(1, 65), st.floats(0.1, 100))
def test_equal_workers_count_alike_from_the_first_push_on(workers: int, weight: float) -> None:
    shares = Shares(workers)
    for worker in range(workers):
        mine, total = shares.of(worker, weight)
        assert mine / total == pytest.approx(1 / workers)


def test_without_samples_a_push_counts_nothing() -> None:
    assert Shares(2).of(0, 0.0) == (0.0, 1.0)
    assert shared_rate([{"lr": 0.5, "momentum": 0.9}], 0.0, 1.0, "asp") == [{"lr": 0.0, "momentum": 0.9}]


def test_an_optimizer_without_a_rate_is_named() -> None:
    with pytest.raises(UsageError, match=r"sync=asp .* group 1 has no number as 'lr': use asp\(rate=own\)"):
        shared_rate([{"lr": 1.0}, {}], 1.0, 2.0, "asp")
