"""Keys of calls: as many as there are, then the first again, and what holds one is told."""

from __future__ import annotations

import pytest

from syncline.engine.order import Work
from syncline.session import keys
from syncline.session.keys import CALL_KEYS, CallKeys


def done(label: str) -> Work:
    work = Work(label)
    work.done = True
    return work


def test_keys_of_two_communicators_are_never_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "CALLS_IN_FLIGHT", 4)
    first, second = ({one.take()[0] for _ in range(9)} for one in (CallKeys(0), CallKeys(1)))
    assert first == set(range(CALL_KEYS, CALL_KEYS + 4))
    assert second == set(range(CALL_KEYS + 4, CALL_KEYS + 8))


def test_who_takes_a_key_again_learns_what_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "CALLS_IN_FLIGHT", 2)
    mine, goes_on = CallKeys(0), Work("goes on")
    key, holder = mine.take()
    assert holder is None
    mine.hold(key, goes_on)
    assert mine.take()[1] is None
    assert mine.take() == (key, goes_on)
    mine.take()
    assert mine.take() == (key, None)  # whoever took it has waited


def test_keys_are_held_until_every_work_is_done() -> None:
    mine, goes_on = CallKeys(0), Work("goes on")
    assert not mine.held
    mine.hold(mine.take()[0], done("over"))
    assert not mine.held
    mine.hold(mine.take()[0], goes_on)
    assert mine.held
    goes_on.done = True
    assert not mine.held
