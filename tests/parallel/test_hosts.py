"""``transport=auto`` on several hosts: shared memory inside, TCP between, in one group of real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import host_bodies
import pytest
from trained import check_trained_as_one

from pool import Pool


def everyone(world: int, address: str, *case: Any) -> list[list[Any]]:
    return [[[index, world, address], *case] for index in range(world)]


@pytest.mark.parametrize(
    ("nodes", "strategy", "transports"),
    [
        ([0, 0, 0], "direct schedule=fixed transport=shm", ["shm"] * 3),
        ([0, 1, 2], "ring schedule=fixed transport=tcp", ["tcp"] * 3),
        ([0, 1, 0], "hierarchical schedule=fixed", ["shm+tcp", "tcp", "shm+tcp"]),
    ],
)
def test_what_runs_depends_on_where_the_processes_are(
    pool: Pool, address: str, nodes: list[int], strategy: str, transports: list[str]
) -> None:
    """All cut an array into the same segments, also where one alone on its host has another transport."""
    with pool.start(host_bodies.what_runs, everyone(len(nodes), address, nodes, "auto", 9_000_000)) as group:
        found = group.results()
    assert [text for text, _, _ in found] == [strategy] * len(nodes)
    assert [name for _, name, _ in found] == transports


def test_two_levels_send_every_part_once_between_hosts(pool: Pool, address: str) -> None:
    """Two hosts of two: each rank sends half of the array to its partner across, in two halves."""
    nodes, nbytes = [0, 0, 1, 1], 4_000_000
    with pool.start(host_bodies.what_runs, everyone(4, address, nodes, "auto")) as group:
        sent = [counts for _, _, counts in group.results()]
    for rank, counts in enumerate(sent):
        across = sum(counts[peer] for peer in range(4) if nodes[peer] != nodes[rank])
        assert nbytes / 2 <= across < nbytes / 2 * 1.02


@pytest.mark.parametrize(("local", "times"), [("on", 1), ("off", 2)])
def test_a_host_pushes_and_pulls_once(pool: Pool, address: str, local: str, times: int) -> None:
    """Two hosts of two workers, on each a server: half of an array is pushed and the other half answered."""
    nodes, codecs = [0, 0, 1, 1], {"none": 4 * 1024 * 512, "int8": 1024 * 512 * (1 + 4 / 1024)}
    strategy = f"ps(servers=2, on=workers, update=worker, local={local})"
    with pool.start(host_bodies.what_is_coded, everyone(4, address, nodes, strategy, list(codecs))) as group:
        rows = list(zip(*group.results(), strict=True))
    for nbytes, found in zip(codecs.values(), rows, strict=True):
        assert len({one[3] for one in found}) == 1
        for host in (0, 1):
            here = [rank for rank in range(4) if nodes[rank] == host]
            across = sum(found[rank][2][peer] for rank in here for peer in range(4) if nodes[peer] != host)
            assert times * nbytes <= across < 1.02 * times * nbytes


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("strategy", "nodes"),
    [
        ("ring", [0, 0, 1, 1]),
        pytest.param("hierarchical", [0, 0, 1], marks=pytest.mark.slow),
        pytest.param("direct", [0, 1, 1], marks=pytest.mark.slow),
        ("hierarchical(inside=native)", [0, 1, 1, 0]),
        pytest.param("hierarchical(inside=native)", [0, 0, 0], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_collectives_over_both(pool: Pool, address: str, strategy: str, nodes: list[int]) -> None:
    case = everyone(len(nodes), address, nodes, "collectives", strategy)
    with pool.start(host_bodies.on_nodes, case) as group:
        sent, received = zip(*group.results(), strict=True)
    slack = 1.01 if "native" in strategy else 1.0  # message libraries count a body once it has left
    assert slack * sum(sent) >= sum(received) > 0


CASES = [["momentum", "float64"], ["adam", "float32"], ["adam", "float32"]]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("strategy", "nodes", "workers"),
    [
        ("auto", [0, 0, 1, 1], 4),
        pytest.param("ps(servers=2, update=worker)", [0, 0, 0, 1], 2, marks=pytest.mark.slow),
        ("ps(servers=2, on=workers, local=on) schedule=wait_free", [0, 0, 1, 1], 4),
        ("hierarchical(inside=native) schedule=priority(slice=64B)", [0, 1, 1], 3),
        pytest.param("ps(servers=1, local=on)", [0, 0, 1, 1, 2], 4, marks=pytest.mark.slow),
    ],
)
def test_processes_on_several_hosts_train_as_one(
    pool: Pool, address: str, strategy: str, nodes: list[int], workers: int
) -> None:
    case = everyone(len(nodes), address, nodes, "train", strategy, CASES)
    with pool.start(host_bodies.on_nodes, case) as group:
        results = group.results()[:workers]
    check_trained_as_one(results, CASES)


@pytest.mark.every(2)
@pytest.mark.parametrize("inside", ["ring", "native"])
def test_payloads_cross_between_hosts_once_for_each_host(pool: Pool, address: str, inside: str) -> None:
    """Two hosts of two and of three: inside travels what a dense reduce-scatter and all-gather move, or a library's."""
    by = " by gloo" if inside == "native" else ""
    codecs, nodes, elements = {"int8": 8, "fp16": 16, "topk(ratio=0.01)": 0.48}, [0, 0, 1, 1, 1], 1 << 19
    case = everyone(5, address, nodes, f"hierarchical(inside={inside})", list(codecs))
    with pool.start(host_bodies.what_is_coded, case) as group:
        rows = list(zip(*group.results(), strict=True))
    for (codec, bits), found in zip(codecs.items(), rows, strict=True):
        assert all(one[0].startswith("hierarchical") and codec in one[0] for one in found)
        words = f"gradients are summed uncompressed inside hosts{by}; between hosts "
        assert all(one[1].startswith(words) for one in found)
        assert len({one[3] for one in found}) == 1
        for host in (0, 1):
            here = [rank for rank in range(5) if nodes[rank] == host]
            between = sum(found[rank][2][peer] for rank in here for peer in range(5) if nodes[peer] != host)
            payload = elements * bits / 8  # half for the other host's part and half for the own one's sum
            assert payload * 0.95 < between < payload * 1.1 + 4000, codec
            within = sum(found[rank][2][peer] for rank in here for peer in here)
            if by:  # messages that begin the library's collectives
                assert within < 4000
            else:
                assert within == pytest.approx(2 * (len(here) - 1) * 4 * elements, rel=0.01)


def test_on_one_host_nothing_is_compressed_and_all_are_told(pool: Pool, address: str) -> None:
    case = everyone(2, address, [0, 0], "hierarchical", ["int8"])
    with pool.start(host_bodies.what_is_coded, case) as group:
        ((one,), (two,)) = group.results()
        warned = [rank.printed() for rank in group.ranks]
    assert one[:2] == two[:2]
    reason = "codec=feedback compresses between hosts only, and all ranks are on one"
    assert one[0] == f"hierarchical schedule=fixed transport=shm ({reason})"
    assert one[1] == "allreduce by hierarchical"
    assert [reason in text for text in warned] == [True, False]


@pytest.mark.slow
def test_a_run_on_two_levels_is_resumed_with_the_same_bits(pool: Pool, address: str) -> None:
    strategies = [f"hierarchical codec={text}" for text in ("int8", "topk(ratio=0.1)", "powersgd(rank=1)")]
    strategies += ["ps(servers=2, on=workers, local=on) codec=int8", "hierarchical(inside=native) codec=int8"]
    with pool.start(host_bodies.resumes, everyone(4, address, [0, 0, 1, 1], strategies)) as group:
        for found in group.results():
            assert found == [[True, True, True]] * len(strategies)


@pytest.mark.parametrize(("victim", "strategy"), [(1, "auto"), (3, "hierarchical(inside=native)")])
def test_who_dies_is_named_on_all_hosts(pool: Pool, address: str, victim: int, strategy: str) -> None:
    with pool.start(host_bodies.dies, everyone(4, address, [0, 0, 1, 1], victim, strategy)) as group:
        group.end()
        for rank in group.ranks:
            if rank.index != victim:
                assert rank.status == 1, rank
                assert f"rank {victim} (host{victim // 2}" in rank.printed(), rank


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two hosts with a cable between them, and nothing else."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    names = [f"syncline-{os.getpid()}-{host}" for host in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for host, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.231.0.{host}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        pytest.skip(f"this machine does not let us make network namespaces: {done.stderr.strip()}")


def test_hosts_that_share_nothing_but_a_cable(pool: Pool, namespaces: list[str]) -> None:
    """The roll call finds by itself who can share memory."""
    a, b = namespaces
    case = everyone(4, "10.231.0.1:29400", [a, b, b, a], "auto")
    with pool.start(host_bodies.what_runs, case) as group:
        found = group.results()
    assert {(strategy, transport) for strategy, transport, _ in found} == {("hierarchical schedule=fixed", "shm+tcp")}


def test_a_dead_link_is_found_although_each_end_sees_the_other_ones_pid(pool: Pool, namespaces: list[str]) -> None:
    case = everyone(2, "10.231.0.1:29400", namespaces, 2.0)
    with pool.start(host_bodies.loses_its_cable, case) as group:
        group.hear(1)
        ip("-n", namespaces[0], "link", "set", "eth0", "down")
        group.end()
        for rank in group.ranks:
            assert rank.status == 1, rank
            assert f"rank {1 - rank.index} (" in rank.printed(), rank
            assert "the link to it is dead" in rank.printed(), rank


def test_a_rank_whose_interpreter_is_busy_for_longer_than_the_limit_is_alive(pool: Pool, address: str) -> None:
    with pool.start(host_bodies.holds_the_interpreter, everyone(2, address, 2.0)) as group:
        assert group.results() == ["met", "met"]
