"""Processes that ranks start themselves hold none of the run's connections and cannot disturb it."""

from __future__ import annotations

import pytest
import rank_bodies as bodies

from pool import Pool


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_data_loader_workers_by_fork(pool: Pool, address: str, transport: str) -> None:
    loads(pool, address, transport, "fork")


@pytest.mark.slow
def test_data_loader_workers_by_spawn(pool: Pool, address: str) -> None:
    loads(pool, address, "shm", "spawn")


def loads(pool: Pool, address: str, transport: str, method: str) -> None:
    case = [f"ring transport={transport}", method]
    with pool.start(bodies.loads_data, [[[index, 2, address], *case] for index in range(2)]) as group:
        for held, seen in group.results():
            assert held >= 2  # control and data
            assert len(seen) == 4
            for forked, inherited, said in seen:
                assert forked
                assert inherited == 0
                expected = "forked from one that uses Syncline" if method == "fork" else "call syncline.init() first"
                assert expected in said


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_forked_child_gets_a_clear_error_and_does_no_harm(pool: Pool, address: str, transport: str) -> None:
    case = [[[index, 2, address], f"ring transport={transport}"] for index in range(2)]
    with pool.start(bodies.forks, case) as group:
        for said, status in group.results():
            assert len(said) == 3
            assert all("only the parent can communicate" in text for text in said)
            assert status == 1  # of its own exception
        for rank in group.ranks:
            assert "the child ends with an exception of its own" in rank.printed()
