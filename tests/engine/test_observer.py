"""The observer's seam in the engine: works, waits, messages and reducers; and nothing at all where nobody observes."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from two_engines import LIMIT_S, ring

from recorded import Recorder
from syncline.compression.reducers import Message, Reducer, Round, Sum
from syncline.engine import trace
from syncline.engine.engine import Engine
from syncline.engine.flight import BYTES, Flight
from syncline.engine.order import CodedOrder, Lane, Order, When, Work
from syncline.engine.trace import Span
from syncline.errors import ClosedError, PeerTimeout
from syncline.timeline.flight import parse
from syncline.transports.inproc import Hub


@contextlib.contextmanager
def pair(*recorders: Recorder | None) -> Iterator[list[Engine]]:
    """Two connected engines with these observers, closed at the end."""
    hub = Hub(2)
    made = [Engine(hub.transport(rank), observer=recorder) for rank, recorder in enumerate(recorders)]
    try:
        yield made
    finally:
        for engine in made:
            engine.close()


def recorder() -> Recorder:
    looks = count()
    return Recorder(lambda: float(next(looks)))


def lifetimes(of: Recorder) -> dict[Span, tuple[float, float]]:
    """When each span began and ended; all have."""
    begun = {event.span: event.at_s for event in of.events if not event.ends}
    ended = {event.span: event.at_s for event in of.events if event.ends}
    assert set(begun) == set(ended)
    assert len(of.events) == 2 * len(begun)
    return {span: (at_s, ended[span]) for span, at_s in begun.items()}


def pieces(rank: int) -> list[Any]:
    """Two reducers: one exchanges a message each way and then sums, the other has nothing to send."""

    def travels() -> Reducer:
        there, here = np.full(8, rank, np.uint8), np.zeros(8, np.uint8)
        yield Round([Message(1 - rank, there)], [Message(1 - rank, here)])
        yield Sum(np.ones(4))

    def computes() -> Reducer:
        yield Round([], [])

    return [travels, computes]


def exchange_all(engines: list[Engine]) -> list[list[Work]]:
    """A bit of everything on both engines, and wait for it."""
    works: list[list[Work]] = []
    for rank, engine in enumerate(engines):
        lane = Lane(1)
        mine = [engine.send(1 - rank, 7, b"hello", "a message"), engine.recv(1 - rank, 7, 100, "a message")]
        mine.append(engine.start(Order(ring(rank), np.ones(6), 1, "bucket 1"), When(lane=lane, priority=3.0)))
        mine.append(
            engine.start(CodedOrder(lambda rank=rank: pieces(rank), lambda _, rank=rank: ring(rank), 2, "bucket 2"))
        )
        mine.append(engine.then("after", mine[:2]))
        works.append(mine)
    for engine, mine in zip(engines, works, strict=True):
        engine.wait(*mine, timeout=LIMIT_S)
    return works


def test_everything_that_begins_ends_and_is_nested_as_the_seam_says() -> None:
    both = [recorder(), recorder()]
    with pair(*both) as engines:
        exchange_all(engines)
    for one in both:
        times = lifetimes(one)
        for span, (begun, ended) in times.items():
            assert begun < ended
            if span.within is not None:
                assert times[span.within][0] < begun
                assert ended < times[span.within][1]
        within = {(span.kind, "" if span.within is None else span.within.kind) for span in times}
        assert within - {("wait", "")} == {  # the second engine may be done before it is waited for
            ("work", ""),
            ("send", "work"),
            ("receive", "work"),
            ("run", "work"),
            ("run", "run"),
            ("segment", "run"),
            ("compute", "run"),
            ("send", "run"),
            ("receive", "run"),
            ("send", "segment"),
            ("receive", "segment"),
            ("reduce", "segment"),
        }


def test_a_work_is_told_with_what_it_is_for() -> None:
    one = recorder()
    with pair(one, None) as engines:
        exchange_all(engines)
    works = [(span.label, span.key, span.priority) for span in one.spans("work")]
    assert works[2:4] == [("bucket 1", 1, 3.0), ("bucket 2", 2, 0.0)]
    runs = {(span.label, span.key, span.phase, span.priority) for span in one.spans("run")}
    assert runs == {
        ("bucket 1", 1, "allreduce", 3.0),
        ("bucket 2", 2, "reduce", 0.0),
        ("bucket 2", 2, "allreduce", 0.0),
    }
    # Of the first reducer, before its messages, between them and the sum, and after it; of the second, twice.
    assert sorted(span.step for span in one.spans("compute")) == [0, 0, 0, 1, 1]
    messages = {(span.kind, span.peer, span.nbytes) for span in one.spans("send") if span.label == "a message"}
    assert messages == {("send", 1, 5)}


def test_exchanges_and_waits_reach_the_flight_record_and_other_works_do_not() -> None:
    memory, hub = mmap.mmap(-1, BYTES), Hub(2)
    flight = Flight(memory, 0, {"name": "rank 0", "processes": 2, "workers": 2, "run": ""})
    made = [Engine(hub.transport(0), flight=flight), Engine(hub.transport(1))]
    try:
        exchange_all(made)
        made[1].start(Order(ring(1), np.ones(6), 1, "bucket 1"))
        made[0].run(Order(ring(0), np.ones(6), 1, "bucket 1"), LIMIT_S)
        hung = made[0].start(Order(ring(0), np.ones(6), 3, "bucket 3"))
        with pytest.raises(PeerTimeout):
            made[0].wait(hung, timeout=0.01)
        found = parse(memory[:])
        assert found is not None
        told = [(one.label, one.key, one.nbytes, one.turn, one.is_open) for one in found.operations]
        again, last = ("bucket 1", 1, 48, 2, False), ("bucket 3", 3, 48, 1, True)
        assert told == [("bucket 1", 1, 48, 1, False), ("bucket 2", 2, -1, 1, False), again, last]
        assert found.blocked_s == 0.0
    finally:
        for engine in made:
            engine.fail(ClosedError("the test is over"))
            engine.close()


def test_a_work_that_waits_for_its_gate_has_not_begun_to_run() -> None:
    one = recorder()
    with pair(one, None) as engines:
        gate = engines[0].promise("a gate")
        gated = engines[0].start(Order(ring(0), np.ones(4), 0, "gated"), When(gate=gate))
        theirs = engines[1].start(Order(ring(1), np.ones(4), 0, "gated"))
        with pytest.raises(PeerTimeout):
            engines[0].wait(gated, timeout=0.01)
        assert not one.spans("run")
        engines[0].fulfil(gate)
        engines[0].wait(gated, timeout=LIMIT_S)
        engines[1].wait(theirs, timeout=LIMIT_S)
    times = lifetimes(one)
    (run,), (first, second) = one.spans("run"), one.spans("work")
    assert times[first][1] < times[run][0] > times[second][0]
    assert [span.label for span in one.spans("wait")] == ["gated", "gated"]


def test_a_call_that_blocks_is_a_wait_with_its_work_inside() -> None:
    one = recorder()
    with pair(one, None) as engines:
        theirs = engines[1].start(Order(ring(1), np.ones(4), 0, "sum"))
        engines[0].run(Order(ring(0), np.ones(4), 0, "sum"))
        engines[1].wait(theirs, timeout=LIMIT_S)
    times = lifetimes(one)
    (wait,), (work,) = one.spans("wait"), one.spans("work")
    assert times[wait][0] < times[work][0] < times[work][1] < times[wait][1]


def test_where_nobody_observes_nothing_is_told_and_nothing_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(trace, "Span", lambda *what, **more: made.append((what, more)))
    with pair(None, None) as engines:
        works = exchange_all(engines)
        theirs = engines[1].start(Order(ring(1), np.ones(4), 0, "sum"))
        engines[0].run(Order(ring(0), np.ones(4), 0, "sum"))
        engines[1].wait(theirs, timeout=LIMIT_S)
    assert made == []
    assert all(work.span is None for mine in works for work in mine)
