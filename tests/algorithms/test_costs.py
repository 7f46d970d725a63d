"""Steps, messages and bytes of every algorithm against the closed formulas and the lower bounds of the field.

A rank has one full-duplex port. ``port`` sums over the steps what the busiest port of each step does: the number of
messages (the factor of a), the bytes as a share of the array (the factor of nb), and the bytes reduced (of ng).
"""

from __future__ import annotations

import numpy as np
import pytest

from syncline import registry
from syncline.nouns import Group
from syncline.plans.plan import REDUCE, Plan

POWERS = [2, 4, 8, 16, 32, 64]
OTHERS = [3, 5, 6, 7, 12, 31, 33, 63]
ALL = sorted(POWERS + OTHERS)


def lg(workers: int) -> int:
    return int(np.ceil(np.log2(workers)))


def floor_lg(workers: int) -> int:
    return int(np.floor(np.log2(workers)))


def make(name: str, group: Group | int, **options: object) -> Plan:
    group = Group(group) if isinstance(group, int) else group
    plan: Plan = registry.get("algorithms", name).target(group, **options)
    return plan


def port(plan: Plan) -> tuple[float, float, float]:
    messages = share = reduced = 0.0
    for step in np.unique(plan.step):
        now = plan.step == step
        adds = now & (plan.op == REDUCE)
        size = plan.count / plan.chunks
        messages += max(np.bincount(ranks[now]).max() for ranks in (plan.src, plan.dst))
        share += max(np.bincount(ranks[now], size[now]).max() for ranks in (plan.src, plan.dst))
        reduced += np.bincount(plan.dst[adds], size[adds]).max() if adds.any() else 0.0
    return messages, share, reduced


def ring_share(workers: int) -> float:
    return 2 * (workers - 1) / workers


ALLREDUCE = {
    "ring": (ALL, lambda n: (2 * (n - 1), ring_share(n), ring_share(n) / 2)),
    "direct": (ALL, lambda n: (2 * (n - 1), ring_share(n), ring_share(n) / 2)),
    "recursive_doubling": (POWERS, lambda n: (lg(n), lg(n), lg(n))),
    "halving_doubling": (POWERS, lambda n: (2 * lg(n), ring_share(n), ring_share(n) / 2)),
    "tree": (ALL, lambda n: (2 * lg(n), 2 * lg(n), lg(n))),
}

ALONE = {
    "reduce_scatter": lambda n: (n - 1, ring_share(n) / 2, ring_share(n) / 2),
    "direct_reduce_scatter": lambda n: (n - 1, ring_share(n) / 2, ring_share(n) / 2),
    "all_gather": lambda n: (n - 1, ring_share(n) / 2, 0),
    "direct_all_gather": lambda n: (n - 1, ring_share(n) / 2, 0),
    "broadcast": lambda n: (lg(n), lg(n), 0),
}


@pytest.mark.parametrize(
    ("name", "workers"), [(name, workers) for name, (sizes, _) in ALLREDUCE.items() for workers in sizes]
)
def test_allreduce(name, workers):
    assert port(make(name, workers)) == pytest.approx(ALLREDUCE[name][1](workers))


@pytest.mark.parametrize("workers", ALL)
@pytest.mark.parametrize("name", ALONE)
def test_collectives_alone(name, workers):
    assert port(make(name, workers)) == pytest.approx(ALONE[name](workers))


@pytest.mark.parametrize("workers", OTHERS)
def test_other_sizes_than_powers_of_two_cost_a_step_before_and_a_step_after(workers):
    core, steps = 1 << floor_lg(workers), floor_lg(workers)
    doubling, halving = make("recursive_doubling", workers), make("halving_doubling", workers)
    assert doubling.steps == steps + 2
    assert halving.steps == 2 * steps + 2
    assert port(doubling)[:2] == pytest.approx((steps + 2, steps + 2))
    assert port(halving)[:2] == pytest.approx((2 * steps + 2, ring_share(core) + 2))


@pytest.mark.parametrize("workers", ALL)
def test_steps(workers):
    assert make("ring", workers).steps == 2 * (workers - 1)
    assert make("reduce_scatter", workers).steps == make("all_gather", workers).steps == workers - 1
    assert make("direct", workers).steps == 2
    assert make("direct_reduce_scatter", workers).steps == make("direct_all_gather", workers).steps == 1
    assert make("tree", workers).steps == 2 * lg(workers)
    assert make("broadcast", workers).steps == lg(workers)


@pytest.mark.parametrize("name", ["ring", "direct"])
@pytest.mark.parametrize("workers", ALL)
def test_every_rank_carries_the_same(name, workers):
    plan = make(name, workers)
    for moved in (plan.bytes_sent(1e6), plan.bytes_received(1e6)):
        np.testing.assert_allclose(moved, 1e6 * ring_share(workers))


@pytest.mark.parametrize("workers", ALL)
def test_double_tree_has_twice_the_array_per_port_and_the_latency_of_a_tree(workers):
    single, many = make("double_tree", workers), make("double_tree", workers, pieces=128)
    for plan in (single, many):
        assert max(plan.bytes_sent(1.0).max(), plan.bytes_received(1.0).max()) <= 2
    assert single.steps <= 2 * lg(workers)
    assert many.steps == single.steps + 127
    assert port(many)[1] <= 1.1 * 2


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (2, 4), (3, 3), (4, 8), (8, 2), (5, 1), (1, 5)])
def test_two_levels(nodes, local):
    place = tuple(rank // local for rank in range(nodes * local))
    plan = make("hierarchical", Group(nodes * local, nodes=place))
    where = np.array(place)
    inside = where[plan.src] == where[plan.dst]
    assert plan.steps == 2 * (local - 1) + 2 * (nodes - 1)
    assert len(np.unique(plan.step[inside])) == 2 * (local - 1)
    assert len(np.unique(plan.step[~inside])) == 2 * (nodes - 1)
    for chosen, share in (
        (inside, ring_share(local)),
        (~inside, ring_share(nodes) / local),  # with a NIC per rank; the node's one NIC carries local times that
    ):
        sent = np.bincount(plan.src[chosen], plan.count[chosen], plan.world) / plan.chunks
        np.testing.assert_allclose(sent, share)


@pytest.mark.parametrize("servers", [1, 2, 3, 8, 12])
@pytest.mark.parametrize("workers", [2, 3, 8, 33])
def test_parameter_servers_of_their_own(workers, servers):
    plan = make("ps", Group(workers, servers), servers=servers)
    worker, server = np.ones(workers), np.full(servers, workers / servers)
    np.testing.assert_allclose(plan.bytes_sent(1.0), np.concatenate([worker, server]))
    np.testing.assert_allclose(plan.bytes_received(1.0), np.concatenate([worker, server]))
    assert plan.steps == 2
    # Pull follows push: twice what either takes.
    assert port(plan)[:2] == pytest.approx((2 * max(workers, servers), 2 * max(1, workers / servers)))


@pytest.mark.parametrize("workers", ALL)
def test_parameter_servers_on_all_workers_cost_what_direct_does(workers):
    plan = make("ps", workers, servers=workers, on="workers")
    assert port(plan) == pytest.approx(port(make("direct", workers)))
    np.testing.assert_allclose(plan.bytes_sent(1.0), ring_share(workers))


@pytest.mark.parametrize("workers", ALL)
def test_nothing_beats_the_lower_bounds(workers):
    least = {"allreduce": ring_share(workers), "broadcast": 1.0}
    for entry in registry.entries("algorithms"):
        if entry.name == "ps":
            plans = [make("ps", workers, servers=count, on="workers") for count in {1, 2, workers}]
        else:
            plans = [make(entry.name, workers)]
        for plan in plans:
            messages, share, _ = port(plan)
            assert messages >= lg(workers)
            assert share >= least.get(plan.goal, ring_share(workers) / 2) * (1 - 1e-12)
            if plan.goal == "allreduce":
                moved = plan.bytes_sent(1.0) + plan.bytes_received(1.0)
                assert moved.max() >= 2 * ring_share(workers) * (1 - 1e-12)
