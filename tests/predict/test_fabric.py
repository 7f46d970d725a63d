"""Messages that share ports: fair rates, plans message by message, and the quick model beside them."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_by_one import PlanRuns, simulate_one_by_one
from syncline.costs.clock import Clock
from syncline.costs.cluster import Cluster
from syncline.costs.plans import ProcessPlacement
from syncline.engine.step import BucketPhase, Submit
from syncline.nouns import Group, Spec
from syncline.strategy.strategy import Strategy
from syncline_bench.predict.fabric import Fabric, max_min_rates, shared_s
from syncline_bench.predict.iterations import simulate
from syncline_bench.predict.networks import inline
from syncline_bench.predict.settings import Habits, setting_of, traced
from syncline_bench.workloads import Trace
from syncline_bench.workloads._trace import TracedLayer

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


ALPHA, BETA, GAMMA = 5e-5, 1e-9, 5e-10
NETWORK = inline(f"between.alpha={ALPHA}s,between.beta={BETA}s,gamma={GAMMA}s")
SIZES = (1e3, 1e7)


def seconds(text: str, workers: int, nbytes: float, cluster: Cluster = NETWORK, operations: int = 1) -> list[float]:
    """When operations are done that begin together."""
    strategy = Strategy.parse(text)
    group = Group(workers, strategy.servers)
    plan, clock, ends = strategy.plan(group), Clock(), [0.0] * operations
    runs = PlanRuns(clock, cluster, ProcessPlacement(group), lambda _: plan, lambda _: nbytes)

    def over(number: int) -> None:
        ends[number] = clock.now_s

    for number in range(operations):
        runs(Submit(BucketPhase(0, number, "allreduce"), 0.0), number, partial(over, number))
    clock.run()
    return ends


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("workers", [2, 3, 8, 16])
def test_a_ring_and_direct_take_what_their_formula_says(workers: int, nbytes: float) -> None:
    share = (workers - 1) / workers * nbytes
    expected = 2 * (workers - 1) * ALPHA + 2 * share * BETA + share * GAMMA
    for text in ("ring", "direct"):
        assert seconds(text, workers, nbytes) == [pytest.approx(expected)]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("workers", [2, 4, 32])
def test_algorithms_in_logarithmic_steps_take_what_their_formulas_say(workers: int, nbytes: float) -> None:
    steps, share = math.log2(workers), (workers - 1) / workers * nbytes
    doubling = steps * (ALPHA + nbytes * (BETA + GAMMA))
    halving = 2 * steps * ALPHA + 2 * share * BETA + share * GAMMA
    assert seconds("recursive_doubling", workers, nbytes) == [pytest.approx(doubling)]
    assert seconds("halving_doubling", workers, nbytes) == [pytest.approx(halving)]


def test_what_began_first_goes_first_and_its_adding_passes_beside_the_next_ones_messages() -> None:
    one = seconds("ring", 2, 1e7)[0]
    first, second = seconds("ring", 2, 1e7, operations=2)
    messages_s = 2 * (ALPHA + 0.5e7 * BETA)
    assert first <= one + messages_s / 2 * (1 + 1e-9)
    assert 2 * messages_s <= second < 2 * one


@given(st.integers(2, 9), st.floats(0, 1e8), st.sampled_from(["ring", "direct", "tree", "recursive_doubling"]))
@settings(max_examples=40)
def test_no_plan_beats_the_lower_bounds_and_ports_send_what_the_plan_says(
    workers: int, nbytes: float, text: str
) -> None:
    found = seconds(text, workers, nbytes)[0]
    assert found >= math.ceil(math.log2(workers)) * ALPHA * (1 - 1e-9)
    assert found >= 2 * (workers - 1) / workers * nbytes * BETA * (1 - 1e-9)
    assert seconds(text, workers, nbytes) == [found]


def test_messages_share_a_port_fairly_and_urgent_ones_interrupt() -> None:
    clock, ends = Clock(), dict.fromkeys("abc", 0.0)
    fabric = Fabric(clock, inline("between.alpha=0s,between.beta=1s"), ProcessPlacement(Group(3)))

    def over(name: str) -> None:
        ends[name] = clock.now_s

    fabric.send(0, 1, 2.0, (1.0, 0, 0), partial(over, "a"))
    fabric.send(0, 2, 1.0, (1.0, 0, 0), partial(over, "b"))
    clock.at(1.0, partial(fabric.send, 0, 2, 1.0, (0.0, 0, 0), partial(over, "c")))
    clock.run()
    # Half of a port each to 1, then the urgent one alone to 2, and both again.
    assert ends == pytest.approx({"a": 4.0, "b": 3.0, "c": 2.0})
    assert fabric.sent_s == pytest.approx([4.0, 0.0, 0.0])


def test_an_oversubscribed_link_is_shared_by_all_that_cross_it() -> None:
    tree = ",topology=fat_tree(hosts_per_leaf=2, oversubscription=2)"
    thin = inline(f"between.alpha=0s,between.beta={BETA}s{tree}")
    wide = inline(f"between.alpha=0s,between.beta={BETA}s")
    assert seconds("halving_doubling", 4, 1e7, thin)[0] > 1.2 * seconds("halving_doubling", 4, 1e7, wide)[0]


MODEL = traced(
    "test",
    Trace(
        "test",
        tuple(TracedLayer(f"layer {n}", (Spec("weight", (250_000 + 10_000 * n,)),), 2e-3, 4e-3) for n in range(8)),
    ),
    1,
)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("ring schedule=wait_free", 32),
        ("ring schedule=priority", 8),
        *(("direct schedule=split", workers) for workers in (2, 8)),  # of the square of them that many messages
    ],
)
def test_iterations_of_the_quick_model_are_within_two_percent_of_those_message_by_message(
    text: str, workers: int
) -> None:
    setting = setting_of(Strategy.parse(text), NETWORK, workers)
    habits = Habits(tickets=False)
    quick, exact = (of(setting, MODEL, habits).iteration_s for of in (simulate, simulate_one_by_one))
    assert quick == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("workers", range(3, 9))
@pytest.mark.parametrize("text", ["tree", "double_tree", "recursive_doubling", "halving_doubling"])
def test_ports_that_a_step_leaves_alone_serve_other_exchanges(text: str, workers: int) -> None:
    setting = setting_of(Strategy.parse(f"{text} schedule=wait_free"), NETWORK, workers)
    habits = Habits(tickets=False)
    quick, exact = (of(setting, MODEL, habits).iteration_s for of in (simulate, simulate_one_by_one))
    assert quick == pytest.approx(exact, rel=0.08)
