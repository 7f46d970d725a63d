"""Workers of different speeds: what they are told of it, how they come together again, and the order that is kept."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from pushes import LR, SIZES, Training, expected, gradient_of, joined, on_group

from syncline.engine.trace import Recorder
from syncline.session.session import Session

WORKERS = 3
FEW = ["ps(servers=2)", "ps(servers=2, on=workers)"]
LIMIT_S = 60.0

Run = Callable[..., list[Any]]


@pytest.fixture
def on(run_on: Run) -> Run:
    """``on_group`` of so many workers, over the threads of one process."""
    return lambda strategy, body: on_group(run_on, "inproc", strategy, WORKERS, body)


def figures(session: Session) -> tuple[dict[int, int], dict[int, int], dict[int, float]]:
    stats = session.stats()
    return dict(stats.staleness), dict(stats.version_lag), dict(stats.waited_s)


@pytest.mark.parametrize("place", FEW)
def test_who_is_ahead_is_told_so_and_for_whom_it_has_waited(on: Run, place: str) -> None:
    """Rank 0 makes no step before the others wait for it at the bound; then all go on in step but for that."""
    waiting = threading.Event()

    def applied(updates: int) -> None:
        if updates == (WORKERS - 1) * 3:
            waiting.set()

    def body(session: Session) -> Any:
        training = Training(session)
        training.applied = applied
        worker = training.start()
        if worker is None:
            return None
        if session.rank == 0:
            assert waiting.wait(LIMIT_S)
        for step in range(3):
            training.step(worker, step)
        found = figures(session)
        session.shutdown()
        return found

    (first, first_lag, first_waited), *others = on(f"{place} sync=ssp(staleness=2)", body)[:WORKERS]
    assert first == {0: 3}
    assert first_lag[(WORKERS - 1) * 3] == 1
    assert 0 not in first_waited
    for staleness, lag, waited in others:
        assert staleness == {0: 1, 1: 1, 2: 1}
        assert sum(lag.values()) == 3
        assert list(waited) == [0]
        assert waited[0] > 0


@pytest.mark.parametrize("mode", ["asp", "ssp(staleness=0)", "ssp(staleness=1)"])
@pytest.mark.parametrize("place", FEW)
def test_all_have_the_same_when_they_have_consolidated(on: Run, place: str, mode: str) -> None:
    """After different numbers of steps, and again with none between; who has come holds up nobody."""
    steps, more = [2, 7, 4], [5, 8, 7]

    def body(session: Session) -> Any:
        training, seen = Training(session), list[Any]()
        worker = training.start()
        if worker is None:
            return None
        for begin, end in ((0, steps), (99, steps), (steps[session.rank], more)):
            for step in range(begin, end[session.rank]):
                training.step(worker, step)
            session.engine.wait(*worker.consolidate())
            seen.append((np.concatenate(training.weights), worker.steps))
        found = figures(session)[0]
        session.shutdown()
        return seen, found

    bound = {"asp": 99, "ssp(staleness=0)": 0, "ssp(staleness=1)": 1}[mode]
    for seen, staleness in on(f"{place} sync={mode}", body)[:WORKERS]:
        for (weights, clock), made, fastest in zip(seen, (steps, steps, more), (7, 7, 10), strict=True):
            np.testing.assert_array_equal(weights, expected(made))
            assert clock == fastest
        assert max(staleness) <= bound


def test_who_has_left_is_not_waited_for_when_the_others_consolidate(on: Run) -> None:
    def body(session: Session) -> Any:
        training = Training(session)
        worker = training.start()
        if worker is None:
            return None
        for step in range(1 + session.rank):
            training.step(worker, step)
        if session.rank > 0:
            session.engine.wait(*worker.consolidate())
        weights = np.concatenate(training.weights)
        session.shutdown()
        return weights

    _, second, third = on("ps(servers=2) sync=asp", body)[:WORKERS]
    np.testing.assert_array_equal(second, expected([1, 2, 3]))
    np.testing.assert_array_equal(third, second)


def test_late_gradients_are_compensated(on: Run) -> None:
    """By the weights that the worker was sent and those that there are, with what it clips to."""
    factor, scale, gone = 0.25, 0.5, threading.Event()

    def body(session: Session) -> Any:
        training = Training(session)
        worker = training.start()
        if worker is None:
            return None
        if session.rank == 2:
            for step in range(2):
                training.step(worker, step)
            gone.set()
        elif session.rank == 1:
            training.push(worker, 0)
            assert gone.wait(LIMIT_S)
            worker.scale = scale
            worker.step([{"lr": LR}])
            training.pull(worker)
        session.engine.wait(*worker.consolidate())
        weights = np.concatenate(training.weights)
        session.shutdown()
        return weights

    before = expected([0, 0, 2])
    late = scale * gradient_of(1, 0)
    wanted = before - LR / WORKERS * (late + factor * late**2 * (before - 1))
    for found in on(f"ps(servers=2) sync=asp(compensate={factor})", body)[:WORKERS]:
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


def drawn_at(weights: Any, rank: int, step: int) -> Any:
    """A gradient on these weights, whose sums depend on their order."""
    return np.sin(weights * (rank + 1)) + 0.1 * gradient_of(rank, step)


@pytest.mark.parametrize("place", ["ps(servers=1)", "ps(servers=2, on=workers)"])
def test_a_run_in_the_order_of_its_log_gives_the_same_bits(run_on: Run, place: str) -> None:
    """What an observer is told of owners' updates is all that there is to know of an asynchronous run."""
    recorders: dict[int, Recorder] = {}
    steps = [6, 3, 9]

    def observe(index: int) -> Recorder:
        return recorders.setdefault(index, Recorder(partial(next, itertools.count())))

    def body(session: Session) -> Any:
        training = Training(session)
        worker = training.start()
        for step in range(steps[session.rank] if worker else 0):
            gradient = drawn_at(np.concatenate(training.weights), session.rank, step)
            training.gradients[0][:], training.gradients[1][:] = gradient[:-1], gradient[-1:]
            assert worker is not None
            session.engine.wait(*[worker.push(bucket, f"bucket {bucket}") for bucket in range(2)])
            worker.step([{"lr": LR}])
            training.pull(worker)
        if worker is not None:
            session.engine.wait(*worker.consolidate())
        session.shutdown()
        return np.concatenate(training.weights), training

    found = on_group(run_on, "inproc", f"{place} sync=asp", WORKERS, body, observe=observe)
    parts = []
    for index, (_, training) in enumerate(found):
        if training.owner is None:
            continue
        log = [(span.peer, span.key, span.step) for span in recorders[index].spans("update")]
        assert [version for *_, version in log] == list(range(1, sum(steps) + 1))
        weights = np.ones(sum(SIZES))
        sent = [weights.copy() for _ in range(WORKERS)]
        for worker, clock, _ in log:
            weights -= LR / WORKERS * 1.0 * drawn_at(sent[worker], worker, clock - 1)
            sent[worker] = weights.copy()
        parts.append(np.where(np.isnan(training.owned()), np.nan, weights))
    for replica, _ in found[:WORKERS]:
        np.testing.assert_array_equal(replica, joined(parts))
