"""What plans cost, quick and exact: the formulas of the field, lower bounds, what is shared, late ranks."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bounds import lower_bound_s
from one_by_one import PlanRuns
from syncline import registry
from syncline.algorithms.hierarchical import hierarchical
from syncline.compression.reducers import Flows
from syncline.costs.clock import Clock
from syncline.costs.cluster import Cluster, route
from syncline.costs.plans import (
    ClusterShape,
    Load,
    ProcessPlacement,
    fit_ring,
    flows_outline,
    plan_load,
    plan_outline,
    plan_s,
    plan_time,
)
from syncline.engine.step import BucketPhase, Submit
from syncline.nouns import Group
from syncline.plans.check import phases
from syncline.plans.plan import Plan
from syncline.strategy.strategy import Strategy
from syncline_bench.predict.formulas import Size, closed_s
from syncline_bench.predict.networks import inline, load_network

Cost = tuple[float, float, float]
"""Factors of a, nb and ng."""


def network(alpha: float, beta: float, gamma: float = 0.0) -> Cluster:
    return inline(f"alpha={alpha!r}s,beta={beta!r}s,gamma={gamma!r}s")


def constants(cluster: Cluster) -> tuple[float, float]:
    return cluster.constants["between.alpha"].value, cluster.constants["between.beta"].value


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
NETWORKS = [network(1e-5, 1e-9, 3e-10), network(1e-4, 0.0), network(0.0, 1e-9), network(0.0, 0.0, 1e-9)]


@pytest.mark.parametrize(("name", "workers"), [(name, n) for name, (sizes, _) in FORMULAS.items() for n in sizes])
def test_closed_formulas(name: str, workers: int) -> None:
    messages, moved, reduced = FORMULAS[name][1](workers)
    for cluster, nbytes in itertools.product(NETWORKS, [1, 1000, 60_970_000]):
        alpha, beta = constants(cluster)
        closed = messages * alpha + nbytes * (moved * beta + reduced * cluster.gamma_s_per_byte)
        assert plan_s(make(name, workers), nbytes, cluster) == pytest.approx(closed), (cluster, nbytes)


@pytest.mark.parametrize("workers", [3, 5, 6, 12, 63])
def test_recursive_doubling_takes_a_step_before_and_one_after_between_powers_of_two(workers: int) -> None:
    steps = math.floor(lg(workers)) + 2
    # What comes back in the last step is copied: nothing is added there.
    expected = steps * (1e-5 + 1e-3) + (steps - 1) * 3e-4
    assert plan_s(make("recursive_doubling", workers), 1e6, NETWORKS[0]) == pytest.approx(expected)


WITHOUT_SERVERS = [entry for entry in registry.entries("algorithms") if entry.name != "ps"]


@pytest.mark.parametrize("entry", WITHOUT_SERVERS, ids=lambda entry: str(entry.name))
def test_no_plan_is_faster_than_its_bytes_and_more_bytes_take_longer(entry: registry.Entry) -> None:
    plan, cluster = entry.target(Group(6)), network(1e-6, 1e-9, 1e-10)
    times = [plan_s(plan, nbytes, cluster) for nbytes in (0, 1_000, 1_000_000, 2_000_000)]
    assert times == sorted(times)
    busiest = max(plan.bytes_sent(1e6).max(), plan.bytes_received(1e6).max())
    assert plan_s(plan, 1e6, cluster) >= busiest * 1e-9
    # a + b n: each further byte costs the same.
    assert times[2] - times[0] == pytest.approx((times[3] - times[0]) / 2, rel=1e-6)


def test_a_plan_without_transfers_takes_no_time() -> None:
    assert plan_s(make("ring", 1), 1e6, NETWORKS[0]) == 0.0


seconds = st.floats(1e-7, 1e-2)


@settings(deadline=None)  # a plan of many ranks
@given(st.integers(2, 64), seconds, st.floats(1e-11, 1e-7), st.floats(0, 1e-8))
def test_the_fit_finds_the_network_that_the_times_come_from(workers: int, a: float, b: float, g: float) -> None:
    cluster = network(a, b, g)
    gather, scatter = make("all_gather", workers), make("reduce_scatter", workers)
    small, large = ((size, plan_s(gather, size, cluster)) for size in (1024, 1 << 18))
    found = fit_ring(workers, small, large, (1 << 18, plan_s(scatter, 1 << 18, cluster)))
    rate = (workers - 1) * a / (share(workers) * (1 << 18))  # what rounding in the difference of times amounts to
    alpha, beta = constants(found)
    assert alpha == pytest.approx(a, rel=1e-6)
    assert beta == pytest.approx(b, rel=1e-6, abs=1e-9 * rate)
    assert found.gamma_s_per_byte == pytest.approx(g, rel=1e-6, abs=1e-9 * (rate + b))


@given(st.lists(seconds, min_size=3, max_size=3))
def test_noise_never_gives_negative_costs(times: list[float]) -> None:
    found = fit_ring(4, (1024, times[0]), (16384, times[1]), (16384, times[2]))
    numbers = [*constants(found), found.gamma_s_per_byte]
    assert min(numbers) >= 0
    assert numbers[0] > 0
    assert np.isfinite(numbers).all()


ALPHA, BETA = 5e-5, 1e-9
NETWORK = inline(f"between.alpha={ALPHA}s,between.beta={BETA}s,gamma=2e-9s")


def plan_of(text: str, workers: int, nodes: tuple[int, ...] = ()) -> Plan:
    strategy = Strategy.parse(text)
    return strategy.plan(Group(workers, strategy.servers, nodes))


@given(st.integers(2, 64), st.floats(0, 1e9))
def test_a_ring_keeps_each_port_busy_for_all_of_its_messages(workers: int, nbytes: float) -> None:
    found = plan_load(NETWORK, ProcessPlacement(Group(workers)), plan_of("ring", workers), nbytes)
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
    found = plan_load(NETWORK, ProcessPlacement(Group(workers)), plan_of(text, workers), 1e8)
    steps = math.ceil(math.log2(workers))
    bytes_s = steps * sizes * 1e8 * BETA or 2 * (workers - 1) / workers * 1e8 * BETA
    assert found.port_s + found.turns_s == pytest.approx(messages * steps * ALPHA + bytes_s)


@pytest.mark.parametrize("servers", [1, 4])
def test_a_servers_port_takes_what_all_workers_push(servers: int) -> None:
    workers = 8
    plan = plan_of(f"ps(servers={servers}, update=worker)", workers)
    found = plan_load(NETWORK, ProcessPlacement(Group(workers, servers)), plan, 1e8)
    # In, and then out: a port carries both at once, so that other exchanges pass meanwhile.
    assert found.port_s == found.turns_s == pytest.approx(workers * ALPHA + workers / servers * 1e8 * BETA)


def test_ranks_of_a_host_share_its_port_and_talk_inside_it_by_themselves() -> None:
    nodes = (0, 0, 1, 1)
    group = Group(4, 0, nodes)
    network = inline(f"between.alpha=0s,between.beta={BETA}s,inside.alpha=0s,inside.beta=1e-10s")
    flat = plan_load(network, ProcessPlacement(group, 2), plan_of("direct", 4, nodes), 4e8)
    levels = plan_load(network, ProcessPlacement(group, 2), plan_of("hierarchical", 4, nodes), 4e8)
    # Each rank has something for two ranks of the other host, of a quarter each, both ways round; on two levels a host
    # sends half of the array and takes over half of it.
    assert flat.port_s == pytest.approx(2 * 4e8 * BETA)
    assert levels.port_s == pytest.approx(4e8 * BETA)
    assert levels.inside_s > 0
    two_ports = inline(f"between.alpha=0s,between.beta={BETA}s,inside.alpha=0s,inside.beta=1e-10s,ports_per_host=2")
    assert plan_load(two_ports, ProcessPlacement(group, 2), plan_of("direct", 4, nodes), 4e8).port_s == pytest.approx(
        flat.port_s / 2
    )


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 1, 1), (0, 0, 0, 0)], ids=str)
def test_a_library_inside_hosts_takes_its_own_time_before_and_after_the_messages(nodes: tuple[int, ...]) -> None:
    """Without its constants the plan's transfers count as messages."""
    group, nbytes = Group(4, 0, nodes), 4e8
    links = f"between.alpha={ALPHA}s,between.beta={BETA}s,inside.alpha=1us,inside.beta=0.1ns,gamma=0s"
    known = inline(f"{links},native.alpha=1ms,native.beta=0.5ns")
    plan = hierarchical(group, inside="native")
    library_s, hosts, where = 1e-3 + nbytes * 0.5e-9, np.array(nodes), len(set(nodes))
    between_s = plan_time(plan.across, nbytes, known, hosts).whole_s
    assert plan_time(plan, nbytes, known, hosts).whole_s == pytest.approx(library_s + between_s)
    assert plan_time(plan, nbytes, inline(links), hosts).whole_s == pytest.approx(
        plan_time(replace(plan, native=()), nbytes, known, hosts).whole_s
    )
    if nodes != (0, 1, 1, 1):  # placements have equally many workers on all hosts
        found = plan_load(known, ProcessPlacement(group, 4 // where), plan, nbytes)
        assert found.inside_s == pytest.approx(library_s)
        assert found.sent_bytes == pytest.approx((where - 1) * nbytes / 2)
        push, _ = phases(plan)
        half = plan_load(known, ProcessPlacement(group, 4 // where), push, nbytes)
        assert half.inside_s == pytest.approx(library_s / 2)


def test_an_oversubscribed_tree_makes_what_crosses_it_slower() -> None:
    text = f"between.alpha=0s,between.beta={BETA}s"
    plan, placement = plan_of("direct", 8), ProcessPlacement(Group(8))
    whole = plan_load(inline(text), placement, plan, 8e8).port_s
    even = inline(text + ",topology=fat_tree(hosts_per_leaf=4, oversubscription=1)")
    thin = inline(text + ",topology=fat_tree(hosts_per_leaf=4, oversubscription=4)")
    assert plan_load(even, placement, plan, 8e8).port_s == pytest.approx(whole)
    # 4 x 4 of the 4 x 7 messages that leave a leaf's hosts go up one link as fast as a port.
    assert plan_load(thin, placement, plan, 8e8).port_s == pytest.approx(whole * 16 / 7)


def test_messages_at_the_same_time_last_as_long_as_the_busiest_port_and_nothing_takes_none() -> None:
    sizes = np.array([100, 300, 50])
    flows = Flows(np.array([0, 0, 1]), np.array([1, 2, 2]), sizes, sizes)
    found = flows_outline(ClusterShape.of(NETWORK), ProcessPlacement(Group(3)), flows).load(NETWORK)
    assert found.port_s == pytest.approx(2 * ALPHA + 400 * BETA)
    assert (found.moved_bytes, found.messages) == (400, 2)
    assert (
        flows_outline(ClusterShape.of(NETWORK), ProcessPlacement(Group(3)), Flows(*(sizes[:0],) * 4)).load(NETWORK)
        == Load()
    )
    assert plan_load(NETWORK, ProcessPlacement(Group(1)), plan_of("ring", 1), 1e6) == Load()


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


def one_by_one(cluster: Cluster, placement: ProcessPlacement, rows: list[Row]) -> tuple[float, float, float, float]:
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
    placement = ProcessPlacement(Group(workers, 0, (0, 0, 1, 1, 2, 2)), 2)
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
    placement, cluster = ProcessPlacement(Group(6, 0, (0, 0, 1, 1, 2, 2)), 2), inline(f"{LINKS},{shape}")
    factors = {"between.alpha": slower, "between.beta": thinner}
    other = cluster.replaced({name: factor * cluster.constants[name].value for name, factor in factors.items()})
    for at in (cluster, other):
        load = flows_outline(ClusterShape.of(at), placement, flows).load(at)
        if len(columns):
            rows = [(0, int(src), int(dst), float(nbytes)) for src, dst, nbytes in columns]
            assert (*load[:3], load.turns_s) == pytest.approx(one_by_one(at, placement, rows))
        else:
            assert load == Load()


ANY = load_network("alpha=45us,beta=1ns,gamma=2.5ns")
FLYING = load_network("alpha=45us,beta=1ns,gamma=2.5ns,flight=20us")
FOUR = load_network("alpha=45us,beta=1ns,gamma=0.5ns,inside.alpha=5us,inside.beta=0.1ns,per_host=4")

ALLREDUCE = ("ring", "direct", "recursive_doubling", "halving_doubling", "tree", "double_tree")
HALVES = ("reduce_scatter", "all_gather", "direct_reduce_scatter", "direct_all_gather", "broadcast")
ONE_AT_A_TIME = ("ring", "recursive_doubling", "halving_doubling", "tree", "reduce_scatter", "all_gather", "broadcast")
"""Those in which no port has several messages in a step, but for ranks beside a power of two."""


def hosts_of(workers: int, servers: int = 0, per_host: int = 1) -> np.ndarray:
    return ProcessPlacement(Group(workers, servers), per_host).hosts


@functools.cache
def made(name: str, workers: int, per_host: int = 1, **options: object) -> Plan:
    nodes = tuple(hosts_of(workers, 0, per_host).tolist())
    servers = options.get("servers", 0) if options.get("on") != "workers" else 0
    plan: Plan = registry.get("algorithms", name).target(Group(workers, servers, nodes), **options)
    return plan


@pytest.mark.every(2)
@pytest.mark.parametrize("workers", [1, 2, 3, 8, 31, 64, 512])
@pytest.mark.parametrize("name", [*(name for name in ALLREDUCE if name != "double_tree"), *HALVES])
def test_plans_take_what_the_formulas_say(name, workers):
    for nbytes in (1e3, 1e8):
        whole_s = plan_time(made(name, workers), nbytes, ANY).whole_s
        assert whole_s == pytest.approx(closed_s(name, nbytes, Size(workers), ANY), rel=1e-2, abs=1e-12)
        flying_s = plan_time(made(name, workers), nbytes, FLYING).whole_s
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
            whole_s = plan_time(made(name, 16), nbytes, cluster).whole_s
            assert whole_s == pytest.approx(closed_s(name, nbytes, Size(16), cluster))


@pytest.mark.parametrize("servers", [1, 2, 8])
@pytest.mark.parametrize("workers", [2, 8, 64])
def test_servers_of_their_own(workers, servers):
    if servers > 1 and workers % servers:
        return
    cluster = load_network("alpha=45us,beta=1ns")
    plan = made("ps", workers, servers=servers)
    whole_s = plan_time(plan, 1e7, cluster, hosts_of(workers, servers)).whole_s
    assert whole_s == pytest.approx(closed_s("ps", 1e7, Size(workers, servers=servers), cluster), rel=1e-2)


@pytest.mark.parametrize("ports", [1, 4])
@pytest.mark.parametrize("hosts", [2, 3, 16, 128])
def test_two_levels_with_a_port_for_each_rank_and_with_one(hosts, ports):
    cluster = load_network(f"{FOUR.name},ports_per_host={ports}")
    plan = made("hierarchical", 4 * hosts, 4)
    for nbytes in (1e4, 1e8):
        whole_s = plan_time(plan, nbytes, cluster, hosts_of(4 * hosts, 0, 4)).whole_s
        formula_s = closed_s("hierarchical", nbytes, Size(4 * hosts, 4), cluster)
        # Ranks that share a port do not add all at once: adding hides behind the others' messages.
        assert whole_s == pytest.approx(formula_s, rel=1e-2 if ports == 4 else 0.1)
        assert whole_s <= formula_s * (1 + 1e-9)


def test_a_ring_of_several_ranks_on_a_host_goes_at_the_pace_of_the_links_between():
    whole_s = plan_time(made("ring", 32, 4), 1e7, FOUR, hosts_of(32, 0, 4)).whole_s
    assert whole_s == pytest.approx(closed_s("ring", 1e7, Size(32, 4), FOUR), rel=1e-2)


@pytest.mark.parametrize("workers", [4, 8, 31, 64, 512])
def test_a_double_tree_in_many_pieces_moves_the_array_twice_and_in_one_waits_for_a_tree(workers):
    bytes_s = 1e8 * 1e-9
    many = plan_time(made("double_tree", workers, pieces=128), 1e8, load_network("alpha=0us,beta=1ns"))
    lg = Size(workers).lg
    assert 2 * bytes_s * (workers - 1) / workers <= many.whole_s <= 1.1 * 2 * bytes_s * (1 + lg / 128)
    one = plan_time(made("double_tree", workers), 1.0, load_network("alpha=1us,beta=0ns"))
    assert lg * 1e-6 <= one.whole_s <= 4 * lg * 1e-6


@pytest.mark.parametrize("name", [*ALLREDUCE, *HALVES])
def test_nothing_is_faster_than_the_lower_bounds(name):
    for cluster in (ANY, FLYING):
        for workers in (2, 3, 8, 31, 64, 256):
            plan = made(name, workers)
            for nbytes in (1.0, 1e9):
                bound_s = lower_bound_s(plan.goal, nbytes, workers, cluster)
                assert plan_time(plan, nbytes, cluster).whole_s >= bound_s * (1 - 1e-9)


@pytest.mark.parametrize("name", ["ring", "direct", "recursive_doubling", "halving_doubling", "tree", "double_tree"])
@pytest.mark.parametrize("workers", [8, 16, 32])
def test_clocks_agree_with_messages_one_by_one(name, workers):
    """They differ where a rank adds for long while others send to it: here, as in the formulas, receiving waits."""
    plan, nbytes, cluster = made(name, workers), 1e7, load_network("alpha=50us,beta=1ns,gamma=0.5ns")
    clock, ends_s = Clock(), []
    runs = PlanRuns(clock, cluster, ProcessPlacement(Group(workers)), lambda _: plan, lambda _: nbytes)
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
    plan = made(name, workers)
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
    slow, fast = (plan_time(made(name, workers), nbytes, one, None, starts) for one in (FLYING, faster))
    assert (fast.ends_s <= slow.ends_s + 1e-9).all()


@given(st.sampled_from(ONE_AT_A_TIME), st.sampled_from([2, 4, 8]), st.floats(0, 1e7), st.data())
def test_late_ranks_hold_up_by_no_more_than_they_are_late(name, workers, nbytes, data):
    starts = np.array(data.draw(st.lists(SECONDS, min_size=workers, max_size=workers)))
    plan = made(name, workers)
    on_time, late = (plan_time(plan, nbytes, ANY, None, one) for one in (np.zeros(workers), starts))
    assert (late.ends_s >= on_time.ends_s - 1e-9).all()
    assert late.whole_s <= on_time.whole_s + starts.max() + 1e-9


@pytest.mark.parametrize("name", ["ring", "direct", "recursive_doubling", "tree"])
def test_who_is_late_by_the_same_time_ends_later_by_that_time(name):
    plan = made(name, 16)
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
    plan = made(name, 16)
    times = [plan_time(plan, 1e6, cluster).whole_s for cluster in (shared, alone)]
    assert times[0] == pytest.approx(factor * times[1])


def test_cores_that_all_ranks_share_bound_the_whole():
    free = load_network("alpha=1us,beta=0.01ns,gamma=0.1ns,message=50us,byte_cpu=0.3ns")
    bound = load_network(f"{free.name},cores=2")
    plan, hosts = made("ring", 8, 8), hosts_of(8, 0, 8)
    found, held = (plan_time(plan, 1e7, cluster, hosts) for cluster in (free, bound))
    sent = plan.bytes_sent(1e7).sum()
    expected_s = 2 * (len(plan) * 50e-6 + sent * 0.3e-9) + sent / 2 * 0.1e-9
    assert found.whole_s < expected_s / 2
    assert held.whole_s == pytest.approx(expected_s / 2)


def test_two_levels_of_many_ranks():
    plan, hosts = made("hierarchical", 1024, 4), hosts_of(1024, 0, 4)
    whole_s = plan_time(plan, 1e9, FOUR, hosts).whole_s
    assert whole_s == pytest.approx(closed_s("hierarchical", 1e9, Size(1024, 4), FOUR), rel=0.1)
