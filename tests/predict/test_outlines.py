"""Outlines of plans and messages: what they say is what all messages say one by one, whatever the constants are."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.compression.reducers import Flows
from syncline.nouns import Group
from syncline.plans.plan import Plan
from syncline.strategy.strategy import Strategy
from syncline_bench.predict.cluster import Cluster
from syncline_bench.predict.loads import Load, Placement, Shape, flows_outline, plan_load, plan_outline
from syncline_bench.predict.networks import inline
from syncline_bench.predict.topology import route

LINKS = (
    "between.alpha=50us,between.beta=1ns,between.flight=3us,between.from_4096.alpha=90us,between.from_4096.beta=0.5ns"
)
INSIDE = "inside.alpha=2us,inside.beta=0.1ns,inside.flight=7us,inside.from_1000.alpha=1us,inside.from_1000.beta=0.2ns"
SHAPES = (
    "ports_per_host=1",
    f"{INSIDE},ports_per_host=1",
    f"{INSIDE},ports_per_host=2",
    "topology=fat_tree(hosts_per_leaf=2, oversubscription=3)",
    "topology=ring",
)

Row = tuple[int, int, int, float]
"""Step, sender, receiver, bytes."""


def one_by_one(cluster: Cluster, placement: Placement, rows: list[Row]) -> tuple[float, float, float, float]:
    """Seconds of the busiest port, inside, of flights and of turns, as the head of the file under test says."""
    whole: dict[object, float] = defaultdict(float)
    port_s = inside_s = beside_s = flight_s = 0.0
    hosts = placement.hosts
    for step in sorted({row[0] for row in rows}):
        ports: dict[object, float] = defaultdict(float)
        inside: dict[object, float] = defaultdict(float)
        flights = [0.0]
        for _, src, dst, nbytes in (row for row in rows if row[0] == step):
            ends = int(hosts[src]), int(hosts[dst])
            if ends[0] == ends[1] and cluster.inside is not None:
                for end in (("out", src), ("in", dst)):
                    inside[end] += cluster.inside.busy_s(nbytes)
                flights.append(cluster.inside.flight_s)
                continue
            busy_s = cluster.between.busy_s(nbytes)
            for end in (("out", ends[0]), ("in", ends[1])):
                ports[end] += busy_s / cluster.ports_per_host
            ports["one", src, dst, nbytes] = max(ports["one", src, dst, nbytes], busy_s)
            for link in route(cluster.topology, *ends, placement.count) if ends[0] != ends[1] else ():
                ports["link", link] += cluster.between.bytes_s(nbytes) / cluster.topology.capacity(link)
            flights.append(cluster.between.flight_s)
        port_s += max(ports.values(), default=0.0)
        for port, seconds in ports.items():
            whole[port] = max(whole[port], seconds) if port[0] == "one" else whole[port] + seconds  # type: ignore[index]
        if ports and inside:  # at the same time
            beside_s += max(inside.values()) - max(ports.values())
        else:
            inside_s += max(inside.values(), default=0.0)
        flight_s += max(flights)
    busiest_s = max(whole.values(), default=0.0)
    return busiest_s, inside_s + max(0.0, beside_s), flight_s, port_s - busiest_s


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "text",
    ["ring", "halving_doubling", "recursive_doubling", "double_tree(pieces=3)", "direct", "hierarchical", "tree"],
)
def test_a_plans_outline_says_what_its_messages_say(shape: str, text: str) -> None:
    cluster, workers = inline(f"{LINKS},{shape}"), 6
    placement = Placement(Group(workers, 0, (0, 0, 1, 1, 2, 2)), 2)
    plan: Plan = Strategy.parse(text).plan(placement.group)
    for nbytes in (60.0, 30_000.0, 1e6):
        size = nbytes / plan.chunks
        rows = [(one.step, one.src, one.dst, one.count * size) for one in plan]
        found = plan_load(cluster, placement, plan, nbytes)
        assert (*found[:3], found.turns_s) == pytest.approx(one_by_one(cluster, placement, rows))
        assert found.sent_bytes == pytest.approx(sum(row[3] for row in rows) / workers)
        assert found == plan_outline(cluster, placement, plan).load(cluster, size)


messages = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 20_000)), min_size=1, max_size=30)


@given(messages, st.sampled_from(SHAPES), st.floats(0.1, 10), st.floats(0.1, 10))
@settings(max_examples=60)
def test_the_outline_of_messages_holds_for_other_constants(
    found: list[tuple[int, int, int]], shape: str, slower: float, thinner: float
) -> None:
    columns = np.array([row for row in found if row[0] != row[1]]).reshape(-1, 3)
    flows = Flows(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 2])
    placement, cluster = Placement(Group(6, 0, (0, 0, 1, 1, 2, 2)), 2), inline(f"{LINKS},{shape}")
    factors = {"between.alpha": slower, "between.beta": thinner}
    other = cluster.replaced({name: factor * cluster.constants[name].value for name, factor in factors.items()})
    for at in (cluster, other):
        load = flows_outline(Shape.of(at), placement, flows).load(at)
        if len(columns):
            rows = [(0, int(src), int(dst), float(nbytes)) for src, dst, nbytes in columns]
            assert (*load[:3], load.turns_s) == pytest.approx(one_by_one(at, placement, rows))
        else:
            assert load == Load()
