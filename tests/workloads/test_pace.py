"""The clock of a replay under a clock that only moves when it is told to: sleeps that end late, waits, held-up work."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.workloads._pace import CARRIED_S, INTERPRETER_S, Pacer

durations = st.lists(st.floats(1e-5, 0.05), min_size=1, max_size=40)
late = st.lists(st.floats(0, 0.01), max_size=40)


class FakeClock:
    """Seconds that pass in sleeps, each ending as late as told (then on time), and where a test says so."""

    def __init__(self, late: Iterator[float]) -> None:
        self.at = 100.0
        self._late = chain(late, repeat(0.0))

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.at += seconds + next(self._late)


def pacer_of(late: list[float] | None = None) -> tuple[Pacer, FakeClock]:
    clock = FakeClock(iter(late or []))
    return Pacer(clock.now, clock.sleep), clock


@given(durations, late)
def test_late_sleeps_do_not_add_up(works: list[float], lates: list[float]) -> None:
    pacer, clock = pacer_of(lates)
    begun = clock.at
    ends = []
    for work in works:
        pacer.begin()
        pacer.finish(work)
        ends.append(clock.at - begun)
    # Each end is late by one sleep's lateness at most, whatever happened before it.
    for count, end in enumerate(ends, 1):
        assert sum(works[:count]) - 1e-9 <= end <= sum(works[:count]) + max(lates, default=0.0) + 1e-9


@given(st.lists(st.tuples(st.floats(1e-5, 0.05), st.floats(2 * INTERPRETER_S, 1.0)), min_size=1, max_size=20), late)
def test_waits_count_in_full(stretches: list[tuple[float, float]], lates: list[float]) -> None:
    pacer, clock = pacer_of(lates)
    begun = clock.at
    for work, wait in stretches:
        pacer.begin()
        pacer.finish(work)
        clock.at += wait
    total = sum(work + wait for work, wait in stretches)
    assert total - 1e-9 <= clock.at - begun <= total + max(lates, default=0.0) + 1e-9


def test_the_interpreters_pauses_are_made_up_for() -> None:
    pacer, clock = pacer_of()
    begun = clock.at
    for _ in range(100):
        pacer.begin()
        pacer.finish(0.002)
        clock.at += 0.9 * INTERPRETER_S
    assert clock.at - begun == pytest.approx(0.2 + 0.9 * INTERPRETER_S)


def test_work_inside_a_stretch_is_part_of_it_and_too_much_of_it_is_made_up_for() -> None:
    pacer, clock = pacer_of()
    begun = clock.at
    for inside in (0.004, 0.030, 0.0, 0.0, 0.0):
        pacer.begin()
        clock.at += inside
        pacer.finish(0.010)
    assert clock.at - begun == pytest.approx(0.050)


def test_an_iteration_is_not_made_shorter_by_one_that_was_held_up() -> None:
    pacer, clock = pacer_of([3.0])
    pacer.begin()
    pacer.finish(0.010)
    begun = clock.at
    pacer.new_iteration()
    for _ in range(4):
        pacer.begin()
        pacer.finish(0.010)
    assert clock.at - begun == pytest.approx(0.040 - CARRIED_S)


def test_a_stretch_of_no_time_needs_no_sleep() -> None:
    pacer, clock = pacer_of()
    pacer.begin()
    pacer.finish(0.0)
    assert clock.at == 100.0
