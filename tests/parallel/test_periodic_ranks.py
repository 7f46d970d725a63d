"""Real processes that train by themselves: equal when they have come together, resumed with the same bits, named."""

from __future__ import annotations

import signal

import fault_bodies
import numpy as np
import periodic_bodies as bodies
import pytest
from rank_bodies import train
from trained import check_trained_as_one

from pool import Pool

CASES = [["sgd", "float64"], ["sgd", "float32"], ["sgd", "float32"]]
LIMIT_S = 10.0


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("strategy", "workers", "servers"),
    [
        ("ring sync=local(steps=1) transport=tcp", 3, 0),
        ("direct sync=local(steps=1) transport=shm", 3, 0),
        ("ps(servers=1, update=worker) sync=local(steps=1) transport=shm", 2, 1),
        ("sync=gossip(graph=ring) transport=tcp", 2, 0),
        ("sync=gossip transport=shm", 2, 0),
    ],
)
def test_processes_that_all_meet_after_every_step_train_as_one(
    pool: Pool, address: str, strategy: str, workers: int, servers: int
) -> None:
    """Under gossip a pair averages its weights."""
    processes = workers + servers
    with pool.start(train, [[[index, processes, address], strategy, CASES] for index in range(processes)]) as group:
        check_trained_as_one(group.results()[:workers], CASES)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "strategy",
    [
        "sync=diloco(steps=4) codec=int8 transport=tcp",
        "sync=easgd(steps=3) transport=shm",
        "sync=gossip transport=shm",
        "sync=post_local(after=2, steps=4) transport=tcp",
    ],
)
def test_a_run_is_resumed_in_the_middle_of_a_period(pool: Pool, address: str, strategy: str) -> None:
    with pool.start(bodies.resume, [[[index, 3, address], strategy] for index in range(3)]) as group:
        found = group.results()
    for before, last, resumed in found:
        for name, tensor in before.items():
            np.testing.assert_array_equal(tensor, resumed[name])
            np.testing.assert_array_equal(last[name], found[0][1][name])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_everyone_names_who_dies_in_the_middle_of_a_period(pool: Pool, address: str, transport: str) -> None:
    strategy = f"ring sync=local(steps=3) transport={transport}"
    case = [[[index, 3, address], strategy, 1, signal.SIGKILL, 1.0] for index in range(3)]
    with pool.start(fault_bodies.train_until, case) as group:
        group.hear(2)
        group.ranks[1].line.send("the others are in the same period")
        group.end(LIMIT_S)
        for rank in (group.ranks[0], group.ranks[2]):
            assert rank.status == 1, rank
            assert "rank 1 (" in rank.printed(), rank


def test_a_rank_with_fewer_batches_is_named(pool: Pool, address: str) -> None:
    case = [[[index, 3, address], "ring sync=local(steps=4) transport=shm"] for index in range(3)]
    with pool.start(bodies.leave_early, case) as group:
        group.end(LIMIT_S)
        for rank in (group.ranks[0], group.ranks[2]):
            assert rank.status == 1, rank
            assert "rank 1 (" in rank.printed(), rank
