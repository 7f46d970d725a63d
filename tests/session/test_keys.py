"""Keys of calls: as many as there are, then the first again, and what holds one is told."""

from __future__ import annotations

import pytest

from syncline.engine.order import Work
from syncline.session import tickets
from syncline.session.tickets import CALL_KEYS, CallKeys


def done(label: str) -> Work:
    work = Work(label)
    work.done = True
    return work


def test_keys_of_two_communicators_are_never_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "CALLS_IN_FLIGHT", 4)
    awaited: list[Work] = []
    both = CallKeys(0, awaited.append), CallKeys(1, awaited.append)
    first, second = ({one.take() for _ in range(9)} for one in both)
    assert not awaited
    assert first == set(range(CALL_KEYS, CALL_KEYS + 4))
    assert second == set(range(CALL_KEYS + 4, CALL_KEYS + 8))


def test_who_takes_a_key_again_waits_for_what_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "CALLS_IN_FLIGHT", 2)
    awaited: list[Work] = []
    mine, goes_on = CallKeys(0, awaited.append), Work("goes on")
    key = mine.take()
    mine.hold(key, goes_on)
    mine.hold(mine.take(), done("over"))
    assert not awaited
    assert mine.take() == key
    assert awaited == [goes_on]
    mine.take()
    assert mine.take() == key
    assert awaited == [goes_on]  # what is over is not waited for, nor anything twice


def test_keys_are_held_until_every_work_is_done() -> None:
    mine, goes_on = CallKeys(0, lambda _: None), Work("goes on")
    assert not mine.held
    mine.hold(mine.take(), done("over"))
    assert not mine.held
    mine.hold(mine.take(), goes_on)
    assert mine.held
    goes_on.done = True
    assert not mine.held
