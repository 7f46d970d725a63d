"""Real processes train as one: equal to one worker on all the data, replicas and runs equal bit for bit."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
from rank_bodies import train
from trained import check_trained_as_one

from pool import Pool

CASES = [["momentum", "float64"], ["adam", "float32"], ["adam", "float32"]]
STRATEGIES = {  # and the processes that only serve
    "ring": 0,
    "direct": 0,
    "ps(servers=1)": 1,
    "ps(servers=2) schedule=remade": 2,
    "ps(servers=2) schedule=priority(slice=64B)": 2,
    "ps(servers=2, on=workers)": 0,
    "ps(servers=2, on=workers) schedule=priority(slice=64B)": 0,
    "ps(servers=2, update=worker)": 2,
}

QUICK = ["ring", "direct", "ps(servers=1)", "ps(servers=2, on=workers)", "ps(servers=2) schedule=priority(slice=64B)"]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("strategy", "workers", "transport"),
    [
        *((strategy, *case) for strategy, case in zip(QUICK, cycle(((3, "tcp"), (4, "shm"))))),
        ("ps(servers=1)", 2, "shm"),
        ("tree", 2, "shm"),
        *(pytest.param(strategy, 3, "tcp", marks=pytest.mark.slow) for strategy in STRATEGIES if strategy not in QUICK),
    ],
)
def test_processes_train_as_one(pool: Pool, address: str, strategy: str, workers: int, transport: str) -> None:
    processes = workers + STRATEGIES.get(strategy, 0)
    case: list[Any] = [f"{strategy} transport={transport}", CASES]
    with pool.start(train, [[[index, processes, address], *case] for index in range(processes)]) as group:
        results = group.results()
    assert all(state is None for states in results[workers:] for state in states)
    check_trained_as_one(results[:workers], CASES)
