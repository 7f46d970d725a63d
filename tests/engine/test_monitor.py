"""What threads share: one drives, works are counted, and the first fault is everybody's."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from syncline.engine import order
from syncline.engine.order import Monitor, Work
from syncline.errors import SynclineError

LIMIT_S = 30.0


class Driven:
    """Has nothing left to do by itself; how often it was woken."""

    idle = True
    woken = 0

    def wake(self) -> None:
        self.woken += 1


def soon() -> float:
    return time.perf_counter() + LIMIT_S


@contextlib.contextmanager
def beside(target: Callable[[], object]) -> Iterator[None]:
    """A thread beside this one, which has ended at the end."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    yield
    thread.join(LIMIT_S)
    assert not thread.is_alive()


class Sleeps(threading.Condition):
    """A condition that takes the place of one of a monitor, and knows when a thread sleeps there."""

    def __init__(self, monitor: Monitor, name: str) -> None:
        super().__init__(monitor._lock)
        self._entered = threading.Event()
        setattr(monitor, name, self)

    def wait(self, timeout: float | None = None) -> bool:
        self._entered.set()
        return super().wait(timeout)

    def await_sleeper(self) -> None:
        """Wait for one, which gives up the lock only once it stands among those to be notified."""
        assert self._entered.wait(LIMIT_S), "no thread waits"
        with self:
            pass


@pytest.fixture
def driven() -> Driven:
    return Driven()


@pytest.fixture
def monitor(driven: Driven) -> Monitor:
    return Monitor(driven)


def test_one_thread_drives_until_it_hands_over(monitor: Monitor) -> None:
    assert monitor.claim()
    assert monitor.driver == threading.get_ident()
    assert not monitor.claim()
    monitor.hand_over()
    assert monitor.claim()


def test_whoever_begins_something_first_stands_behind_what_was_handed_over(monitor: Monitor) -> None:
    monitor.hand_in(lambda: None)
    assert not monitor.claim(first=True, works=1)
    assert monitor.under_way == 1
    assert monitor.claim()


def test_there_is_something_to_drive_until_every_work_is_finished(monitor: Monitor, driven: Driven) -> None:
    works = [Work("one"), Work("tolerant", tolerant=True), Work("elsewhere")]
    for work in works[:2]:
        monitor.hand_in(lambda: None, work.tolerant)
    monitor.expect(tolerant=False)
    assert (monitor.under_way, len(monitor.inbox)) == (2, 2)
    monitor.take_up()
    for work in works:
        assert monitor.busy
        monitor.finish(work)
    assert not monitor.busy
    driven.idle = False
    assert monitor.busy


def test_the_end_does_not_wait_for_what_was_abandoned(monitor: Monitor) -> None:
    done, abandoned = Work("done"), Work("abandoned")
    for begin in (lambda: None, lambda: monitor.finish(done)):
        monitor.hand_in(begin)
    monitor.take_up()
    monitor.abandon([done, abandoned, abandoned])
    assert monitor.under_way == 0
    monitor.flush(LIMIT_S)  # at once
    assert monitor.busy
    monitor.finish(abandoned)
    assert not monitor.busy


def test_whoever_drives_is_woken_and_only_then(monitor: Monitor, driven: Driven) -> None:
    monitor.hand_in(lambda: None)
    assert driven.woken == 0
    assert monitor.claim()
    monitor.take_up()
    monitor.hand_in(lambda: None)
    assert driven.woken == 1
    monitor.hand_in(lambda: None)  # which is seen when the one before it has been taken up
    assert driven.woken == 1
    monitor.tell_driver(lambda: None)
    assert driven.woken == 2
    monitor.take_up()
    monitor.hand_in(lambda: None)
    assert driven.woken == 3


def test_the_progress_thread_drives_what_nobody_else_does(monitor: Monitor) -> None:
    work = Work("a work")

    def progress() -> None:
        while monitor.take_turn():
            monitor.take_up()
            monitor.hand_over()

    with beside(progress):
        monitor.hand_in(lambda: monitor.finish(work))
        assert monitor.wait([work], soon())
        assert work.done
        monitor.end()
    assert not monitor.claim()


def test_the_progress_thread_wakes_for_what_is_left_where_another_one_hands_over(monitor: Monitor) -> None:
    work = Work("left")

    def progress() -> None:
        if monitor.take_turn():
            monitor.take_up()
            monitor.hand_over()

    wanted = Sleeps(monitor, "_wanted")
    assert monitor.claim()
    with beside(progress):
        wanted.await_sleeper()
        monitor.hand_in(lambda: monitor.finish(work))  # which wakes whoever drives, and nobody else
        monitor.hand_over()
        assert monitor.wait([work], soon())
        assert work.done
        monitor.end()


@pytest.mark.parametrize("any_of", [False, True], ids=["all", "any"])
def test_a_fault_wakes_whoever_waits(monitor: Monitor, monkeypatch: pytest.MonkeyPatch, any_of: bool) -> None:
    monkeypatch.setattr(order, "_UNTIL_S", 2 * LIMIT_S)  # it is not to look by itself
    came: list[bool] = []

    def wait() -> None:
        if any_of:
            monitor.wait_any([Work("never")], until=lambda: False)
        else:
            assert monitor.wait([Work("never")], deadline=None)
        came.append(monitor.error is fault)

    fault, changed = SynclineError("a fault"), Sleeps(monitor, "_changed")
    with beside(wait):
        changed.await_sleeper()
        monitor.fail(fault)
    assert came == [True]


def test_nobody_gets_a_fault_before_it_is_explained_nor_another_one_meanwhile(monitor: Monitor, driven: Driven) -> None:
    work, told = Work("never"), list[Exception | None]()
    monitor.when_over(work, lambda: told.append(monitor.error))
    explained = SynclineError("explained")
    assert monitor.fail_first()
    assert not monitor.fail_first()
    with beside(lambda: monitor.fail(SynclineError("of another thread"))):
        pass
    assert not monitor.claim()
    assert not monitor.wait([work], deadline=0.0)
    assert (monitor.error, told, driven.woken) == (None, [], 0)
    monitor.explain(explained)
    monitor.explain(SynclineError("explained again"))
    assert monitor.wait([work], deadline=0.0)
    assert (monitor.error, told, driven.woken) == (explained, [explained], 1)


def test_a_wait_ends_with_its_time_and_with_a_fault(monitor: Monitor) -> None:
    work = Work("never")
    assert not monitor.wait([work], deadline=0.0)
    monitor.fail(SynclineError("a fault"))
    assert monitor.wait([work], deadline=0.0)
    monitor.wait_any([work], until=lambda: False)
    assert not work.done


def test_the_first_fault_stays_and_all_are_told(monitor: Monitor) -> None:
    told: list[str] = []

    def stumble() -> None:
        told.append("stumbles")
        raise SynclineError("of one that is told")

    first = SynclineError("the first")
    for call in (stumble, lambda: told.append("next")):
        monitor.when_over(Work("never"), call)
    monitor.fail(first)
    monitor.fail(SynclineError("another one"))
    assert (monitor.error, told) == (first, ["stumbles", "next"])
    monitor.when_over(Work("never"), lambda: told.append("late"))
    assert told[-1] == "late"
    assert not monitor.claim()


def test_who_wants_to_know_is_told_once_when_a_work_is_done(monitor: Monitor) -> None:
    work, told = Work("a work"), []
    monitor.hand_in(lambda: monitor.finish(work))
    monitor.when_over(work, lambda: told.append(work.done))
    monitor.take_up()
    monitor.fail(SynclineError("later"))
    assert told == [True]
