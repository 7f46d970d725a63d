"""Elastic runs whose workers go at their own pace: every sample is in the weights once per epoch, whoever is lost when.

The gradients do not depend on the weights and are exact, so the weights at the end tell which samples are in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

import elastic_bodies as bodies
import pytest
from test_elastic import LIMIT_S, lose, replace, started

from pool import Group, Pool
from syncline.global_batches import read_log
from syncline.sampling import SampleOrder
from syncline.strategy.strategy import Strategy


def check(group: Group, survivors: list[int], log: Path, staleness: int | None = 1) -> None:
    """The survivors have the weights of a run in which every sample counts once per epoch, and so has the log. They
    kept the bound."""
    group.hear(1, among=survivors, timeout_s=LIMIT_S)
    expected = (-bodies.RATE * bodies.EPOCHS * bodies.numbers().sum(0)).tolist()
    for rank, index in enumerate(survivors):
        weights, _, ahead, new_rank, members, *_ = group.ranks[index].said[-1]
        assert weights == expected
        assert (new_rank, members) == (rank, survivors)
        assert staleness is None or ahead <= staleness
    group.end(LIMIT_S, among=survivors)
    assert [group.ranks[index].status for index in survivors] == [0] * len(survivors)
    lines, order = read_log(str(log)), SampleOrder(bodies.SAMPLES, bodies.PIECE, seed=4)
    for epoch in range(bodies.EPOCHS):
        steps = [lines[epoch, step]["samples"] for step in range(bodies.SAMPLES // bodies.PIECE)]
        assert [index for samples in steps for index in samples] == order.indices(epoch).tolist()


APART, TWO = "ps(servers=1)", "ps(servers=2)"
FOLLOWED, THREE = "ps(servers=2, replicas=1)", "ps(servers=3, replicas=1)"
ON_WORKERS = "ps(servers=2, on=workers, replicas=1)"
BOUND = "sync=ssp(staleness=1, rate=own) transport=tcp"


@contextmanager
def lost(
    pool: Pool, address: str, log: Path, strategy: str, workers: int, **plan: Any
) -> Iterator[tuple[Group, list[int]]]:
    """A run in which some processes are lost as planned, and the workers that are left."""
    servers, least = Strategy.parse(strategy).servers, 1 + ("backup" in strategy)
    how = {"strategy": strategy, "servers": servers, "samples": str(log)}
    with started(pool, address, workers + servers, least, **how, **plan) as (group, relay):
        for victim in plan:
            lose(group, relay, int(victim))
        yield group, [rank for rank in range(workers) if str(rank) not in plan]
        left = [rank for rank in range(workers, workers + servers) if str(rank) not in plan]
        group.end(LIMIT_S, among=left)
        assert [group.ranks[index].status for index in left] == [0] * len(left)


@pytest.mark.parametrize(
    ("strategy", "plan"),
    [
        (f"{APART} {BOUND}", {"0": ("pushed", 3), "2": ("before", 6)}),
        pytest.param(f"{APART} sync=asp(rate=own)", {"1": ("after", 1)}, marks=pytest.mark.slow),
        (f"{THREE} sync=bsp(backup=1)", {"1": ("pushed", 3), "3": ("updated", 6)}),
        pytest.param(f"{THREE} {BOUND}", {"1": ("pushed", 1), "3": ("updated", 3)}, marks=pytest.mark.slow),
        (f"{ON_WORKERS} {BOUND}", {"0": ("pushed", 3), "1": ("updated", 6)}),
    ],
)
def test_processes_are_lost_and_no_sample_is(
    pool: Pool, address: str, tmp_path: Path, strategy: str, plan: dict[str, Any]
) -> None:
    """With a batch in hand, with a push under way, with one that is answered and not counted yet, and with an update
    that other owners may lack."""
    log = tmp_path / "samples.jsonl"
    with lost(pool, address, log, strategy, 3, **plan) as (group, survivors):
        check(group, survivors, log, 1 if "ssp" in strategy else None)


@pytest.mark.parametrize(
    ("strategy", "workers", "plan", "survivors"),
    [
        (f"{APART} {BOUND}", 3, {"1": ("pushed", 3), "0": [("join", 6), ("before", 8)]}, [2, 4]),
        (f"{ON_WORKERS} {BOUND}", 2, {"1": ("pushed", 3), "0": [("join", 6), ("before", 9)]}, [2]),
        pytest.param(
            f"{FOLLOWED} {BOUND}",
            2,
            {"2": ("updated", 2), "0": ("join", 6), "3": ("updated", 6)},  # of its last view
            [0, 1],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            f"{TWO} sync=bsp(backup=1)",
            3,
            {"2": ("before", 1), "0": ("join", 2)},
            [0, 1, 5],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_process_joins_and_no_sample_is_lost(
    pool: Pool, address: str, tmp_path: Path, strategy: str, workers: int, plan: dict[str, Any], survivors: list[int]
) -> None:
    """One is lost, another joins, and one of the first ones is lost: the new one, worker or server, has what it had.
    In one case the worker that waits for the new one is alone, and updates the weights itself."""
    log, servers, least = tmp_path / "samples.jsonl", Strategy.parse(strategy).servers, 1 + ("backup" in strategy)
    how = {"strategy": strategy, "servers": servers, "samples": str(log), "most": workers, **plan}
    processes = workers + servers
    with started(pool, address, processes, least, **how) as (group, relay):
        first, *others = sorted(plan, key=lambda number: number == "0")
        lose(group, relay, int(first))
        replace(group, relay, 0, address, processes, least, **how)
        for victim in others:
            if victim != "0" or survivors[0]:
                lose(group, relay, int(victim))
        check(group, survivors, log, 1 if "ssp" in strategy else None)
        left = [rank for rank in range(workers, processes + 1) if str(rank) not in plan and rank not in survivors]
        group.end(LIMIT_S, among=left)
        assert [group.ranks[index].status for index in left] == [0] * len(left)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        f"{APART} sync=ssp(staleness=0, rate=own)",
        f"{TWO} sync=bsp(backup=1)",
        f"{FOLLOWED} {BOUND}",
        f"{ON_WORKERS} {BOUND}",
        f"ps(servers=1, on=workers, replicas=1) {BOUND}",
    ],
)
@pytest.mark.parametrize(("what", "when"), [("before", 0), ("pushed", 0), ("pushed", 4), ("after", 4)])
def test_a_worker_is_lost_at_any_step(
    pool: Pool, address: str, tmp_path: Path, strategy: str, what: str, when: int
) -> None:
    log = tmp_path / "samples.jsonl"
    with lost(pool, address, log, strategy, 3, **{"0": (what, when)}) as (group, survivors):
        check(group, survivors, log, None)


@pytest.mark.slow
@pytest.mark.parametrize("server", [3, 4])
@pytest.mark.parametrize(("what", "when"), [("updates", 0), ("updated", 0), ("updates", 4), ("updated", 4)])
def test_a_server_is_lost_at_any_step(
    pool: Pool, address: str, tmp_path: Path, server: int, what: str, when: int
) -> None:
    log = tmp_path / "samples.jsonl"
    with lost(pool, address, log, f"{FOLLOWED} {BOUND}", 3, **{str(server): (what, when)}) as (group, survivors):
        check(group, survivors, log)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "workers"), [(FOLLOWED, 3), (ON_WORKERS, 4)])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("point", ["send", "begin_again", "put_together_again", "restored"])
def test_a_second_process_is_lost_while_the_others_agree(
    pool: Pool, address: str, tmp_path: Path, strategy: str, workers: int, rank: int, point: str
) -> None:
    """The first worker or server, or a worker that owns nothing. A server puts nothing together, and knows no steps."""
    message = "before send Promise" if rank else "before send Accept"
    point = f"{message if point == 'send' else f'after {point}'} 1"
    servers = 2 if strategy == FOLLOWED else 0
    plan: dict[str, Any] = {"2": ("before", 4), "die": {str(rank): point}, "whenever": True, "servers": servers}
    log = tmp_path / "samples.jsonl"
    strategy = f"{strategy} {BOUND}"
    with started(pool, address, workers + servers, strategy=strategy, samples=str(log), **plan) as (group, relay):
        lose(group, relay, 2)
        waiting, survivors = {*range(workers), rank} - {2}, list[int]()
        while waiting:
            ready = connection.wait([group.ranks[index].line for index in waiting], LIMIT_S)
            assert ready, [rank.printed() for rank in group.ranks]
            for index in [index for index in sorted(waiting) if group.ranks[index].line in ready]:
                waiting.remove(index)
                try:
                    group.ranks[index].said.append(group.ranks[index].line.recv())
                    survivors.append(index)
                except EOFError:
                    assert index == rank, f"{point}: {group.ranks[index]}"
                    status = group.end(LIMIT_S, among=[index])[index] or 0
                    if status:
                        relay.note_end(index, status)
                    else:
                        survivors.append(index)
        assert (rank in survivors) == (rank >= workers and "put_together" in point)
        check(group, [index for index in sorted(survivors) if index < workers], log)


def test_a_view_breaks_when_one_of_the_owners_has_begun_it(pool: Pool, address: str, tmp_path: Path) -> None:
    """Rank 2 dies when rank 0 has begun the new view, and rank 1 still waits: those two have all parts."""
    plan: dict[str, Any] = {"3": ("before", 4), "1": ("misses", 2), "die": {"2": "after restored 1"}, "whenever": True}
    log, strategy = tmp_path / "samples.jsonl", f"ps(servers=3, on=workers, replicas=1) {BOUND}"
    with started(pool, address, 4, strategy=strategy, samples=str(log), **plan) as (group, relay):
        lose(group, relay, 3)
        lose(group, relay, 2)
        check(group, [0, 1], log)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_view_breaks_when_one_of_the_servers_has_begun_it(
    pool: Pool, address: str, tmp_path: Path, transport: str
) -> None:
    strategy, log = f"{TWO} {BOUND}".replace("tcp", transport), tmp_path / "samples.jsonl"
    with lost(pool, address, log, strategy, 3, **{"1": ("before", 3), "0": ("loads", -1)}) as (group, survivors):
        check(group, survivors, log)


@pytest.mark.slow
def test_the_server_is_lost(pool: Pool, address: str) -> None:
    """Nobody else has the weights."""
    with started(pool, address, 3, strategy=f"{APART} {BOUND}", servers=1, **{"2": ("updated", 3)}) as (group, relay):
        lose(group, relay, 2)
        group.end(LIMIT_S)
        for rank in group.ranks[:2]:
            assert "start again from your last checkpoint" in rank.printed()
