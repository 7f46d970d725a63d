"""``schedule=auto`` between real processes: all run what rank 0 has chosen, and get one worker's weights."""

from __future__ import annotations

import os

import numpy as np
import pytest
from schedule_bodies import chooses

from pool import Pool

COUNT, LOOKS_AT = 14, 10


@pytest.mark.parametrize(
    ("strategy", "workers", "servers"),
    [("ring transport=shm", 2, 0), ("ps(servers=1) transport=tcp", 2, 1)],
)
def test_processes_choose_alike(pool: Pool, address: str, strategy: str, workers: int, servers: int) -> None:
    """What is chosen depends on the machine; that one rank has looked makes all stay inside the iteration."""
    processes = workers + servers
    found = {}
    for text in (strategy, f"{strategy} schedule=fixed"):
        each = [[[index, processes, address], text, COUNT, LOOKS_AT] for index in range(processes)]
        with pool.start(chooses, each, {"SYNCLINE_TUNING": "on"}) as group:
            found[text] = group.results()[:workers]
    (said, reason, weights), *others = found[strategy]
    assert ["schedule=fixed" in said[0], "schedule=merged" in said[4]] == [True, True]
    assert not any(schedule in said[-1] for schedule in ("priority", "split"))
    assert reason.startswith("schedule=")
    assert "predicted" in reason
    assert ("without overlap" in reason) == (processes > len(os.sched_getaffinity(0)))
    for other in others:
        assert other[:2] == [said, reason]
        assert all(np.array_equal(other[2][name], array) for name, array in weights.items())
    for name, array in found[f"{strategy} schedule=fixed"][0][2].items():
        assert np.linalg.norm(weights[name] - array) <= 1e-9 * np.linalg.norm(array)


@pytest.mark.parametrize(("transport", "workers"), [pytest.param("tcp", 3, marks=pytest.mark.slow), ("shm", 2)])
def test_schedules_that_are_tried_leave_every_bit(pool: Pool, address: str, transport: str, workers: int) -> None:
    found = {}
    for text in ("auto(budget=60s)", "halving_doubling schedule=fixed"):
        each = [[[index, workers, address], f"{text} transport={transport}", 90, 85] for index in range(workers)]
        with pool.start(chooses, each, {"SYNCLINE_TUNING": "fresh"}) as group:
            found[text] = group.results()
    tried, plain = found.values()
    assert any("wait_free" in said for said in tried[0][0])
    assert "on the live run" in tried[0][1]
    for mine, other in zip(tried, plain, strict=True):
        assert mine[:2] == tried[0][:2]
        assert all(np.array_equal(mine[2][name], array) for name, array in other[2].items())
