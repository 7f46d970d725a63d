"""Real processes that take their batches from one pool: a slow one does fewer, and every sample counts once."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import sampling_bodies as bodies

from pool import Pool

SAMPLES, MANY, LIMIT_S = 64, 1 << 16, 10.0


@pytest.mark.parametrize("place", ["ps(servers=1)", "ps(servers=1, on=workers)"])
def test_a_slow_worker_does_fewer_batches(pool: Pool, address: str, place: str) -> None:
    processes = 2 if "workers" in place else 3
    case = [[[index, processes, address], f"{place} sync=asp", SAMPLES] for index in range(processes)]
    with pool.start(bodies.train_unevenly, case) as group:
        group.hear(1, among=[1])  # it has a batch, and holds on to it
        group.hear(1, among=[0])  # the other one has done all others, but for the one that was asked for ahead
        group.ranks[1].line.send("go on")
        (first, weights), (second, same) = group.results()[:2]
    assert sorted(first + second) == list(range(2 * SAMPLES))
    assert len([sample for sample in second if sample < SAMPLES]) == 4
    np.testing.assert_array_equal(weights, np.full(SAMPLES, 2 * bodies.Descent().lr / 2))
    np.testing.assert_array_equal(same, weights)


@pytest.mark.parametrize("victim", [0, 1])
def test_everyone_names_who_dies_with_batches_in_hand(pool: Pool, address: str, victim: int) -> None:
    """Whether it keeps the pool or takes from it."""
    case = [[[index, 2, address], "ps(servers=1, on=workers) sync=asp", MANY] for index in range(2)]
    with pool.start(bodies.train_unevenly, case) as group:
        group.hear(1, among=[1])
        if victim == 0:
            group.ranks[1].line.send("go on")
        os.kill(group.ranks[victim].pid, signal.SIGKILL)
        group.end(LIMIT_S)
        other = group.ranks[1 - victim]
        assert other.status == 1, other
        assert f"rank {victim} (" in other.printed(), other
        assert f"pid {group.ranks[victim].pid})" in other.printed(), other


@pytest.mark.parametrize("place", ["ps(servers=1)", "ps(servers=1, on=workers)"])
def test_who_keeps_the_pool_may_leave_and_holds_up_nobody(pool: Pool, address: str, place: str) -> None:
    """It stays for the others' batches, and owners of the weights know that no step waits for it."""
    processes = 2 if "workers" in place else 3
    case = [[[index, processes, address], f"{place} sync=ssp(staleness=0)", 12] for index in range(processes)]
    with pool.start(bodies.leave_early, case) as group:
        first, second = group.results(LIMIT_S)[:2]
    assert len(first) == 1
    assert len(second) == 10  # rank 0 had asked for one more
    assert len({*first, *second}) == 11
