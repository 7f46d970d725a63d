"""Works that others than the engine finish, what follows works, and who is told that one is over."""

from __future__ import annotations

import threading

import pytest
from two_engines import LIMIT_S, engines

from syncline.errors import ClosedError, PeerTimeout


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
