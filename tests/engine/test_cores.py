"""Ranks that wait for each other on one core: one of them goes where none is, and nothing stays bound."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from mapped import machine, plan_of, run_of

from syncline.engine import cores
from syncline.engine.cores import OFTEN, Cores, near, running
from syncline.engine.driver import LOOK_ONLY
from syncline.engine.messages import SPINS, Exchange
from syncline.kernels import board

PAIR = 128
"""Bytes of two cache lines, which are fetched together."""


class Machine:
    """Stands for the kernel: what a thread may run on, and what it was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: Iterable[int], together: Iterable[int]) -> None:
        self.allowed, self.told = set(allowed), list[set[int]]()
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(self.allowed))
        monkeypatch.setattr(os, "sched_setaffinity", lambda _, mask: self.told.append(set(mask)))
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        monkeypatch.setattr(cores, "near", lambda _: set(together))
        monkeypatch.setattr(cores, "running", lambda: 2)


def test_goes_to_a_core_that_no_rank_has_shown_and_is_bound_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, range(4), range(4))
    assert Cores(lambda: [2, 2, 4]).part()
    assert machine.told == [{0, 2}, {0, 1, 2, 3}]


def test_stays_where_ranks_outnumber_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {0, 1}, {0, 1})
    assert not Cores(lambda: [1, 1, 1]).part()
    assert machine.told == []


def test_stays_within_what_it_was_given_and_near_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {0, 1, 2, 3}, {0, 1})
    assert not Cores(lambda: [1, 2, 2]).part()
    assert machine.told == []
    machine.allowed = {0}
    assert not Cores(lambda: [1]).part()
    assert machine.told == []


def test_stays_where_others_compute_on_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, range(4), range(4))
    monkeypatch.setattr(cores, "running", lambda: 5)
    assert not Cores(lambda: [2, 2]).part()
    assert machine.told == []


def test_moves_only_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, range(4), range(4))
    ours = Cores(lambda: [2, 2])
    assert ours.part()
    assert not ours.part()


def test_a_kernel_that_refuses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, range(4), range(4))

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert not Cores(lambda: [2, 2]).part()


def refusing(machine: Machine, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The kernel has no memory for that so often, but the first time."""
    left = [None, *[OSError(12, "Cannot allocate memory")] * times]

    def told(_: int, mask: set[int]) -> None:
        if left and (error := left.pop(0)):
            raise error
        machine.told.append(set(mask))

    monkeypatch.setattr(os, "sched_setaffinity", told)


def test_a_kernel_that_does_not_let_it_back_at_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, range(4), range(4))
    refusing(machine, monkeypatch, 2)
    assert Cores(lambda: [2, 2]).part()
    assert machine.told[-1] == {0, 1, 2, 3}


def test_a_thread_that_stays_bound_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(monkeypatch, range(4), range(4))
    refusing(machine, monkeypatch, 100)
    assert Cores(lambda: [2, 2]).part()
    assert machine.told == [{0, 2, 3}]
    assert "runs on cores [0, 2, 3] only" in caplog.text
    assert "does not let it back to [0, 1, 2, 3]: [Errno 12]" in caplog.text


def test_a_kernel_that_does_not_tell_of_its_memory_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    monkeypatch.setattr(cores, "_NODES", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert near(0) == {0, 1, 2, 3}
    (tmp_path / "node0" / "cpulist").write_text("what?")
    assert near(0) == {0, 1, 2, 3}


def test_knows_the_cores_of_this_machine_and_what_runs() -> None:
    here = os.sched_getaffinity(0)
    assert all(core in near(core) for core in here)
    assert near(1 << 20) >= here
    assert running() >= 1


def test_where_a_rank_waits_shares_no_cache_line_with_what_others_read() -> None:
    assert board.CORE % PAIR == 0
    assert board.TABLES + 8 * board.MORE_TABLES <= board.CORE <= board.BOARD_HEAD - PAIR


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Exchange], list[int]]]:
    """Two ranks that wait on one core, and how often one wanted to leave it."""
    allowed = os.sched_getaffinity(0)
    parted = list[int]()
    monkeypatch.setattr(Cores, "part", lambda _: parted.append(1))
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with machine(2) as ends:
            exchanges = [Exchange(end, segment_bytes=4096) for end in ends]
            wait_once(exchanges, 0)
            parted.clear()
            yield exchanges, parted
    finally:
        os.sched_setaffinity(0, allowed)


def wait_once(exchanges: list[Exchange], times: int, spins: int = SPINS) -> None:
    """Run an allreduce, for which rank 0 waits and looks so many times."""
    runs = [run_of(plan_of("direct", 2), rank, np.ones(8)) for rank in range(2)]
    exchanges[0].start(runs[0])
    for _ in range(times):
        exchanges[0].progress(0.0, spins)
    exchanges[1].start(runs[1])
    for _ in range(200):
        if not all(run.done for run in runs):
            for exchange in exchanges:
                exchange.progress(0.0, spins)
    assert all(run.done for run in runs)


def test_one_long_wait_for_a_rank_on_the_same_core_is_one(together: tuple[list[Exchange], list[int]]) -> None:
    exchanges, parted = together
    wait_once(exchanges, 10 * OFTEN)
    assert parted == []
    for _ in range(OFTEN):
        wait_once(exchanges, 1)
    assert parted


def test_who_only_looks_does_not_wait(together: tuple[list[Exchange], list[int]]) -> None:
    exchanges, parted = together
    for _ in range(2 * OFTEN):
        wait_once(exchanges, 5, spins=0)
        wait_once(exchanges, 5, spins=LOOK_ONLY)
    assert parted == []
