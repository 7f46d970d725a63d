"""Futures of works: each is completed when its work is over or its time is, whatever the threads that do it are at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.futures import Future

from syncline.torch_backend import works
from syncline.torch_backend.works import Completer, Promise

LIMIT_S = 20.0


class Stub:
    """Stands for a work and its engine; ``end`` is told to whoever asked."""

    def __init__(self, timeout_s: float = 1000.0) -> None:
        self.timeout_s, self.work, self.engine, self.over = timeout_s, object(), self, False
        self._call: Callable[[], None]
        self._asked = threading.Event()

    def when_over(self, _: object, call: Callable[[], None]) -> None:
        self._call = call
        self._asked.set()

    def end(self) -> None:
        assert self._asked.wait(LIMIT_S)
        self.over = True
        self._call()

    def outcome(self) -> int:
        if not self.over:
            raise TimeoutError("its time is over")
        return 7


def added(to: Completer, work: Stub) -> tuple[Future[Any], threading.Event]:
    """A future of the work, and what is set when it is completed."""
    promise, completed = Promise(), threading.Event()
    promise.future.add_done_callback(lambda _: completed.set())
    to.add(work, promise)  # type: ignore[arg-type]
    return promise.future, completed


class Watched(threading.Condition):
    """Says when a thread waits; the next wait is over at once where ``instead`` is given, which is called there."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.instead = threading.Semaphore(0), list[Callable[[], None]]()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.release()
        if self.instead:
            self.instead.pop()()
            return False
        return super().wait(timeout)


@pytest.fixture
def completer(monkeypatch: pytest.MonkeyPatch) -> tuple[Completer, Watched]:
    watched = Watched()
    monkeypatch.setattr(works.threading, "Condition", lambda: watched)
    made = Completer()
    monkeypatch.undo()
    return made, watched


def test_a_work_that_ends_while_a_thread_is_about_to_leave_is_completed(completer: tuple[Completer, Watched]) -> None:
    ours, watched = completer
    work = Stub()
    watched.instead.append(work.end)
    future, completed = added(ours, work)
    assert completed.wait(LIMIT_S)
    assert future.value() == 7


def test_a_time_limit_is_kept_while_all_threads_call_back(completer: tuple[Completer, Watched]) -> None:
    ours, watched = completer
    first, late = Stub(), Stub(timeout_s=0.3)
    promise, failed, seen = Promise(), threading.Event(), list[bool]()
    called = threading.Event()

    def waits_for_the_other(_: object) -> None:
        seen.append(failed.wait(LIMIT_S))
        called.set()

    promise.future.add_done_callback(waits_for_the_other)
    ours.add(first, promise)  # type: ignore[arg-type]
    assert watched.waits.acquire(timeout=LIMIT_S)  # the only thread has nothing to do
    other = Promise()
    other.future.add_done_callback(lambda _: failed.set())
    ours.add(late, other)  # type: ignore[arg-type]
    assert watched.waits.acquire(timeout=LIMIT_S)
    first.end()
    assert called.wait(LIMIT_S + 10)
    assert seen == [True]
    with pytest.raises(RuntimeError, match="TimeoutError: its time is over"):
        other.future.value()


def test_many_futures_at_once_start_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has looked; and it completes all of them."""
    held: list[threading.Thread] = []
    monkeypatch.setattr(works.threading.Thread, "start", lambda thread: held.append(thread))
    ours, many = Completer(), [Stub() for _ in range(50)]
    completed = [added(ours, work)[1] for work in many]
    for work in many:
        work.end()
    monkeypatch.undo()
    assert len(held) == 1
    held[0].start()
    assert all(one.wait(LIMIT_S) for one in completed)


def test_where_no_thread_can_be_started_futures_are_completed_all_the_same(
    completer: tuple[Completer, Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the interpreter ends, or the system has no more: in the thread that ends the work."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours, watched = completer
    work, later, last = Stub(), Stub(), Stub()
    promise, calling, enough = Promise(), threading.Event(), threading.Event()
    promise.future.add_done_callback(lambda _: (calling.set(), enough.wait(LIMIT_S)))
    ours.add(work, promise)  # type: ignore[arg-type]
    assert watched.waits.acquire(timeout=LIMIT_S)
    _, completed = added(ours, later)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        work.end()
        assert calling.wait(LIMIT_S)
        later.end()
        assert completed.is_set()
        with pytest.raises(RuntimeError, match="can't start new thread"):
            added(ours, Stub())
    enough.set()
    _, completed = added(ours, last)
    last.end()
    assert completed.wait(LIMIT_S)
