"""The cost of plans against the closed formulas of their algorithms, and the fit of a network to times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import registry
from syncline.costs.network import Network, fit_ring, plan_s
from syncline.nouns import Group
from syncline.plans.plan import Plan

Cost = tuple[float, float, float]
"""Factors of a, nb and ng."""


def make(name: str, workers: int) -> Plan:
    plan: Plan = registry.get("algorithms", name).target(Group(workers))
    return plan


def share(workers: int) -> float:
    return (workers - 1) / workers


def lg(workers: int) -> float:
    return math.log2(workers)


def around_a_ring(n: int) -> Cost:
    return 2 * (n - 1), 2 * share(n), share(n)


FORMULAS: dict[str, tuple[list[int], Callable[[int], Cost]]] = {
    "ring": ([2, 3, 4, 7, 16, 33], around_a_ring),
    "direct": ([2, 3, 4, 7, 16, 33], around_a_ring),
    "recursive_doubling": ([2, 4, 8, 64], lambda n: (lg(n), lg(n), lg(n))),
    "halving_doubling": ([2, 4, 8, 64], lambda n: (2 * lg(n), 2 * share(n), share(n))),
    "tree": ([2, 4, 8, 64], lambda n: (2 * lg(n), 2 * lg(n), lg(n))),
    "reduce_scatter": ([2, 3, 8], lambda n: (n - 1, share(n), share(n))),
    "all_gather": ([2, 3, 8], lambda n: (n - 1, share(n), 0)),
}
NETWORKS = [Network(1e-5, 1e-9, 3e-10), Network(1e-4, 0.0), Network(0.0, 1e-9), Network(0.0, 0.0, 1e-9)]


@pytest.mark.parametrize(("name", "workers"), [(name, n) for name, (sizes, _) in FORMULAS.items() for n in sizes])
def test_closed_formulas(name: str, workers: int) -> None:
    messages, moved, reduced = FORMULAS[name][1](workers)
    for network, nbytes in itertools.product(NETWORKS, [1, 1000, 60_970_000]):
        closed = messages * network.alpha_s + nbytes * (
            moved * network.beta_s_per_byte + reduced * network.gamma_s_per_byte
        )
        assert plan_s(make(name, workers), nbytes, network) == pytest.approx(closed), (network, nbytes)


@pytest.mark.parametrize("workers", [3, 5, 6, 12, 63])
def test_recursive_doubling_takes_a_step_before_and_one_after_between_powers_of_two(workers: int) -> None:
    steps = math.floor(lg(workers)) + 2
    network = Network(1e-5, 1e-9, 3e-10)
    # What comes back in the last step is copied: nothing is added there.
    expected = steps * (1e-5 + 1e-3) + (steps - 1) * 3e-4
    assert plan_s(make("recursive_doubling", workers), 1e6, network) == pytest.approx(expected)


WITHOUT_SERVERS = [entry for entry in registry.entries("algorithms") if entry.name != "ps"]


@pytest.mark.parametrize("entry", WITHOUT_SERVERS, ids=lambda entry: str(entry.name))
def test_no_plan_is_faster_than_its_bytes_and_more_bytes_take_longer(entry: registry.Entry) -> None:
    plan, network = entry.target(Group(6)), Network(1e-6, 1e-9, 1e-10)
    times = [plan_s(plan, nbytes, network) for nbytes in (0, 1_000, 1_000_000, 2_000_000)]
    assert times == sorted(times)
    busiest = max(plan.bytes_sent(1e6).max(), plan.bytes_received(1e6).max())
    assert plan_s(plan, 1e6, network) >= busiest * 1e-9
    # a + b n: each further byte costs the same.
    assert times[2] - times[0] == pytest.approx((times[3] - times[0]) / 2, rel=1e-6)


def test_a_plan_without_transfers_takes_no_time() -> None:
    assert plan_s(make("ring", 1), 1e6, NETWORKS[0]) == 0.0


seconds = st.floats(1e-7, 1e-2)


@settings(deadline=None)  # a plan of many ranks
@given(st.integers(2, 64), seconds, st.floats(1e-11, 1e-7), st.floats(0, 1e-8))
def test_the_fit_finds_the_network_that_the_times_come_from(workers: int, a: float, b: float, g: float) -> None:
    network = Network(a, b, g)
    gather, scatter = make("all_gather", workers), make("reduce_scatter", workers)
    small, large = ((size, plan_s(gather, size, network)) for size in (1024, 1 << 18))
    found = fit_ring(workers, small, large, (1 << 18, plan_s(scatter, 1 << 18, network)))
    rate = (workers - 1) * a / (share(workers) * (1 << 18))  # what rounding in the difference of times amounts to
    assert found.alpha_s == pytest.approx(a, rel=1e-6)
    assert found.beta_s_per_byte == pytest.approx(b, rel=1e-6, abs=1e-9 * rate)
    assert found.gamma_s_per_byte == pytest.approx(g, rel=1e-6, abs=1e-9 * (rate + b))


@given(st.lists(seconds, min_size=3, max_size=3))
def test_noise_never_gives_negative_costs(times: list[float]) -> None:
    found = fit_ring(4, (1024, times[0]), (16384, times[1]), (16384, times[2]))
    assert min(found.alpha_s, found.beta_s_per_byte, found.gamma_s_per_byte) >= 0
    assert found.alpha_s > 0
    assert np.isfinite([found.alpha_s, found.beta_s_per_byte, found.gamma_s_per_byte]).all()
