"""How much pushes by themselves count at an owner, and with which values of the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.serving.owner import Shares, check_kept, looking_ahead, shared_rate

SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False}


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


@pytest.mark.parametrize("change", [{"momentum": 0.0}, {"dampening": 0.1}, {"nesterov": None}, {"momentum": None}])
def test_who_has_no_nesterov_cannot_look_ahead(change: dict[str, Any]) -> None:
    groups = [SGD, {key: value for key, value in (SGD | change).items() if value is not None}]
    with pytest.raises(
        UsageError, match=r"sync=asp\(momentum=dana\) looks ahead .* group 1 .* use asp\(momentum=own\)"
    ):
        looking_ahead(groups, "asp")
    assert looking_ahead([SGD], "asp") == [SGD | {"nesterov": True}]


def test_an_optimizer_that_keeps_nothing_has_nothing_for_each_worker() -> None:
    with pytest.raises(UsageError, match=r"sync=ssp\(momentum=own\) keeps .*, and Plain, as it is set, learns nothing"):
        check_kept("own", "ssp", "Plain", keeps=False)
    check_kept("shared", "ssp", "Plain", keeps=False)
    check_kept("own", "ssp", "Heavy", keeps=True)
