"""Collectives between real processes: values, types, sizes; calls that do not match; nothing left at the end."""

from __future__ import annotations

import shutil
from typing import Any

import fault_bodies
import pytest
import rank_bodies as bodies

from pool import Group, Pool


def everyone(world: int, address: str, *case: Any) -> list[list[Any]]:
    return [[[index, world, address], *case] for index in range(world)]


def failures(group: Group, *parts: str) -> None:
    """All end with a status other than 0, and each prints all the ``parts``."""
    assert all(status == 1 for status in group.end()), "\n".join(map(str, group.ranks))
    for rank in group.ranks:
        for part in parts:
            assert part in rank.printed(), f"{part!r} is not in what this one printed: {rank}"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        ("ring transport=shm", 2),
        ("direct transport=shm", 3),
        pytest.param("ring transport=tcp", 3, marks=pytest.mark.slow),
        ("double_tree transport=tcp", 4),
    ],
)
def test_collectives(pool: Pool, address: str, strategy: str, world: int) -> None:
    case = everyone(world, address, strategy)
    with pool.start(bodies.collectives, case) as group:
        sent, received = zip(*group.results(), strict=True)
    assert sum(sent) >= sum(received) > 0  # the last acknowledgements may not have been read


@pytest.mark.parametrize("strategy", ["direct transport=shm", "ring transport=tcp"])
def test_rows_and_columns_of_a_grid_communicate_beside_all_workers(pool: Pool, address: str, strategy: str) -> None:
    with pool.start(bodies.grid, everyone(4, address, strategy)) as group:
        found = group.results()
    for rank, sums in enumerate(found):
        row, column = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        assert sums == [{sum(10.0**other for other in ranks)} for ranks in (range(4), row, column)]


@pytest.mark.slow
def test_collectives_over_a_slow_line(pool: Pool, address: str) -> None:
    case = everyone(3, address, "ring transport=tcp(rate=2Gbit, delay=1ms)")
    with pool.start(bodies.collectives, case) as group:
        group.results()


def test_worlds_leave_nothing_behind(pool: Pool, address: str) -> None:
    """Started and ended again and again at one address, with alternating transports."""
    strategies = ["ring transport=shm", "ring transport=tcp", "ring transport=tcp(rate=1Gbit)"] * 2
    with pool.start(bodies.again_and_again, everyone(3, address, strategies)) as group:
        for held in group.results():
            warm, *later = held[1:]
            assert all(holding == warm for holding in later), (warm, later)
            assert warm["threads"] == 1
            assert not warm["memory"]
            assert not warm["compilers"] or shutil.which("ld") is None
            assert not warm["shared"]


def test_a_barrier_names_who_is_missing(pool: Pool, address: str) -> None:
    with pool.start(fault_bodies.late_to_barrier, everyone(3, address)) as group:
        group.hear(1)
        group.end(among=[0, 2])
        group.ranks[1].line.send("now")
        # On a busy machine, rank 0 or 2 may be late by so much too.
        failures(group, "barrier", "not reached within 0.2 s by rank ", "rank 1 (")


@pytest.mark.parametrize(
    ("calls", "parts"),
    [
        (["7", "7", "8"], ["rank 2 (", "at allreduce"]),
        (["barrier", "barrier", "7"], ["rank 2 (", "at allreduce", "at barrier"]),
        (["broadcast", "7", "7"], ["rank 0 (", "at allreduce", "at broadcast"]),
    ],
)
def test_calls_that_do_not_match_name_the_ranks(pool: Pool, address: str, calls: list[str], parts: list[str]) -> None:
    with pool.start(fault_bodies.mismatch, everyone(3, address, calls)) as group:
        failures(group, *parts)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("shape", ["'1.weight'", "(9, 8)", "(8, 8)"]),
        ("type", ["'1.weight'", "float64", "float32"]),
        ("frozen", ["'1.weight'", "frozen"]),
        ("more", ["'3.weight'", "nothing there"]),
    ],
)
def test_the_first_parameter_that_differs_is_named(pool: Pool, address: str, how: str, parts: list[str]) -> None:
    with pool.start(fault_bodies.other_models, everyone(3, address, "ring", how)) as group:
        failures(group, "rank 2 (", *parts)


def test_a_server_with_another_model_is_named(pool: Pool, address: str) -> None:
    with pool.start(fault_bodies.other_models, everyone(3, address, "ps(servers=1)", "shape")) as group:
        failures(group, "server rank 2 (", "'1.weight'")


def test_one_that_leaves_while_others_need_it_is_named(pool: Pool, address: str) -> None:
    with pool.start(fault_bodies.leaves_early, everyone(3, address)) as group:
        group.end()
        assert group.ranks[1].status == 0
        for rank in (group.ranks[0], group.ranks[2]):
            assert rank.status == 1
            assert "rank 1 (" in rank.printed()
            assert "left the run" in rank.printed()


def test_servers_pass_barriers_and_refuse_other_collectives(pool: Pool, address: str) -> None:
    """They run the script up to prepare, also where workers meet before it."""
    with pool.start(fault_bodies.server_calls, everyone(3, address)) as group:
        *workers, server = group.results()
    assert workers == ["done", "done"]
    assert "server rank 2 (" in server
    assert "after it" in server
