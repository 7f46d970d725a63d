"""Times of plans: the formulas of the field, lower bounds, what is shared, late ranks, and what may not happen."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from bounds import lower_bound_s
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import registry
from syncline.costs.virtual import Clock
from syncline.engine.step import BucketPhase, Submit
from syncline.nouns import Group
from syncline.plans.plan import Plan
from syncline_bench.predict.closed import Size, closed_s
from syncline_bench.predict.loads import Placement
from syncline_bench.predict.messages import PlanRuns
from syncline_bench.predict.networks import load_network
from syncline_bench.predict.plan_times import plan_time

ANY = load_network("alpha=45us,beta=1ns,gamma=2.5ns")
FLYING = load_network("alpha=45us,beta=1ns,gamma=2.5ns,flight=20us")
FOUR = load_network("alpha=45us,beta=1ns,gamma=0.5ns,inside.alpha=5us,inside.beta=0.1ns,per_host=4")

ALLREDUCE = ("ring", "direct", "recursive_doubling", "halving_doubling", "tree", "double_tree")
HALVES = ("reduce_scatter", "all_gather", "direct_reduce_scatter", "direct_all_gather", "broadcast")
ONE_AT_A_TIME = ("ring", "recursive_doubling", "halving_doubling", "tree", "reduce_scatter", "all_gather", "broadcast")
"""Those in which no port has several messages in a step, but for ranks beside a power of two."""


def hosts_of(workers: int, servers: int = 0, per_host: int = 1) -> np.ndarray:
    return Placement(Group(workers, servers), per_host).hosts


@functools.cache
def plan_of(name: str, workers: int, per_host: int = 1, **options: object) -> Plan:
    nodes = tuple(hosts_of(workers, 0, per_host).tolist())
    servers = options.get("servers", 0) if options.get("on") != "workers" else 0
    plan: Plan = registry.get("algorithms", name).target(Group(workers, servers, nodes), **options)
    return plan


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 8, 16, 31, 64, 512])
@pytest.mark.parametrize("name", [*(name for name in ALLREDUCE if name != "double_tree"), *HALVES])
def test_plans_take_what_the_formulas_say(name, workers):
    for nbytes in (1e3, 1e8):
        whole_s = plan_time(plan_of(name, workers), nbytes, ANY).whole_s
        assert whole_s == pytest.approx(closed_s(name, nbytes, Size(workers), ANY), rel=1e-2, abs=1e-12)
        flying_s = plan_time(plan_of(name, workers), nbytes, FLYING).whole_s
        formula_s = closed_s(name, nbytes, Size(workers), FLYING)
        # Of other numbers of ranks some have less before them, and flights pass beside those of others.
        assert whole_s <= flying_s <= formula_s * (1 + 1e-9)
        if workers & (workers - 1) == 0:
            assert flying_s == pytest.approx(formula_s, rel=1e-2)


@pytest.mark.parametrize("piece", ["from_1000", "from_100000"])
def test_pieces_of_links_count_by_the_size_of_messages(piece):
    cluster = load_network(f"alpha=10us,beta=1ns,between.{piece}.alpha=40us,between.{piece}.beta=2ns")
    for nbytes in (5e3, 2e5, 1e7):
        for name in ("ring", "halving_doubling", "tree"):
            whole_s = plan_time(plan_of(name, 16), nbytes, cluster).whole_s
            assert whole_s == pytest.approx(closed_s(name, nbytes, Size(16), cluster))


@pytest.mark.parametrize("servers", [1, 2, 8])
@pytest.mark.parametrize("workers", [2, 8, 64])
def test_servers_of_their_own(workers, servers):
    if servers > 1 and workers % servers:
        return
    cluster = load_network("alpha=45us,beta=1ns")
    plan = plan_of("ps", workers, servers=servers)
    whole_s = plan_time(plan, 1e7, cluster, hosts_of(workers, servers)).whole_s
    assert whole_s == pytest.approx(closed_s("ps", 1e7, Size(workers, servers=servers), cluster), rel=1e-2)


@pytest.mark.parametrize("ports", [1, 4])
@pytest.mark.parametrize("hosts", [2, 3, 16, 128])
def test_two_levels_with_a_port_for_each_rank_and_with_one(hosts, ports):
    cluster = load_network(f"{FOUR.name},ports_per_host={ports}")
    plan = plan_of("hierarchical", 4 * hosts, 4)
    for nbytes in (1e4, 1e8):
        whole_s = plan_time(plan, nbytes, cluster, hosts_of(4 * hosts, 0, 4)).whole_s
        formula_s = closed_s("hierarchical", nbytes, Size(4 * hosts, 4), cluster)
        # Ranks that share a port do not add all at once: adding hides behind the others' messages.
        assert whole_s == pytest.approx(formula_s, rel=1e-2 if ports == 4 else 0.1)
        assert whole_s <= formula_s * (1 + 1e-9)


def test_a_ring_of_several_ranks_on_a_host_goes_at_the_pace_of_the_links_between():
    whole_s = plan_time(plan_of("ring", 32, 4), 1e7, FOUR, hosts_of(32, 0, 4)).whole_s
    assert whole_s == pytest.approx(closed_s("ring", 1e7, Size(32, 4), FOUR), rel=1e-2)


@pytest.mark.parametrize("workers", [4, 8, 31, 64, 512])
def test_a_double_tree_in_many_pieces_moves_the_array_twice_and_in_one_waits_for_a_tree(workers):
    bytes_s = 1e8 * 1e-9
    many = plan_time(plan_of("double_tree", workers, pieces=128), 1e8, load_network("alpha=0us,beta=1ns"))
    lg = Size(workers).lg
    assert 2 * bytes_s * (workers - 1) / workers <= many.whole_s <= 1.1 * 2 * bytes_s * (1 + lg / 128)
    one = plan_time(plan_of("double_tree", workers), 1.0, load_network("alpha=1us,beta=0ns"))
    assert lg * 1e-6 <= one.whole_s <= 4 * lg * 1e-6


@pytest.mark.parametrize("name", [*ALLREDUCE, *HALVES])
def test_nothing_is_faster_than_the_lower_bounds(name):
    for cluster in (ANY, FLYING):
        for workers in (2, 3, 8, 31, 64, 256):
            plan = plan_of(name, workers)
            for nbytes in (1.0, 1e9):
                bound_s = lower_bound_s(plan.goal, nbytes, workers, cluster)
                assert plan_time(plan, nbytes, cluster).whole_s >= bound_s * (1 - 1e-9)


@pytest.mark.parametrize("name", ["ring", "direct", "recursive_doubling", "halving_doubling", "tree", "double_tree"])
@pytest.mark.parametrize("workers", [8, 16, 32])
def test_clocks_agree_with_messages_one_by_one(name, workers):
    """They differ where a rank adds for long while others send to it: here, as in the formulas, receiving waits."""
    plan, nbytes, cluster = plan_of(name, workers), 1e7, load_network("alpha=50us,beta=1ns,gamma=0.5ns")
    clock, ends_s = Clock(), []
    runs = PlanRuns(clock, cluster, Placement(Group(workers)), lambda _: plan, lambda _: nbytes)
    runs(Submit(BucketPhase(0, 0, "allreduce"), 0.0), 0, lambda: ends_s.append(clock.now_s))
    clock.run()
    assert plan_time(plan, nbytes, cluster).whole_s == pytest.approx(ends_s[0], rel=0.02)


RANKS = st.integers(1, 24)
SECONDS = st.floats(0, 1e-3)


@settings(max_examples=40)
@given(
    st.sampled_from([*ALLREDUCE, *HALVES]), RANKS, st.floats(0, 1e8), st.data()
)  # fmt: skip
def test_no_port_and_no_rank_is_busy_for_longer_than_there_is_time(name, workers, nbytes, data):
    starts = np.array(data.draw(st.lists(SECONDS, min_size=workers, max_size=workers)))
    cluster = data.draw(st.sampled_from([ANY, FLYING]))
    plan = plan_of(name, workers)
    found = plan_time(plan, nbytes, cluster, None, starts)
    sizes = plan.count * (nbytes / plan.chunks)
    adding_s = cluster.gamma_s_per_byte * sizes * (plan.op == 0)
    for ends, seconds in ((plan.src, 0.0), (plan.dst, adding_s)):
        busy_s = np.bincount(ends, cluster.between.busy_s(sizes) + seconds, workers)
        assert (busy_s <= found.whole_s * (1 + 1e-9)).all()
    assert (found.ends_s >= starts).all()
    assert found.whole_s == found.ends_s.max()


@settings(max_examples=40)
@given(
    st.sampled_from(ONE_AT_A_TIME),
    st.sampled_from([2, 4, 8, 16]),
    st.sampled_from(["between.alpha", "between.beta", "between.flight", "gamma"]),
    st.floats(0, 1),
    st.floats(0, 1e7),
    st.data(),
)
def test_a_faster_network_is_not_slower(name, workers, constant, share, nbytes, data):
    """Where each port has its messages in one order; where they queue, who is first may change, and so may all."""
    starts = np.array(data.draw(st.lists(SECONDS, min_size=workers, max_size=workers)))
    faster = FLYING.replaced({constant: share * FLYING.constants[constant].value})
    slow, fast = (plan_time(plan_of(name, workers), nbytes, one, None, starts) for one in (FLYING, faster))
    assert (fast.ends_s <= slow.ends_s + 1e-9).all()


@given(st.sampled_from(ONE_AT_A_TIME), st.sampled_from([2, 4, 8]), st.floats(0, 1e7), st.data())
def test_late_ranks_hold_up_by_no_more_than_they_are_late(name, workers, nbytes, data):
    starts = np.array(data.draw(st.lists(SECONDS, min_size=workers, max_size=workers)))
    plan = plan_of(name, workers)
    on_time, late = (plan_time(plan, nbytes, ANY, None, one) for one in (np.zeros(workers), starts))
    assert (late.ends_s >= on_time.ends_s - 1e-9).all()
    assert late.whole_s <= on_time.whole_s + starts.max() + 1e-9


@pytest.mark.parametrize("name", ["ring", "direct", "recursive_doubling", "tree"])
def test_who_is_late_by_the_same_time_ends_later_by_that_time(name):
    plan = plan_of(name, 16)
    on_time, late = plan_time(plan, 1e6, ANY), plan_time(plan, 1e6, ANY, None, np.full(16, 0.5))
    np.testing.assert_allclose(late.ends_s, on_time.ends_s + 0.5)


@pytest.mark.parametrize(
    ("topology", "name", "factor"),
    [
        ("fat_tree(hosts_per_leaf=4, oversubscription=4)", "ring", 1),
        ("fat_tree(hosts_per_leaf=4, oversubscription=8)", "ring", 2),
        ("fat_tree(hosts_per_leaf=4, oversubscription=2)", "recursive_doubling", (2 * 1 + 2 * 2) / 4),
        ("ring", "ring", 1),
        ("ring", "recursive_doubling", (1 + 2 + 4 + 8) / 4),
        ("torus(dims=4x4)", "recursive_doubling", (1 + 2 + 1 + 2) / 4),
    ],
)
def test_messages_share_the_links_of_a_topology(topology, name, factor):
    """On 16 hosts; of a message only the bytes take longer."""
    shared, alone = (load_network(f"alpha=0us,beta=1ns,topology={one}") for one in (topology, "switch"))
    plan = plan_of(name, 16)
    times = [plan_time(plan, 1e6, cluster).whole_s for cluster in (shared, alone)]
    assert times[0] == pytest.approx(factor * times[1])


def test_cores_that_all_ranks_share_bound_the_whole():
    free = load_network("alpha=1us,beta=0.01ns,gamma=0.1ns,message=50us,byte_cpu=0.3ns")
    bound = load_network(f"{free.name},cores=2")
    plan, hosts = plan_of("ring", 8, 8), hosts_of(8, 0, 8)
    found, held = (plan_time(plan, 1e7, cluster, hosts) for cluster in (free, bound))
    sent = plan.bytes_sent(1e7).sum()
    expected_s = 2 * (len(plan) * 50e-6 + sent * 0.3e-9) + sent / 2 * 0.1e-9
    assert found.whole_s < expected_s / 2
    assert held.whole_s == pytest.approx(expected_s / 2)


def test_two_levels_of_many_ranks():
    plan, hosts = plan_of("hierarchical", 1024, 4), hosts_of(1024, 0, 4)
    whole_s = plan_time(plan, 1e9, FOUR, hosts).whole_s
    assert whole_s == pytest.approx(closed_s("hierarchical", 1e9, Size(1024, 4), FOUR), rel=0.1)
