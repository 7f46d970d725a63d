"""Nothing moves: when an engine says so, whom it names, and what it answers those who ask for whom it waits."""

from __future__ import annotations

import itertools
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
from two_engines import LIMIT_S, engines, ring

from syncline.engine.order import Order, When
from syncline.errors import PeerTimeout
from syncline.wire.culprit import Answer, Culprit, Found, Waits, find_culprit


def test_nothing_moving_for_the_limit_names_whom_it_waits_for() -> None:
    with engines(limit_s=0.01) as both:
        work = both[0].start(Order(ring(0), np.ones(4), 0, "bucket 0 (weight)"))
        with pytest.raises(PeerTimeout, match=r"nothing has moved .*rank 1 \(bucket 0 \(weight\)\)") as caught:
            both[0].wait(work, timeout=LIMIT_S)
        assert caught.value.rank == 1


def test_a_message_that_creeps_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which nothing but bytes is seen for longer than the limit: only the caller's own time is over."""
    with engines(limit_s=0.01) as both:
        bytes_so_far = itertools.count()
        monkeypatch.setattr(type(both[0].transport), "moved_bytes", property(lambda _: next(bytes_so_far)))
        work = both[0].start(Order(ring(0), np.ones(4), 0, "bucket 0"))
        with pytest.raises(PeerTimeout, match="not done within"):
            both[0].wait(work, timeout=0.3)
        monkeypatch.undo()
        with pytest.raises(PeerTimeout, match="nothing has moved"):
            both[0].wait(work, timeout=LIMIT_S)


def test_who_had_only_not_read_its_messages_yet_is_not_blamed() -> None:
    """A server that was stopped says at first that it waits for nobody, then for the worker that hangs."""
    late = {2: Answer({})}
    says = [Answer({}, moves=4, looks=1), Answer({2: "bucket 0"}, moves=5, looks=1), Answer({2: "bucket 0"}, 5, 3)]

    def search(waits: Waits) -> Found:
        assert waits == {1: "bucket 0"}
        said = says.pop(0)
        if not said.waits:
            return Found(Culprit(1, "has not come to bucket 0"), {1: said})
        return Found(Culprit(2, "has not come to bucket 0"), late | {1: said})

    with engines(limit_s=0.01, find_culprit=search) as both:
        work = both[0].start(Order(ring(0), np.ones(4), 0, "bucket 0"))
        with pytest.raises(PeerTimeout, match=r"rank 1 \(bucket 0\); rank 2 has not come") as caught:
            both[0].wait(work, timeout=LIMIT_S)
        assert caught.value.rank == 2


def test_an_answer_shows_whether_a_process_has_looked_and_moved() -> None:
    with engines() as both:
        asked = both[0].answer
        assert asked().still(asked())
        work = both[0].start(Order(ring(0), np.ones(4), 0, "bucket 0"))
        deadline = time.monotonic() + LIMIT_S
        before, waits = asked(), asked()
        while not (waits.waits and waits.still(before)):  # being asked wakes it: it does not wait for its turn
            assert time.monotonic() < deadline
            before, waits = waits, asked()
        assert waits.waits == {1: "bucket 0"}
        assert not waits.still(waits)
        both[1].wait(both[1].start(Order(ring(1), np.ones(4), 0, "bucket 0")), timeout=LIMIT_S)
        both[0].wait(work, timeout=LIMIT_S)
        assert not asked().waits
        assert asked().moves > waits.moves


def test_a_look_that_had_found_nothing_before_a_process_was_asked_shows_nothing() -> None:
    """Each look is held between its end and being counted."""
    ended, go, free = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    with engines() as both:
        engine = both[0]
        poll = engine.transport.poll

        def held(timeout: float) -> Any:
            handles = poll(timeout)
            if not free.is_set():
                ended.release()
                go.acquire()
            return handles

        engine.transport.poll = held
        engine.recv(1, 99, 8, "a message that never comes")
        assert ended.acquire(timeout=LIMIT_S)
        before = engine.answer()
        for looked in (False, True):
            go.release()
            assert ended.acquire(timeout=LIMIT_S)  # it was woken, and again looks only as long as it takes
            assert engine.answer().still(before) == looked
        free.set()
        go.release()


def test_one_that_does_not_come_back_from_what_it_called_is_named_with_the_time_that_has_passed() -> None:
    """It says that it waits for nobody."""
    over, called = threading.Event(), threading.Event()

    def takes_long() -> None:
        called.set()
        over.wait(LIMIT_S)

    def search(waits: Waits) -> Found:
        return find_culprit(0, waits, lambda peer: both[peer].answer())

    with engines(limit_s=0.2, find_culprit=search) as both:
        both[1].start(Order(ring(1), np.ones(4), 0, "bucket 0"), When(before=takes_long))
        assert called.wait(LIMIT_S)
        work = both[0].start(Order(ring(0), np.ones(4), 0, "bucket 0"))
        words = r"nothing has moved for (\d+\.\d) s, .*; rank 1 has not looked for messages for (\d+\.\d) s: something"
        try:
            with pytest.raises(PeerTimeout, match=words) as caught:
                both[0].wait(work, timeout=LIMIT_S)
        finally:
            over.set()
        found = re.search(words, str(caught.value))
        assert found is not None
        assert float(found[1]) > float(found[2])
        assert caught.value.rank == 1
