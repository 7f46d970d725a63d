"""Fair shares of links: max-min fairness, and exchanges that begin together on one link."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline_bench.predict.sharing import max_min_rates, shared_s

FLOWS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), min_size=1, max_size=6)
CAPACITIES = st.lists(st.floats(0.1, 10), min_size=5, max_size=5)


@given(FLOWS, CAPACITIES)
def test_every_flow_has_a_full_link_on_which_none_gets_more(flows, capacities):
    rates = max_min_rates(flows, dict(enumerate(capacities)))
    load = [sum(rate for rate, links in zip(rates, flows, strict=True) if link in links) for link in range(5)]
    for link, capacity in enumerate(capacities):
        assert load[link] <= capacity * (1 + 1e-9)
    for rate, links in zip(rates, flows, strict=True):
        assert any(
            load[link] >= capacities[link] * (1 - 1e-9)
            and all(rate >= other * (1 - 1e-9) for other, used in zip(rates, flows, strict=True) if link in used)
            for link in links
        )


def test_a_flow_through_no_link_is_not_held_up():
    assert max_min_rates([[], ["a"]], {"a": 2.0}) == [float("inf"), 2.0]


@given(st.integers(1, 20), st.floats(0.01, 10))
def test_equal_exchanges_take_as_many_times_as_long(count, alone):
    assert shared_s([alone] * count) == pytest.approx([count * alone] * count)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6))
def test_exchanges_end_as_the_fair_rates_say(alone):
    """Let time pass from end to end, each exchange at the rate that it gets among those that are left."""
    left, ends, now = dict(enumerate(alone)), {}, 0.0
    while left:
        rates = dict(zip(left, max_min_rates([["link"]] * len(left), {"link": 1.0}), strict=True))
        step = min(rest / rates[which] for which, rest in left.items())
        now += step
        left = {which: rest - step * rates[which] for which, rest in left.items()}
        for which in [which for which, rest in left.items() if rest <= 1e-12]:
            ends[which] = now
            del left[which]
    assert shared_s(alone) == pytest.approx([ends[which] for which in range(len(alone))])
