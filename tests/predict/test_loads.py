"""What plans and messages put on the busiest port, against the formulas of their algorithms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.compression.reducers import Flows
from syncline.nouns import Group
from syncline.plans.plan import Plan
from syncline.strategy.strategy import Strategy
from syncline_bench.predict.loads import Load, Placement, Shape, flows_outline, plan_load
from syncline_bench.predict.networks import inline

ALPHA, BETA = 5e-5, 1e-9
NETWORK = inline(f"between.alpha={ALPHA}s,between.beta={BETA}s,gamma=2e-9s")


def plan_of(text: str, workers: int, nodes: tuple[int, ...] = ()) -> Plan:
    strategy = Strategy.parse(text)
    return strategy.plan(Group(workers, strategy.servers, nodes))


@given(st.integers(2, 64), st.floats(0, 1e9))
def test_a_ring_keeps_each_port_busy_for_all_of_its_messages(workers: int, nbytes: float) -> None:
    found = plan_load(NETWORK, Placement(Group(workers)), plan_of("ring", workers), nbytes)
    share = (workers - 1) / workers * nbytes
    assert found.port_s == pytest.approx(2 * (workers - 1) * ALPHA + 2 * share * BETA)
    assert found.added_bytes == pytest.approx(share)
    assert found.moved_bytes == pytest.approx(4 * share)
    assert found.messages == 4 * (workers - 1)


@pytest.mark.parametrize(("text", "messages", "sizes"), [("recursive_doubling", 1, 1.0), ("halving_doubling", 2, 0.0)])
@pytest.mark.parametrize("workers", [2, 16, 64])
def test_algorithms_in_logarithmic_steps_take_what_their_formulas_say(
    text: str, messages: int, sizes: float, workers: int
) -> None:
    found = plan_load(NETWORK, Placement(Group(workers)), plan_of(text, workers), 1e8)
    steps = math.ceil(math.log2(workers))
    bytes_s = steps * sizes * 1e8 * BETA or 2 * (workers - 1) / workers * 1e8 * BETA
    assert found.port_s + found.turns_s == pytest.approx(messages * steps * ALPHA + bytes_s)


@pytest.mark.parametrize("servers", [1, 4])
def test_a_servers_port_takes_what_all_workers_push(servers: int) -> None:
    workers = 8
    plan = plan_of(f"ps(servers={servers}, update=worker)", workers)
    found = plan_load(NETWORK, Placement(Group(workers, servers)), plan, 1e8)
    # In, and then out: a port carries both at once, so that other exchanges pass meanwhile.
    assert found.port_s == found.turns_s == pytest.approx(workers * ALPHA + workers / servers * 1e8 * BETA)


def test_ranks_of_a_host_share_its_port_and_talk_inside_it_by_themselves() -> None:
    nodes = (0, 0, 1, 1)
    group = Group(4, 0, nodes)
    network = inline(f"between.alpha=0s,between.beta={BETA}s,inside.alpha=0s,inside.beta=1e-10s")
    flat = plan_load(network, Placement(group, 2), plan_of("direct", 4, nodes), 4e8)
    levels = plan_load(network, Placement(group, 2), plan_of("hierarchical", 4, nodes), 4e8)
    # Each rank has something for two ranks of the other host, of a quarter each, both ways round; on two levels a host
    # sends half of the array and takes over half of it.
    assert flat.port_s == pytest.approx(2 * 4e8 * BETA)
    assert levels.port_s == pytest.approx(4e8 * BETA)
    assert levels.inside_s > 0
    two_ports = inline(f"between.alpha=0s,between.beta={BETA}s,inside.alpha=0s,inside.beta=1e-10s,ports_per_host=2")
    assert plan_load(two_ports, Placement(group, 2), plan_of("direct", 4, nodes), 4e8).port_s == pytest.approx(
        flat.port_s / 2
    )


def test_an_oversubscribed_tree_makes_what_crosses_it_slower() -> None:
    text = f"between.alpha=0s,between.beta={BETA}s"
    plan, placement = plan_of("direct", 8), Placement(Group(8))
    whole = plan_load(inline(text), placement, plan, 8e8).port_s
    even = inline(text + ",topology=fat_tree(hosts_per_leaf=4, oversubscription=1)")
    thin = inline(text + ",topology=fat_tree(hosts_per_leaf=4, oversubscription=4)")
    assert plan_load(even, placement, plan, 8e8).port_s == pytest.approx(whole)
    # 4 x 4 of the 4 x 7 messages that leave a leaf's hosts go up one link as fast as a port.
    assert plan_load(thin, placement, plan, 8e8).port_s == pytest.approx(whole * 16 / 7)


def test_messages_at_the_same_time_last_as_long_as_the_busiest_port_and_nothing_takes_none() -> None:
    sizes = np.array([100, 300, 50])
    flows = Flows(np.array([0, 0, 1]), np.array([1, 2, 2]), sizes, sizes)
    found = flows_outline(Shape.of(NETWORK), Placement(Group(3)), flows).load(NETWORK)
    assert found.port_s == pytest.approx(2 * ALPHA + 400 * BETA)
    assert (found.moved_bytes, found.messages) == (400, 2)
    assert flows_outline(Shape.of(NETWORK), Placement(Group(3)), Flows(*(sizes[:0],) * 4)).load(NETWORK) == Load()
    assert plan_load(NETWORK, Placement(Group(1)), plan_of("ring", 1), 1e6) == Load()
