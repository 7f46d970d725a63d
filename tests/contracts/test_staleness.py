"""Workers of different speeds: what they are told of it, how they come together again, and the order that is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pushes import Training, expected, on_group

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
    """After different numbers of steps, twice; who has come holds up nobody, and training goes on from there."""
    steps = [2, 7, 4]

    def body(session: Session) -> Any:
        training, seen = Training(session), list[Any]()
        worker = training.start()
        for begin, times in ((0, 1), (1, 0), (1, 2)) if worker else ():
            assert worker is not None
            for step in range(begin, begin + times * steps[session.rank] - (begin > 0 and times > 0)):
                training.step(worker, step)
            session.engine.wait(*worker.consolidate())
            seen.append((np.concatenate(training.weights), worker.steps))
        found = figures(session)[0]
        session.shutdown()
        return seen, found

    results = on(f"{place} sync={mode}", body)[:WORKERS]
    for number, made in enumerate((steps, steps, [2 * count for count in steps])):
        for seen, _ in results:
            weights, clock = seen[number]
            if number < 2:
                np.testing.assert_array_equal(weights, expected(made))
            np.testing.assert_array_equal(weights, results[0][0][number][0])
            assert clock == results[0][0][number][1] >= max(steps)
    for _, staleness in results:
        assert max(staleness) <= {"asp": 99, "ssp(staleness=0)": 0, "ssp(staleness=1)": 1}[mode]


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
