"""Every registered algorithm keeps the laws of its kind (``testing.algorithms``), and what is particular to some."""

from __future__ import annotations

import numpy as np
import pytest

from syncline import registry
from syncline.errors import PlanError, UsageError
from syncline.nouns import Group
from syncline.plans.check import phases
from syncline.testing import check_algorithm
from syncline.testing.algorithms import node_shapes

ENTRIES = registry.entries("algorithms")
TEXTS = [
    *(entry.name for entry in ENTRIES),
    "double_tree(pieces=3)",
    "ps(servers=2)",
    "ps(servers=3)",
    "ps(servers=3, local=on)",
    "hierarchical(inside=native)",
]


def test_all_promised_algorithms_are_there():
    goals = {entry.name: entry.capabilities["goal"] for entry in ENTRIES}
    trees_and_rings = ["ring", "recursive_doubling", "halving_doubling", "tree", "double_tree", "hierarchical"]
    for name in [*trees_and_rings, "direct", "ps"]:
        assert goals[name] == "allreduce"
    assert goals["reduce_scatter"] == goals["direct_reduce_scatter"] == "reduce_scatter"
    assert goals["all_gather"] == goals["direct_all_gather"] == "all_gather"
    assert goals["broadcast"] == "broadcast"
    assert all(entry.summary.endswith(".") for entry in ENTRIES)


NUMBERS = (*range(1, 14), 16, 17)
OTHERS = (14, 15, *range(18, 65))
"""Of workers; the laws take a time that grows with the square of their number, so the others are tried in time."""


def test_the_numbers_of_workers_are_1_to_64():
    assert sorted(NUMBERS + OTHERS) == list(range(1, 65))


@pytest.mark.deep
@pytest.mark.parametrize("text", TEXTS)
def test_every_algorithm_is_proved_for_the_other_numbers(text):
    numbers = OTHERS[::3] if "(" in text else OTHERS  # with arguments of their own, a third of them
    assert "every plan is proved" in check_algorithm(text, workers=numbers)


@pytest.mark.parametrize("text", TEXTS)
def test_every_algorithm_keeps_all_laws(text):
    held = check_algorithm(text, workers=NUMBERS)
    assert "every plan is proved" in held
    # All but one have halves, since all ranks complete a chunk together there.
    goal = registry.get("algorithms", text.partition("(")[0]).capabilities["goal"]
    splits = goal == "allreduce" and text != "recursive_doubling"
    assert ("halves add up to the whole" in held) == splits


@pytest.mark.parametrize(
    "numbers", [pytest.param(NUMBERS, id="some"), pytest.param(OTHERS[::3], id="others", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("on", ["ranks", "workers"])
def test_parameter_servers_of_every_number(on, numbers):
    """As many as there are workers, half of them, and more where they are processes of their own."""
    update = "server" if on == "ranks" else "worker"
    for workers in numbers:
        for servers in {1, (workers + 1) // 2, workers} if on == "workers" else {workers, workers + 3}:
            check_algorithm(f"ps(servers={servers}, on={on}, update={update})", workers=[workers])


@pytest.mark.parametrize("on", ["ranks", "workers"])
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 1, 2, 2, 2), (3, 1, 3, 1, 3)], ids=str)
def test_hosts_push_and_pull_once(nodes: tuple[int, ...], on: str) -> None:
    """Between hosts go the parts of servers elsewhere, once each way for every host, whatever its number of workers."""
    servers = 2
    plan = registry.get("algorithms", "ps").target(
        Group(len(nodes), servers if on == "ranks" else 0, nodes), servers=servers, on=on, local=True
    )
    places = (*nodes, "a", "b") if on == "ranks" else nodes
    across = [transfer for transfer in plan if places[transfer.src] != places[transfer.dst]]
    hosts = len(set(nodes))
    elsewhere = hosts * servers if on == "ranks" else hosts * servers - servers
    for op in ("reduce", "copy"):
        assert sum(one.count for one in across if one.op == op) == elsewhere * plan.chunks // servers


def test_what_all_ranks_complete_together_has_no_halves():
    for workers in (2, 3, 6, 16):
        with pytest.raises(PlanError, match=r"complete at ranks 0-?.* together"):
            phases(registry.get("algorithms", "recursive_doubling").target(Group(workers)))


@pytest.mark.parametrize(
    ("name", "group", "options", "reason"),
    [
        ("ps", Group(4), {"servers": 0}, "at least one server"),
        ("ps", Group(4), {"servers": 2}, "needs 2 server processes of their own, but the group has 0"),
        ("ps", Group(4, 2), {"servers": 2, "on": "workers"}, "needs 0 server processes of their own"),
        ("ps", Group(4), {"servers": 5, "on": "workers"}, "use servers=4"),
        ("double_tree", Group(4), {"pieces": 0}, "at least one piece"),
        ("broadcast", Group(4), {"root": 4}, "root 4 is not a worker"),
    ],
)
def test_options_that_make_no_sense_are_refused(name, group, options, reason):
    with pytest.raises(UsageError, match=reason):
        registry.get("algorithms", name).target(group, **options)


@pytest.mark.parametrize("name", ["direct", "direct_reduce_scatter", "direct_all_gather"])
def test_direct_messages_never_start_at_one_rank_together(name):
    plan = registry.get("algorithms", name).target(Group(6))
    for step in range(plan.steps):
        sent = {rank: [item.dst for item in plan if item.step == step and item.src == rank] for rank in range(6)}
        for turn in range(5):
            assert {targets[turn] for targets in sent.values()} == set(range(6))


@pytest.mark.parametrize("inside", ["ring", "native"])
def test_every_part_crosses_the_network_once_per_node(inside):
    for nodes in node_shapes(13):
        if len(set(nodes)) > 1:
            plan = registry.get("algorithms", "hierarchical").target(Group(13, nodes=nodes), inside=inside)
            place, count = np.array(nodes), len(set(nodes))
            across = place[plan.src] != place[plan.dst]
            for node in set(nodes):
                sent = plan.count[across & (place[plan.src] == node)].sum() / plan.chunks
                assert sent == pytest.approx(2 * (count - 1) / count), nodes


def test_a_message_library_sums_inside_nodes_of_several_workers():
    for nodes in node_shapes(13):
        group = Group(13, nodes=nodes)
        plan = registry.get("algorithms", "hierarchical").target(group, inside="native")
        assert plan.native == tuple(ranks for ranks in group.members_by_node() if len(ranks) > 1)
        place = np.array(nodes or (0,) * 13)
        np.testing.assert_array_equal(plan.natively, place[plan.src] == place[plan.dst])


@pytest.mark.parametrize("nodes", [(), (0,) * 6, tuple(range(6))])
def test_one_level_is_a_ring(nodes):
    plan = registry.get("algorithms", "hierarchical").target(Group(6, nodes=nodes))
    ring = registry.get("algorithms", "ring").target(Group(6))
    assert plan.steps == ring.steps
    np.testing.assert_allclose(plan.bytes_sent(1.0), ring.bytes_sent(1.0))
