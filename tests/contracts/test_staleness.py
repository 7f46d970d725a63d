"""Workers of different speeds: what they are told of it, how they come together again, and the order that is kept."""

from __future__ import annotations

import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from pushes import LR, SIZES, Training, expected, gradient_of, joined, on_group

from recorded import Recorder
from syncline.engine.order import NOW, CodedOrder, Order, When
from syncline.errors import PeerTimeout, SynclineError
from syncline.session.session import Session

WORKERS = 3
FEW = ["ps(servers=2)", "ps(servers=2, on=workers)"]
LIMIT_S = 60.0

Run = Callable[..., list[Any]]


@pytest.fixture
def on(run_on: Run) -> Run:
    """``on_group`` of so many workers, over the threads of one process."""
    return lambda strategy, body, **options: on_group(run_on, "inproc", strategy, WORKERS, body, **options)


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
            worker.consolidate()
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
            worker.consolidate()
        weights = np.concatenate(training.weights)
        session.shutdown()
        return weights

    _, second, third = on("ps(servers=2) sync=asp", body)[:WORKERS]
    np.testing.assert_array_equal(second, expected([1, 2, 3]))
    np.testing.assert_array_equal(third, second)


def tell_late(session: Session, count: int) -> None:
    """Have this owner see that a worker has the weights that it sent as the ``count``-th once it is to send the next.

    That is what a process does which gets no turn meanwhile.
    """
    engine, sends, held, over = session.engine, Counter[str](), list[Any](), threading.Event()
    start, poll = engine.start, engine.transport.poll

    def started(order: Order | CodedOrder, when: When = NOW) -> Any:
        sends[order.label] += " to rank " in order.label
        work = start(order, when)
        if sends[order.label] == count + 1:
            engine.then("seen late", (), over.set)
        return work

    def polled(timeout: float) -> list[Any]:
        came = []
        for handle in poll(0.0 if held and over.is_set() else timeout):
            late = isinstance(handle.owner, tuple) and sends[handle.owner[0].run.label] == count and not over.is_set()
            (held if late else came).append(handle)
        if over.is_set():
            came += held
            held.clear()
        return came

    engine.start, engine.transport.poll = started, polled  # type: ignore[method-assign]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("mode", ["asp", "bsp(backup=1)"])
@pytest.mark.parametrize("place", FEW)
def test_what_owners_send_at_a_meeting_goes_behind_what_they_sent_before(
    on: Run, place: str, mode: str, count: int
) -> None:
    """Workers ask for it as soon as they have that, and push the next: before or after, its owner may know it late."""

    def body(session: Session) -> Any:
        training = Training(session)
        tell_late(session, count)
        worker = training.start()
        if worker is None:
            return None
        for step in range(2):
            training.step(worker, step)
        worker.consolidate()
        training.step(worker, 2)
        worker.consolidate()
        weights = np.concatenate(training.weights)
        session.shutdown()
        return weights

    first, *others = on(f"{place} sync={mode}", body)[:WORKERS]
    if mode == "asp":
        np.testing.assert_array_equal(first, expected([3] * WORKERS))
    for weights in others:
        np.testing.assert_array_equal(weights, first)


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
            training.tell(worker, [{"lr": LR}])
            training.pull(worker)
        worker.consolidate()
        weights = np.concatenate(training.weights)
        session.shutdown()
        return weights

    before = expected([0, 0, 2])
    late = scale * gradient_of(1, 0)
    wanted = before - LR / WORKERS * (late + factor * late**2 * (before - 1))
    for found in on(f"ps(servers=2) sync=asp(compensate={factor})", body)[:WORKERS]:
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("place", FEW)
def test_calls_that_wait_for_each_other_are_named(on: Run, place: str) -> None:
    """Rank 0 is held by the bound until rank 1 makes a step, which waits in a barrier for it."""

    def body(session: Session) -> Any:
        training = Training(session)
        worker = training.start()
        try:
            for step in range((2 if session.rank != 1 else 0) if worker else 0):
                training.step(worker, step)
            session.barrier()
        except SynclineError as error:
            return error
        return None

    found = on(f"{place} sync=ssp(staleness=0)", body, limit_s=1.0)
    named = [str(error) for error in found if isinstance(error, PeerTimeout)]
    both = [r"rank 1 for rank \d \(barrier\)", r"rank \d for rank 1 \(step 1 of the optimizer\)"]
    assert any(all(re.search(one, text) for one in both) for text in named), named  # the first, who ends it for others


def drawn_at(weights: Any, rank: int, step: int) -> Any:
    """A gradient on these weights, whose sums depend on their order."""
    return np.sin(weights * (rank + 1)) + 0.1 * gradient_of(rank, step)


@pytest.mark.parametrize("momentum", ["shared", "own", "dana"])
@pytest.mark.parametrize("place", ["ps(servers=1)", "ps(servers=2, on=workers)"])
def test_a_run_in_the_order_of_its_log_gives_the_same_bits(run_on: Run, place: str, momentum: str) -> None:
    """What an observer is told of owners' updates is all that there is to know of an asynchronous run."""
    factor = 0.0 if momentum == "shared" else 0.9
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
            session.engine.wait(*[worker.start(bucket) for bucket in range(2)])
            training.tell(worker, [{"lr": LR, "momentum": factor, "nesterov": False}])
            training.pull(worker)
        if worker is not None:
            worker.consolidate()
        session.shutdown()
        return np.concatenate(training.weights), training

    strategy = f"{place} sync=asp(momentum={momentum})"
    found = on_group(run_on, "inproc", strategy, WORKERS, body, observe=observe)
    parts = []
    for index, (_, training) in enumerate(found):
        if training.owner is None:
            continue
        log = [(span.peer, span.key, span.step) for span in recorders[index].spans("update")]
        assert [version for *_, version in log] == list(range(1, sum(steps) + 1))
        weights = np.ones(sum(SIZES))
        sent, kept = [weights.copy() for _ in range(WORKERS)], [np.zeros_like(weights) for _ in range(WORKERS)]
        for worker, clock, _ in log:
            gradient = drawn_at(sent[worker], worker, clock - 1)
            kept[worker] = factor * kept[worker] + gradient
            weights -= LR / WORKERS * (gradient + factor * kept[worker] if momentum == "dana" else kept[worker])
            sent[worker] = weights.copy()
        parts.append(np.where(np.isnan(training.owned()), np.nan, weights))
    for replica, _ in found[:WORKERS]:
        np.testing.assert_array_equal(replica, joined(parts))
