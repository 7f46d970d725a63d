"""How fast workers compute, under a clock that only moves when it is told to: floors, a slow worker, stalls, waits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.nouns import Seconds
from syncline_bench.workloads import EVEN, Speed, Tempo, load
from syncline_bench.workloads._speed import CARRIED_S, INTERPRETER_S, Pacer

spans = st.floats(1e-4, 0.2)
parts = st.tuples(spans, spans, st.floats(0, 0.2))
"""A step's forward pass, its backward pass, and for how long that is blocked in communication."""


class Worker:
    """A training thread with a clock of its own: what it computes, sleeps and waits is told apart."""

    def __init__(self, speed: Speed, rank: int = 0, seed: int = 0, replayed_s: float | None = None) -> None:
        self.at, self.slept, self.blocked = 100.0, 0.0, 0.0
        self.counts = True
        self.tempo = Tempo(
            speed, rank, seed, replayed_s, lambda: self.at, lambda: self.blocked if self.counts else None, self.sleep
        )

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept += seconds
        self.at += seconds

    def step(self, forward: float, backward: float, wait: float = 0.0) -> float:
        """One step; the seconds that it took, those that it was blocked left out."""
        begun, blocked = self.at, self.blocked
        self.tempo.begin()
        self.at += forward
        self.tempo.forward_ended()
        self.tempo.backward_begins()
        self.at += backward + wait
        self.blocked += wait
        self.tempo.backward_ended()
        return self.at - begun - (self.blocked - blocked)


@given(st.lists(parts, min_size=1, max_size=8), st.floats(0, 0.5))
def test_a_step_computes_for_as_long_as_said_and_waits_come_on_top(
    steps: list[tuple[float, ...]], least: float
) -> None:
    worker = Worker(Speed(step=Seconds(least)))
    for forward, backward, wait in steps:
        assert worker.step(forward, backward, wait) >= max(least, forward + backward) - 1e-9
    worker = Worker(Speed(step=Seconds(least)))
    even = [worker.step(0.01, 0.02, wait) for _, _, wait in steps]
    assert even[1:] == pytest.approx([max(least, 0.03)] * (len(steps) - 1))


@given(st.lists(parts, min_size=2, max_size=8), st.floats(1, 20))
def test_the_slow_worker_takes_so_many_times_as_long_and_its_waits_do_not(
    steps: list[tuple[float, ...]], slowdown: float
) -> None:
    speed = Speed(slow_rank=1, slowdown=slowdown) if slowdown > 1 else EVEN
    other, slow = Worker(speed, rank=0), Worker(speed, rank=1)
    for _, _, wait in steps:
        assert other.step(0.01, 0.02, wait) == pytest.approx(0.03)
        assert slow.step(0.01, 0.02, wait) == pytest.approx(0.03 * slowdown)
    assert other.slept == 0


def test_most_of_the_time_has_passed_before_a_gradient_is_ready() -> None:
    """Or a slow worker would hand its gradients over as early as the others."""
    worker = Worker(Speed(step=Seconds(0.3)))
    for _ in range(3):
        begun = worker.at
        worker.tempo.begin()
        worker.at += 0.01
        worker.tempo.forward_ended()
        worker.tempo.backward_begins()
        before = worker.at - begun
        worker.at += 0.02
        worker.tempo.backward_ended()
    assert before == pytest.approx(0.28)
    assert worker.at - begun == pytest.approx(0.3)


def test_where_nobody_counts_waits_the_shortest_backward_pass_is_taken_for_computation() -> None:
    worker = Worker(Speed(slow_rank=0, slowdown=2.0))
    worker.counts = False
    worker.step(0.01, 0.02)
    slept = worker.slept
    worker.step(0.01, 0.02, wait=5.0)
    assert worker.slept - slept == pytest.approx(0.03)


@given(st.integers(0, 5), st.integers(0, 5), st.floats(0.1, 3))
def test_stalls_follow_from_seed_and_rank(seed: int, rank: int, jitter: float) -> None:
    speed = Speed(step=Seconds(0.1), jitter=jitter)

    def steps(rank: int) -> list[float]:
        worker = Worker(speed, rank, seed)
        return [worker.step(0.01, 0.01) for _ in range(5)]

    assert steps(rank) == steps(rank) != steps(rank + 1)


@pytest.mark.parametrize("replayed_s", [None, 0.1])
def test_stalls_are_as_long_as_steps_in_the_mean(replayed_s: float | None) -> None:
    worker = Worker(Speed(step=Seconds(0.2), jitter=1.5), replayed_s=replayed_s)
    worker.step(0.05, 0.1)
    stalls = np.array([worker.step(0.05, 0.1) for _ in range(4000)]) - (0.2 if replayed_s is None else 0.15)
    assert stalls.mean() == pytest.approx(1.5 * 0.2, rel=0.1)
    assert np.median(stalls) == pytest.approx(1.5 * 0.2 * np.log(2), rel=0.1)


def test_a_replay_is_stretched_and_only_its_stalls_are_slept() -> None:
    speed = Speed(step=Seconds(0.3), slow_rank=2, slowdown=3.0)
    assert (speed.stretch(0, 0.1), speed.stretch(2, 0.1), speed.stretch(2, 0.6)) == pytest.approx((3.0, 9.0, 3.0))
    worker = Worker(speed, 2, replayed_s=0.1)
    worker.step(0.1, 0.2)
    assert worker.slept == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("digits(step=-1ms)", "step of digits cannot be negative"),
        ("digits(step=61min)", "step must be a time from 0s to 1h"),
        ("digits(slow_rank=-1, slowdown=3)", "slow_rank must be a rank from 0 up"),
        ("digits(slow_rank=1)", "slow_rank=1 needs a slowdown: add slowdown=3"),
        ("digits(slowdown=3)", "slowdown=3 slows down one worker: add slow_rank=0 to choose it"),
        ("digits(slow_rank=1, slowdown=0.5)", "slowdown must be a number from 1"),
        ("digits(slow_rank=1, slowdown=0)", "slowdown must be a number from 1"),
        ("digits(slow_rank=1, slowdown=-3)", "slowdown must be a number from 1"),
        ("digits(slow_rank=1, slowdown=1000.5)", "slowdown must be a number from 1"),
        ("digits(slow_rank=one, slowdown=3)", "slow_rank of digits must be a whole number"),
        ("digits(jitter=-1)", "jitter must be a number of steps from 0"),
        ("digits(jitter=1001)", "jitter must be a number of steps from 0"),
        ("replay:googlenet(slowdwon=3)", "did you mean 'slowdown'"),
    ],
)
def test_wrong_values_are_refused_with_the_remedy(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load(text)


@pytest.mark.parametrize("text", ["digits", "synthetic:alexnet", "replay:googlenet"])
def test_every_workload_takes_them_and_says_so_in_its_name(text: str) -> None:
    found = load(f"{text}(slowdown=3.0, step=0.03, slow_rank=1, jitter=0.5)")
    assert found.speed == Speed(Seconds(0.03), 1, 3.0, 0.5)
    assert found.name == f"{text}(step=30ms, slow_rank=1, slowdown=3.0, jitter=0.5)"
    assert load(found.name).speed == found.speed
    assert load(text).speed.even


def test_the_slow_worker_is_one_of_the_workers() -> None:
    speed = Speed(slow_rank=3, slowdown=3.0)
    speed.check(4)
    with pytest.raises(UsageError, match="slow_rank=3 is not one of 3 workers, whose ranks are 0 to 2"):
        speed.check(3)
    with pytest.raises(UsageError, match="not one of one worker, rank 0"):
        speed.check(1)


# The clock of a replay under a clock that only moves when it is told to: sleeps that end late, waits, held-up w


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
