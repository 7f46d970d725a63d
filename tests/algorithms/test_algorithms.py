"""Every registered algorithm is right for every group: proved on sets, and computed on numbers by other code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from syncline import registry
from syncline.errors import PlanError, UsageError
from syncline.nouns import Group
from syncline.plans.check import check, phases
from syncline.plans.plan import Plan

ENTRIES = registry.entries("algorithms")
NAMES = [entry.name for entry in ENTRIES]
SIZES = range(1, 65)


def node_shapes(workers: int) -> Iterator[tuple[int, ...]]:
    """Nodes of every worker: none given, one node, blocks, interleaved, one worker each, uneven in several ways."""
    yield ()
    yield (0,) * workers
    yield tuple(range(workers))
    for size in (2, 3, 8):
        yield tuple(rank // size for rank in range(workers))
        yield tuple(rank % size for rank in range(workers))
    yield tuple(int(rank.bit_length()) for rank in range(workers))
    yield tuple(7 - rank * rank % 5 for rank in range(workers))


def cases(name: str, workers: int) -> list[tuple[Group, dict[str, Any]]]:
    """Groups of so many workers, with options, that are worth trying for that algorithm."""
    if name == "ps":
        own = sorted({1, 2, 3, workers, workers + 3})
        shared = sorted({1, (workers + 1) // 2, workers})
        return [(Group(workers, count), {"servers": count}) for count in own] + [
            (Group(workers), {"servers": count, "on": "workers", "update": "worker"}) for count in shared
        ]
    plain = [(Group(workers), {}), (Group(workers, servers=2), {})]
    if name == "hierarchical":
        return [(Group(workers, nodes=nodes), {}) for nodes in node_shapes(workers)]
    if name == "double_tree":
        return [*plain, (Group(workers), {"pieces": 3})]
    if name == "broadcast":
        return plain + [(Group(workers), {"root": root}) for root in {workers // 2, workers - 1}]
    return plain


def plans(name: str, workers: int) -> Iterator[Plan]:
    for group, options in cases(name, workers):
        yield registry.get("algorithms", name).target(group, **options)


def start(plan: Plan, given: np.ndarray) -> list[list[np.ndarray | None]]:
    """The chunks of every rank at the start; None where a rank has none. ``given``: (world, chunks, elements)."""
    held: list[list[np.ndarray | None]] = []
    for rank in range(plan.world):
        has = [
            (rank in plan.members and plan.goal in ("allreduce", "reduce_scatter"))
            or (plan.goal == "all_gather" and plan.owners[chunk] == rank)
            or (plan.goal == "broadcast" and plan.root == rank)
            for chunk in range(plan.chunks)
        ]
        held.append([given[rank, chunk] if has[chunk] else None for chunk in range(plan.chunks)])
    return held


def execute(plan: Plan, given: np.ndarray) -> list[list[np.ndarray | None]]:
    """What every rank holds after the plan: the definition of its meaning, step by step on a copy of the state."""
    held = start(plan, given)
    for step in sorted({transfer.step for transfer in plan}):
        before = [list(chunks) for chunks in held]
        for transfer in plan:
            if transfer.step == step:
                for chunk in range(transfer.chunk, transfer.chunk + transfer.count):
                    come, mine = before[transfer.src][chunk], held[transfer.dst][chunk]
                    assert come is not None
                    add = transfer.op == "reduce" and mine is not None
                    held[transfer.dst][chunk] = mine + come if add else come
    return held


def expected(plan: Plan, given: np.ndarray, chunk: int) -> np.ndarray:
    if plan.goal in ("allreduce", "reduce_scatter"):
        return given[list(plan.members), chunk].sum(axis=0)
    return given[plan.owners[chunk] if plan.goal == "all_gather" else plan.root, chunk]


def test_all_promised_algorithms_are_there():
    goals = {entry.name: entry.capabilities["goal"] for entry in ENTRIES}
    trees_and_rings = ["ring", "recursive_doubling", "halving_doubling", "tree", "double_tree", "hierarchical"]
    for name in [*trees_and_rings, "direct", "ps"]:
        assert goals[name] == "allreduce"
    assert goals["reduce_scatter"] == goals["direct_reduce_scatter"] == "reduce_scatter"
    assert goals["all_gather"] == goals["direct_all_gather"] == "all_gather"
    assert goals["broadcast"] == "broadcast"
    assert all(entry.summary.endswith(".") for entry in ENTRIES)


@pytest.mark.parametrize("name", NAMES)
def test_proved_for_every_world_size(name):
    for workers in SIZES:
        for plan in plans(name, workers):
            check(plan)
            assert plan.goal == registry.get("algorithms", name).capabilities["goal"]
            assert plan.members == tuple(range(workers))


@pytest.mark.parametrize("name", NAMES)
def test_one_worker_has_nothing_to_send(name):
    assert all(len(plan) == 0 for plan in plans(name, 1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 7, 8, 12])
def test_numbers_come_out_right_and_replicas_equal_bit_for_bit(name, workers):
    for plan in plans(name, workers):
        rng = np.random.default_rng(workers)
        exact = rng.integers(-99, 99, (plan.world, plan.chunks, 3)).astype(np.float64)
        rounded = rng.standard_normal((plan.world, plan.chunks, 3)).astype(np.float32)
        held, replicas = execute(plan, exact), execute(plan, rounded)
        for chunk in range(plan.chunks):
            holders = [plan.owners[chunk]] if plan.goal == "reduce_scatter" else plan.members
            for rank in holders:
                np.testing.assert_array_equal(held[rank][chunk], expected(plan, exact, chunk))
                np.testing.assert_array_equal(replicas[rank][chunk], replicas[holders[0]][chunk])


@pytest.mark.parametrize("name", [entry.name for entry in ENTRIES if entry.capabilities["goal"] == "allreduce"])
@pytest.mark.parametrize("workers", [2, 3, 4, 6, 11, 16])
def test_halves_add_up_to_the_whole(name, workers):
    for plan in plans(name, workers):
        if name == "recursive_doubling":
            with pytest.raises(PlanError, match=r"complete at ranks 0-?.* together"):
                phases(plan)
            continue
        halves = phases(plan)
        assert sum(len(half) for half in halves) == len(plan)
        np.testing.assert_allclose(sum(half.bytes_sent(1.0) for half in halves), plan.bytes_sent(1.0))
        assert halves[0].owners == halves[1].owners
        if name == "ps" and plan.world > workers:
            assert set(halves[0].owners) == set(range(workers, plan.world))


@pytest.mark.parametrize(
    ("name", "group", "options", "reason"),
    [
        ("ps", Group(4), {"servers": 0}, "at least one server"),
        ("ps", Group(4), {"servers": 2}, "needs 2 server processes of their own, the group has 0"),
        ("ps", Group(4, 2), {"servers": 2, "on": "workers"}, "needs 0 server processes of their own"),
        ("ps", Group(4), {"servers": 5, "on": "workers"}, "ask for servers=4"),
        ("double_tree", Group(4), {"pieces": 0}, "at least one piece"),
        ("broadcast", Group(4), {"root": 4}, "root 4 is no worker"),
    ],
)
def test_options_that_make_no_sense_are_refused(name, group, options, reason):
    with pytest.raises(UsageError, match=reason):
        registry.get("algorithms", name).target(group, **options)


@pytest.mark.parametrize("name", ["direct", "direct_reduce_scatter", "direct_all_gather"])
def test_direct_messages_never_start_at_one_rank_together(name):
    plan = next(plans(name, 6))
    for step in range(plan.steps):
        sent = {rank: [item.dst for item in plan if item.step == step and item.src == rank] for rank in range(6)}
        for turn in range(5):
            assert {targets[turn] for targets in sent.values()} == set(range(6))


@pytest.mark.parametrize("nodes", [shape for shape in node_shapes(13) if len(set(shape)) > 1])
def test_every_part_crosses_the_network_once_per_node(nodes):
    plan = registry.get("algorithms", "hierarchical").target(Group(13, nodes=nodes))
    place, count = np.array(nodes), len(set(nodes))
    across = place[plan.src] != place[plan.dst]
    for node in set(nodes):
        sent = plan.count[across & (place[plan.src] == node)].sum() / plan.chunks
        assert sent == pytest.approx(2 * (count - 1) / count)


@pytest.mark.parametrize("nodes", [(), (0,) * 6, tuple(range(6))])
def test_one_level_is_a_ring(nodes):
    plan = registry.get("algorithms", "hierarchical").target(Group(6, nodes=nodes))
    ring = registry.get("algorithms", "ring").target(Group(6))
    assert plan.steps == ring.steps
    np.testing.assert_allclose(plan.bytes_sent(1.0), ring.bytes_sent(1.0))
