"""Whoever ends a group finds no thread in a call, and none begins one after that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from syncline.errors import UsageError
from syncline.session.tickets import Callers


@pytest.fixture
def callers() -> Callers:
    return Callers(lambda text: f"<group>: {text}")


def elsewhere(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as other:
        return other.submit(call).result(30)


def call(callers: Callers) -> bool:
    with callers.inside():
        return callers.is_busy


def closed_within(callers: Callers) -> bool:
    with callers.inside():
        return callers.close()


def test_a_group_is_busy_for_the_threads_that_are_not_in_the_call(callers: Callers) -> None:
    with callers.inside(), callers.inside():
        assert not callers.is_busy
        assert elsewhere(lambda: callers.is_busy)
    assert not elsewhere(lambda: callers.is_busy)


def test_a_group_in_which_another_thread_is_in_a_call_is_not_closed(callers: Callers) -> None:
    with callers.inside():
        assert not elsewhere(callers.close)
        assert not elsewhere(lambda: closed_within(callers))
    assert elsewhere(callers.close)


def test_only_the_thread_that_has_closed_a_group_calls_in_it(callers: Callers) -> None:
    assert callers.close()
    assert not callers.close()
    assert not call(callers)
    with pytest.raises(UsageError, match="<group>: another thread ends this group, or has: make another one"):
        elsewhere(lambda: call(callers))
    assert not callers.is_busy
    callers.reopen()
    assert elsewhere(lambda: call(callers)) is False


def test_a_call_that_fails_is_over(callers: Callers) -> None:
    def fail() -> None:
        with callers.inside():
            raise ValueError(threading.get_ident())

    with pytest.raises(ValueError, match=r"\d+"):
        elsewhere(fail)
    assert callers.close()
