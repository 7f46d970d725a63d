"""Real processes whose pushes are updates by themselves: nothing is lost or counted twice, and failures are named."""

from __future__ import annotations

import os
import signal
from itertools import cycle

import numpy as np
import push_bodies as bodies
import pytest

from pool import Pool

LIMIT_S = 10.0
WORKERS = 2
PLACES = [("ps(servers=2)", 2), ("ps(servers=2, on=workers)", 0)]
CARRIED = ["transport=shm", "transport=tcp", "transport=shm codec=topk(ratio=1)"]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("carried", "place", "servers"),
    [
        (row, *other)
        for row, other in zip(
            [*(f"sync=asp {one}" for one in CARRIED), "sync=bsp(backup=1) transport=tcp"], cycle(PLACES)
        )
    ],
)
def test_every_push_counts_once(pool: Pool, address: str, place: str, servers: int, carried: str) -> None:
    processes = WORKERS + servers
    case = [[[index, processes, address], f"{place} {carried}"] for index in range(processes)]
    with pool.start(bodies.add_up, case) as group:
        found = group.results()[:WORKERS]
    pushed = [bodies.gradient_of(rank, step) for rank in range(WORKERS) for step in range(bodies.STEPS + 5 * rank)]
    for weights in found:
        np.testing.assert_array_equal(weights, -bodies.LR * np.sum(pushed, 0) / WORKERS)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("place", "servers", "schedule"),
    [(*row, other) for row, other in zip(PLACES, cycle(["fixed", "priority(slice=64B)"]))],
)
def test_models_of_torch_train_as_one_when_all_wait_for_the_slowest(
    pool: Pool, address: str, place: str, servers: int, schedule: str
) -> None:
    processes, text = WORKERS + servers, f"{place} sync=ssp(staleness=0) schedule={schedule}"
    case = [[[index, processes, address], text] for index in range(processes)]
    with pool.start(bodies.train, case) as group:
        found = group.results()[:WORKERS]
    for name, wanted in bodies.steps().items():
        np.testing.assert_allclose(found[0][name], wanted, rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(found[1][name], found[0][name])


@pytest.mark.parametrize(
    ("place", "victim", "transport"),
    [
        (*row, other)
        for row, other in zip(
            [("ps(servers=1)", 1), ("ps(servers=1, on=workers)", 0), ("ps(servers=1, on=workers)", 2)],
            cycle(["shm", "tcp"]),
        )
    ],
)
def test_everyone_names_who_dies(pool: Pool, address: str, place: str, victim: int, transport: str) -> None:
    """Whether others wait for it or not: a worker, and one that owns the weights."""
    strategy = f"{place} sync=asp transport={transport}"
    case = [[[index, 3, address], strategy, victim, signal.SIGKILL, 1.0] for index in range(3)]
    with pool.start(bodies.train_until, case) as group:
        group.ranks[victim].line.send("nobody has to be there")
        group.end(LIMIT_S)
        for rank in group.ranks:
            if rank.index != victim:
                assert rank.status == 1, rank
                assert f"rank {victim} (" in rank.printed(), rank
                assert f"pid {group.ranks[victim].pid})" in rank.printed(), rank
                assert "died" in rank.printed(), rank


@pytest.mark.every(2)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("sync", ["asp", "ssp(staleness=1)"])
def test_everyone_names_a_server_that_dies(pool: Pool, address: str, sync: str, transport: str) -> None:
    strategy = f"ps(servers=1) sync={sync} transport={transport}"
    case = [[[index, 3, address], strategy, -1, signal.SIGKILL, 1.0] for index in range(3)]
    with pool.start(bodies.train_until, case) as group:
        group.hear(2, among=range(WORKERS))
        os.kill(group.ranks[WORKERS].pid, signal.SIGKILL)
        group.end(LIMIT_S)
        for rank in group.ranks[:WORKERS]:
            assert rank.status == 1, rank
            assert f"rank {WORKERS} (" in rank.printed(), rank
            assert f"pid {group.ranks[WORKERS].pid})" in rank.printed(), rank
            assert "died" in rank.printed(), rank


@pytest.mark.parametrize(("place", "servers"), PLACES)
def test_staleness_is_counted_and_never_above_the_bound(pool: Pool, address: str, place: str, servers: int) -> None:
    """One worker leaves when it has made a few steps, and the other goes on without it."""
    processes = WORKERS + servers
    case = [[[index, processes, address], f"{place} sync=ssp(staleness=2)"] for index in range(processes)]
    with pool.start(bodies.count, case) as group:
        found = group.results()[:WORKERS]
    for rank, (made, staleness, lag) in enumerate(found):
        assert made == bodies.STEPS + 5 * rank
        assert sum(staleness.values()) == sum(lag.values()) == made
        assert max(staleness) <= 2
