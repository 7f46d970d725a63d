"""Ranks that wait for each other on one core: one of them goes where none is, and nothing stays bound."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

from syncline.engine import cores
from syncline.engine.cores import Cores, near, running


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


def test_knows_the_cores_of_this_machine_and_what_runs() -> None:
    here = os.sched_getaffinity(0)
    assert all(core in near(core) for core in here)
    assert near(1 << 20) >= here
    assert running() >= 1
