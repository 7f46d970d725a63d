"""A waiting thread drives the engine, one at a time; other code may complete works."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mapped import make
from two_engines import LIMIT_S, engines

from syncline import registry
from syncline.engine import driver
from syncline.engine import exchange as exchange_module
from syncline.engine.engine import Engine
from syncline.engine.order import Order, When
from syncline.errors import ClosedError, PeerTimeout, SynclineError, UsageError
from syncline.nouns import Group
from syncline.plans.messages import Program, compile_program
from syncline.transports import Transport
from syncline.transports.inproc import Hub, InProc

DRIVING_LIMIT_S = 30.0


def program(rank: int, world: int = 2) -> Program:
    return _programs[world][rank]


_programs = {
    world: [compile_program(plan, rank) for rank in range(world)]
    for world, plan in ((count, registry.get("algorithms", "direct").target(Group(count))) for count in (2, 3))
}


def ends(kind: str, world: int) -> list[Transport]:
    if kind == "shm":
        return list(make(world))
    hub = Hub(world)
    return [hub.transport(rank) for rank in range(world)]


@contextlib.contextmanager
def driving_engines(kind: str, world: int = 2) -> Iterator[list[Engine]]:
    made = [Engine(end) for end in ends(kind, world)]
    try:
        yield made
    finally:
        for engine in made:
            engine.fail(ClosedError("the test is over"))
        for engine in made:
            engine.close()
            assert not engine._thread.is_alive()


@pytest.fixture(params=["inproc", "shm"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of transport; in shared memory whoever sleeps goes on doing so until it is rung."""
    monkeypatch.setattr(exchange_module, "PATIENCE_MS", int(10 * DRIVING_LIMIT_S * 1000))
    return str(request.param)


@contextlib.contextmanager
def thread(target: Callable[[], Any]) -> Iterator[list[BaseException]]:
    """A thread beside this one that has ended at the end; what it raised."""
    faults: list[BaseException] = []

    def body() -> None:
        try:
            target()
        except BaseException as error:
            faults.append(error)

    running = threading.Thread(target=body, daemon=True)
    running.start()
    yield faults
    running.join(DRIVING_LIMIT_S)
    assert not running.is_alive()


def test_a_thread_that_waits_drives_itself() -> None:
    drivers: list[threading.Thread] = []
    with driving_engines("inproc") as (one, two):
        two.start(Order(program(1), np.ones(3), 0, "sum"))
        work = one.start(
            Order(program(0), np.ones(3), 0, "sum"),
            When(before=lambda: drivers.append(threading.current_thread()), announce=False),
        )
        one.wait(work, timeout=DRIVING_LIMIT_S)
    assert drivers == [threading.current_thread()]


def test_what_another_thread_posts_is_done_by_the_one_that_drives(kind: str) -> None:
    """The driver waits for what comes last of all; nobody may wait for it to wake up by itself."""
    with driving_engines(kind) as (one, two):
        last = one.start(Order(program(0), np.ones(3), 0, "last"), When(announce=False))
        with thread(lambda: one.wait(last, timeout=DRIVING_LIMIT_S)) as faults:
            for key in range(1, 20):
                works = [
                    engine.start(Order(program(rank), np.ones(3), key, "between"))
                    for rank, engine in enumerate((one, two))
                ]
                one.wait(works[0], timeout=DRIVING_LIMIT_S)
                two.wait(works[1], timeout=DRIVING_LIMIT_S)
            two.run(Order(program(1), np.ones(3), 0, "last"))
        assert faults == []


def test_a_fault_found_elsewhere_wakes_the_thread_that_drives(kind: str) -> None:
    with driving_engines(kind) as (one, _):
        started = threading.Event()
        work = one.start(Order(program(0), np.ones(3), 0, "sum"), When(before=started.set, announce=False))
        fault = SynclineError("found by the watcher")
        with thread(lambda: one.wait(work)) as faults:
            assert started.wait(DRIVING_LIMIT_S)
            one.fail(fault)
        assert faults == [fault]


def test_a_wait_ends_with_its_time_while_it_drives() -> None:
    with driving_engines("shm") as (one, _):
        work = one.start(Order(program(0), np.ones(3), 0, "sum"), When(announce=False))
        with pytest.raises(PeerTimeout, match=r"sum: not done within 0\.01 s"):
            one.wait(work, timeout=0.01)
        assert one.error is None
        assert one.awaited == {1}


class Clogged(InProc):
    """Always has something left to write, while it is said to."""

    clogged = True

    @property
    def idle(self) -> bool:
        return not self.clogged


def test_a_wait_ends_though_the_transport_has_more_to_write() -> None:
    """Neither what is not done in time nor what is done waits for the messages of others."""
    hub = Hub(2)
    transport = Clogged(hub, 0)
    one, two = Engine(transport), Engine(hub.transport(1))
    try:
        for name in ("driving", "beside the driver"):
            late = one.start(Order(program(0), np.ones(3), 0 if name == "driving" else 1, name), When(announce=False))
            with pytest.raises(PeerTimeout, match=name):
                one.wait(late, timeout=0.0)
        done = [engine.start(Order(program(rank), np.ones(3), 2, "sum")) for rank, engine in enumerate((one, two))]
        one.wait(done[0], timeout=DRIVING_LIMIT_S)
    finally:
        transport.clogged = False
        for engine in (one, two):
            engine.fail(ClosedError("the test is over"))
            engine.close()


def test_a_run_that_the_end_cuts_short_does_not_return_as_if_it_were_done(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_FLUSH_S", 0.05)
    one, two = (Engine(end) for end in ends(kind, 2))
    with thread(lambda: one.run(Order(program(0), np.ones(3), 0, "sum"))) as faults:
        while not one.monitor.under_way:
            pass
        one.close()
    assert [type(fault) for fault in faults] == [ClosedError]
    two.close()
    for engine in (one, two):
        engine._thread.join(DRIVING_LIMIT_S)
        assert not engine._thread.is_alive()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage is collected: what a handler raises in what others have hung on a collection reaches nobody."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("of", ["inproc", "shm"])
def test_an_interrupt_ends_the_wait_and_the_engine(of: str) -> None:
    with driving_engines(of) as (one, _):
        started = threading.Event()

        def interrupt() -> None:
            started.wait(DRIVING_LIMIT_S)
            os.kill(os.getpid(), signal.SIGINT)

        while one.monitor.driver or not one.transport.idle:
            pass  # the first words of a transport: the progress thread says them
        work = one.start(Order(program(0), np.ones(3), 0, "sum"), When(before=started.set, announce=False))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        try:
            with pytest.raises(KeyboardInterrupt), thread(interrupt):
                one.wait(work, timeout=DRIVING_LIMIT_S)
        finally:
            signal.signal(signal.SIGINT, before)
        with pytest.raises(ClosedError, match="interrupted by KeyboardInterrupt"):
            one.wait()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("any_of", [False, True], ids=["all", "any"])
@pytest.mark.parametrize("how", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_while_another_thread_drives_ends_the_engine_too(
    monkeypatch: pytest.MonkeyPatch, kind: str, how: type[BaseException], any_of: bool
) -> None:
    """Ctrl-C, or an exception out of a handler for another signal: a script may catch both."""

    def handle(number: int, frame: object) -> None:  # noqa: ARG001
        raise how

    before = signal.signal(signal.SIGUSR1, handle)
    told: list[Exception] = []
    with driving_engines(kind) as (one, _):
        monkeypatch.setattr(one, "_explain", lambda error: told.append(error) or error)
        asleep = threading.Event()
        driving = threading.get_ident()
        work = one.start(Order(program(0), np.ones(3), 0, "sum"))
        while one.monitor.driver in (0, driving):
            pass  # the progress thread takes it

        def doze(*_: object) -> None:
            """In short waits: a signal just before one is handled after it only."""
            asleep.set()
            for _ in range(int(DRIVING_LIMIT_S / 0.01)):
                threading.Event().wait(0.01)

        monkeypatch.setattr(one.monitor._changed, "wait_for", doze)
        monkeypatch.setattr(one.monitor._changed, "wait", doze)

        def interrupt() -> None:
            asleep.wait(DRIVING_LIMIT_S)
            os.kill(os.getpid(), signal.SIGUSR1)

        wait = (lambda: one.wait_any([work], until=lambda: False)) if any_of else (lambda: one.wait(work))
        with pytest.raises(how), thread(interrupt):
            wait()
        monkeypatch.undo()
        for call in (lambda: one.wait(work), lambda: one.start(Order(program(0), np.ones(3), 1, "next"))):
            with pytest.raises(ClosedError, match=f"interrupted by {how.__name__}"):
                call()
        assert [type(error) for error in told] == [ClosedError]  # and so the others learn of it
    signal.signal(signal.SIGUSR1, before)


def test_a_run_is_driven_though_the_driver_stops_before_it_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with driving_engines("inproc") as (one, two):
        one.start(Order(program(0), np.ones(3), 0, "of the progress thread"))
        while not one.monitor.driver:
            pass  # the progress thread takes it
        start = one.start

        def start_after_it(*given: Any, **options: Any) -> Any:
            two.run(Order(program(1), np.ones(3), 0, "of the progress thread"))
            while one.monitor.driver:
                pass  # it hands over
            return start(*given, **options)

        monkeypatch.setattr(one, "start", start_after_it)
        two.start(Order(program(1), np.ones(3), 1, "sum"))
        array, blocked_s = np.ones(3), one.blocked_s
        with thread(lambda: one.run(Order(program(0), array, 1, "sum"))) as faults:
            pass
        assert faults == []
        assert (array == 2).all()
        assert one.blocked_s > blocked_s


@pytest.mark.parametrize("waits", [False, True], ids=["run", "wait"])
def test_an_interrupt_where_a_thread_stops_to_drive_leaves_no_driver(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    with driving_engines("inproc") as (one, two):
        hand_over, calls = one.monitor.hand_over, iter((KeyboardInterrupt,))

        def interrupted() -> None:
            if threading.current_thread() is threading.main_thread():
                for error in calls:
                    raise error
            hand_over()

        monkeypatch.setattr(one.monitor, "hand_over", interrupted)
        two.start(Order(program(1), np.ones(3), 0, "sum"))
        work = one.start(Order(program(0), np.ones(3), 0, "sum"), When(announce=False)) if waits else None
        with pytest.raises(KeyboardInterrupt):
            one.run(Order(program(0), np.ones(3), 0, "sum")) if work is None else one.wait(work)
        assert one.monitor.driver != threading.get_ident()
        with pytest.raises(ClosedError, match="interrupted by KeyboardInterrupt"):
            one.run(Order(program(0), np.ones(3), 1, "next"))


def test_a_fault_that_comes_while_an_interrupt_is_explained_is_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with driving_engines("inproc") as (one, _):
        explained, asked = ClosedError("explained"), list[Exception | None]()

        def explain(_: Exception) -> Exception:
            with thread(lambda: one.fail(SynclineError("of another thread"))):
                pass
            asked.append(one.error)
            return explained

        monkeypatch.setattr(one, "_explain", explain)
        one.interrupted(KeyboardInterrupt())
        assert (one.error, asked) == (explained, [None])


def test_an_interrupt_of_the_explanation_leaves_the_fault_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(_: Exception) -> Exception:
        raise KeyboardInterrupt

    with driving_engines("inproc") as (one, _):
        monkeypatch.setattr(one, "_explain", explain)
        with pytest.raises(KeyboardInterrupt):
            one.interrupted(TimeoutError())
        with pytest.raises(ClosedError, match="interrupted by TimeoutError"):
            one.wait()


def test_a_work_that_ends_as_the_time_of_its_wait_does_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    with driving_engines("inproc") as (one, _):
        work = one.promise("late")

        def expire(*_: object) -> bool:
            one.monitor.finish(work)
            return False

        monkeypatch.setattr(one, "_drive_here", lambda *_: False)
        monkeypatch.setattr(one.monitor, "wait", expire)
        one.wait(work, timeout=0.0)
        assert work.done


def test_an_interrupt_after_a_fault_blames_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with driving_engines("inproc") as (one, _):
        told: list[Exception] = []
        monkeypatch.setattr(one, "_explain", lambda error: told.append(error) or error)
        fault = SynclineError("of a peer")
        one.fail(fault)
        one.interrupted(KeyboardInterrupt())
        assert (one.error, told) == (fault, [])


@pytest.mark.parametrize("waits", [False, True], ids=["run", "wait"])
def test_a_call_out_of_a_handler_is_refused_while_its_thread_drives(kind: str, waits: bool) -> None:
    """A handler that saves a checkpoint, say; the call that it came into goes on, with one thread that drives."""
    refused: list[tuple[str, bool]] = []
    handled = threading.Event()

    def handle(number: int, frame: object) -> None:  # noqa: ARG001
        try:
            if waits:
                one.wait(one.start(Order(program(0), np.ones(3), 1, "checkpoint")))
            else:
                one.run(Order(program(0), np.ones(3), 1, "checkpoint"))
        except UsageError as error:
            refused.append((str(error), one.monitor.driver == threading.get_ident()))
        handled.set()

    before = signal.signal(signal.SIGUSR1, handle)
    with driving_engines(kind) as (one, two):
        main = threading.get_ident()

        def interrupt() -> None:
            while one.monitor.driver != main:
                pass
            os.kill(os.getpid(), signal.SIGUSR1)
            one.transport.wake()  # a signal that another thread has taken is handled when the main one runs next
            handled.wait(DRIVING_LIMIT_S)
            two.run(Order(program(1), np.ones(3), 0, "sum"))

        while one.monitor.driver or not one.transport.idle:
            pass  # the first words of a transport: the progress thread says them
        array = np.ones(3)
        with thread(interrupt) as faults:
            one.run(Order(program(0), array, 0, "sum"))
        assert faults == []
        assert (array == 2).all()
        assert one.error is None
    signal.signal(signal.SIGUSR1, before)
    [(text, still_drives)] = refused
    assert "from a signal handler" in text
    assert still_drives


@pytest.mark.parametrize("world", [2, 3])
def test_threads_may_share_an_engine(kind: str, world: int) -> None:
    """Each thread runs and waits for sums of its own; whoever comes first drives for all."""
    threads, rounds = 3, 30
    with driving_engines(kind, world) as made, contextlib.ExitStack() as stack:

        def work(engine: Engine, rank: int, number: int) -> None:
            for i in range(rounds):
                array = np.full(number + 1, rank + 1.0)
                if i % 2:
                    engine.run(Order(program(rank, world), array, number, "sum"))
                else:
                    engine.wait(
                        engine.start(Order(program(rank, world), array, number, "sum"), When(announce=i % 4 == 0))
                    )
                assert (array == world * (world + 1) / 2).all()

        faults = [
            stack.enter_context(thread(lambda one=engine, rank=rank, number=number: work(one, rank, number)))
            for rank, engine in enumerate(made)
            for number in range(threads)
        ]
        stack.close()
        assert not any(faults)


def test_a_promise_is_done_when_it_is_fulfilled_from_any_thread() -> None:
    with engines() as (engine, _):
        promised = engine.promise("a copy")
        with pytest.raises(PeerTimeout, match="a copy: not done within"):
            engine.wait(promised, timeout=0.01)
        thread = threading.Thread(target=lambda: engine.fulfil(promised))
        thread.start()
        engine.wait(promised, timeout=LIMIT_S)
        thread.join()


def test_what_follows_several_works_is_called_once_after_all_of_them() -> None:
    called = []
    with engines() as (engine, _):
        first, second, gate = (engine.promise(name) for name in ("first", "second", "gate"))
        after = engine.then("after", [first, second], lambda: called.append("after"))
        last = engine.then("last", [after, gate])
        engine.fulfil(second)
        engine.fulfil(gate)
        engine.wait(second, gate, timeout=LIMIT_S)
        assert not after.done
        assert called == []
        engine.fulfil(first)
        engine.wait(last, timeout=LIMIT_S)
        assert len(called) == 1


def test_any_number_of_works_that_are_done_may_be_followed() -> None:
    """As by the update of all buckets at once, of which there may be thousands."""
    called = []
    with engines() as (engine, _):
        before = [engine.then("a push", []) for _ in range(3000)]
        engine.wait(*before, timeout=LIMIT_S)
        engine.wait(engine.then("the update", before, lambda: called.append("update")), timeout=LIMIT_S)
    assert called == ["update"]


def test_a_fault_in_what_follows_reaches_who_waits() -> None:
    def fail() -> None:
        raise ValueError("the device is full")

    with engines() as (engine, _), pytest.raises(ValueError, match="the device is full"):
        engine.wait(engine.then("copy", [], fail), timeout=LIMIT_S)


def test_who_asks_is_told_once_that_a_work_is_over_however_it_ends() -> None:
    with engines() as (engine, _):
        done, stuck, told, heard = (
            engine.promise("what is done"),
            engine.promise("what never is"),
            [],
            threading.Event(),
        )
        engine.when_over(done, heard.set)
        engine.when_over(stuck, lambda: told.append("stuck"))
        engine.fulfil(done)
        assert heard.wait(LIMIT_S)
        engine.when_over(done, lambda: told.append("done before"))
        assert told == ["done before"]
        engine.fail(ClosedError("the end"))
        engine.when_over(stuck, lambda: told.append("after the end"))
        assert told == ["done before", "stuck", "after the end"]


def test_one_who_cannot_be_told_keeps_nobody_else_from_it() -> None:
    def refuse() -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    with engines() as (engine, _):
        told: list[int] = []
        engine.when_over(engine.promise("one"), refuse)
        engine.when_over(engine.promise("another"), lambda: told.append(2))
        engine.fail(ClosedError("the end"))
        assert told == [2]
        with pytest.raises(ClosedError, match="the end"):
            engine.check_error()
