"""The progress thread: exchanges, messages, lanes and gates; how an engine ends, and reports of stalls."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
from two_engines import LIMIT_S, engines, ring

from syncline.engine.engine import Engine
from syncline.engine.order import Lane, Order, When
from syncline.errors import ClosedError, PeerError, PeerLeft, PeerLost, PeerTimeout, ProtocolError, SynclineError
from syncline.plans.messages import Program
from syncline.transports.inproc import Hub
from syncline.wire.culprit import Answer, Culprit, Found, Waits, find_culprit


def test_an_exchange_sums_and_its_work_is_done() -> None:
    arrays = [np.arange(5.0), np.ones(5)]
    with engines() as both:
        works = [engine.start(Order(ring(rank), arrays[rank], 0, "sum")) for rank, engine in enumerate(both)]
        for engine, work in zip(both, works, strict=True):
            engine.wait(work, timeout=LIMIT_S)
            assert work.done
        assert both[0].doing == "no exchange"
    assert all(np.array_equal(array, np.arange(5.0) + 1) for array in arrays)


def test_a_lane_keeps_order_and_never_has_more_in_flight_than_it_may() -> None:
    """``before`` runs when a work starts, so it sees how many of the lane have started and not finished."""
    lane, started = Lane(2), []
    arrays = [[np.ones(3) for _ in range(10)] for _ in range(2)]
    with engines() as both:
        mine = [
            both[0].start(
                Order(ring(0), arrays[0][key], key, f"bucket {key}"),
                When(lane=lane, before=lambda key=key: started.append((key, lane.active))),
            )
            for key in range(10)
        ]
        theirs = [both[1].start(Order(ring(1), arrays[1][key], key, "bucket")) for key in reversed(range(10))]
        both[0].wait(*mine, timeout=LIMIT_S)
        both[1].wait(*theirs, timeout=LIMIT_S)
        assert lane.active == 0
    assert [key for key, _ in started] == list(range(10))
    assert max(active for _, active in started) == 2


def test_a_work_starts_when_its_gate_is_done_and_its_program_may_depend_on_it() -> None:
    order: list[str] = []
    with engines() as both:
        gate = both[0].start(Order(ring(0), np.ones(1), 0, "gate"), When(before=lambda: order.append("gate")))

        def program() -> Program:
            assert gate.done
            return ring(0)

        lane = Lane(1)
        gated = both[0].start(
            Order(program, np.ones(1), 1, "gated"), When(gate=gate, before=lambda: order.append("gated"))
        )
        in_lane = both[0].start(
            Order(program, np.ones(1), 2, "in a lane"),
            When(lane=lane, gate=gate, before=lambda: order.append("in a lane")),
        )
        behind = both[0].start(
            Order(ring(0), np.ones(1), 3, "behind it"), When(lane=lane, before=lambda: order.append("behind it"))
        )
        others = [both[1].start(Order(ring(1), np.ones(1), key, "other")) for key in (3, 2, 1)]
        with pytest.raises(PeerTimeout, match=r"gated: not done within 0 s"):
            both[0].wait(gated, timeout=0.0)
        others.append(both[1].start(Order(ring(1), np.ones(1), 0, "other")))
        both[0].wait(gate, gated, in_lane, behind, timeout=LIMIT_S)
        both[1].wait(*others, timeout=LIMIT_S)
    assert order[0] == "gate"
    assert sorted(order[1:]) == ["behind it", "gated", "in a lane"]
    assert order.index("in a lane") < order.index("behind it")


def test_what_is_handed_over_behind_something_else_wakes_nobody_again(monkeypatch: pytest.MonkeyPatch) -> None:
    came, go, rung = threading.Event(), threading.Event(), list[int]()

    def hold_up() -> None:
        came.set()
        assert go.wait(LIMIT_S)

    with engines() as (engine, other):
        wake = engine.transport.wake
        works = [engine.start(Order(ring(0), np.ones(3), 0, "held up"), When(before=hold_up))]
        assert came.wait(LIMIT_S)
        monkeypatch.setattr(engine.transport, "wake", lambda: (rung.append(1), wake()))
        works += [engine.start(Order(ring(0), np.ones(3), key, "behind it")) for key in range(1, 5)]
        assert len(rung) == 1
        go.set()
        theirs = [other.start(Order(ring(1), np.ones(3), key, "other")) for key in range(5)]
        engine.wait(*works, timeout=LIMIT_S)
        other.wait(*theirs, timeout=LIMIT_S)


def test_a_gate_that_is_done_does_not_hold_up() -> None:
    with engines() as both:
        gates = [engine.start(Order(ring(rank), np.ones(1), 0, "gate")) for rank, engine in enumerate(both)]
        for engine, gate in zip(both, gates, strict=True):
            engine.wait(gate, timeout=LIMIT_S)
        works = [
            engine.start(Order(ring(rank), np.ones(1), 1, "gated"), When(gate=gates[rank]))
            for rank, engine in enumerate(both)
        ]
        for engine, work in zip(both, works, strict=True):
            engine.wait(work, timeout=LIMIT_S)


def test_messages_carry_their_bytes() -> None:
    with engines() as both:
        received = [both[1].recv(0, 7, 100, "a message") for _ in range(2)]
        both[0].wait(both[0].send(1, 7, b"first", "a message"), both[0].send(1, 7, b"", "a message"), timeout=LIMIT_S)
        both[1].wait(*received, timeout=LIMIT_S)
    assert [work.result for work in received] == [b"first", b""]


def test_messages_to_itself_keep_their_order_whoever_comes_first() -> None:
    """By tag, as between two; also while nobody else waits for anything."""
    with engines() as both:
        early = both[0].recv(0, 8, 100, "a request of rank 0", tolerant=True)
        for tag, body in ((7, b"first"), (7, b""), (8, b"other")):
            both[0].send(0, tag, body, "a request")
        late = [both[0].recv(0, 7, 100, "a request of rank 0") for _ in range(2)]
        both[0].wait(early, *late, timeout=LIMIT_S)
    assert [work.result for work in (early, *late)] == [b"other", b"first", b""]


def test_a_message_to_itself_that_is_too_long_is_a_fault_with_its_label() -> None:
    with engines() as both:
        work = both[0].recv(0, 7, 3, "a request of rank 0")
        both[0].send(0, 7, b"long", "a message")
        with pytest.raises(SynclineError, match=r"a request of rank 0: .*4 bytes does not fit a receive of 3"):
            both[0].wait(work, timeout=LIMIT_S)


def test_a_message_too_long_is_a_fault_with_its_label() -> None:
    with engines() as both:
        work = both[1].recv(0, 7, 3, "a request of rank 0")
        both[0].send(1, 7, b"long", "a message")
        with pytest.raises(SynclineError, match=r"a request of rank 0: .*does not fit"):
            both[1].wait(work, timeout=LIMIT_S)


def test_a_message_for_which_there_can_be_no_memory_is_an_error_of_the_caller_alone() -> None:
    with engines() as both:
        for nbytes, error in ((-1, ValueError), (1 << 62, MemoryError)):
            with pytest.raises(error):
                both[0].recv(1, 7, nbytes, "a message")
        work = both[0].recv(1, 7, 5, "a message")
        both[1].send(0, 7, b"hello", "a message")
        both[0].wait(work, timeout=LIMIT_S)
        assert work.result == b"hello"


def test_allocate_gives_zeroed_memory_of_the_type() -> None:
    with engines() as both:
        memory = both[0].allocate(24, np.dtype(np.float64))
    assert memory.dtype == np.float64
    assert memory.tolist() == [0.0, 0.0, 0.0]


def test_waiting_is_counted_and_what_is_done_costs_nothing() -> None:
    with engines() as both:
        works = [engine.start(Order(ring(rank), np.ones(1), 0, "sum")) for rank, engine in enumerate(both)]
        both[0].wait(works[0], timeout=LIMIT_S)
        blocked = both[0].blocked_s
        assert blocked >= 0
        both[0].wait(works[0], timeout=0.0)
        both[0].wait()
        assert both[0].blocked_s == blocked


def test_every_thread_is_counted_by_itself_unless_it_asked_not_to_be() -> None:
    with engines() as both:
        promises = [both[0].promise(f"what thread {number} waits for") for number in range(3)]
        waiting = threading.Barrier(4)

        def wait(number: int) -> None:
            with both[0].uncounted() if number == 2 else contextlib.nullcontext():
                waiting.wait(LIMIT_S)
                both[0].wait(promises[number], timeout=LIMIT_S)

        threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        waiting.wait(LIMIT_S)
        for promise in promises:
            both[0].fulfil(promise)
        for thread in threads:
            thread.join(LIMIT_S)
        each = both[0].blocked._seconds
        assert len(each) <= 2
        assert both[0].blocked_s == sum(each.values())
        idle = both[1].promise("what is done at once")
        both[1].fulfil(idle)
        with both[1].uncounted():
            both[1].wait(idle, timeout=LIMIT_S)
        assert both[1].blocked_s == 0


def test_doing_names_the_oldest_exchange_and_counts_the_others() -> None:
    with engines() as both:
        started = threading.Event()
        for key in range(3):
            both[0].start(
                Order(ring(0), np.ones(4), key, f"bucket {key}"), When(before=started.set if key == 2 else None)
            )
        assert started.wait(LIMIT_S)
        both[0].allocate(1, np.dtype(np.uint8))  # tasks run in order: all three have started
        assert both[0].doing == "bucket 0 and 2 more"


def test_wait_any_returns_with_the_first_that_is_done() -> None:
    with engines() as both:
        works = [both[0].recv(1, tag, 8, "a message") for tag in range(3)]
        both[1].send(0, 1, b"text", "a message")
        both[0].wait_any(works, until=lambda: False)
        assert [work.done for work in works] == [False, True, False]


def test_a_fault_in_the_progress_thread_reaches_present_and_later_waiters() -> None:
    """As the very exception that ``explain`` made of it, whatever they wait for."""
    explained = SynclineError("explained")
    caught: list[Exception] = []
    blocked = threading.Barrier(3)

    with engines(explain=lambda _: explained) as both:
        stuck = both[0].recv(1, 99, 8, "a message that never comes")

        def wait() -> None:
            blocked.wait(LIMIT_S)
            try:
                both[0].wait(stuck, timeout=LIMIT_S)
            except Exception as error:
                caught.append(error)

        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        blocked.wait(LIMIT_S)

        def broken() -> None:
            raise ValueError("in the progress thread")

        both[0].start(Order(ring(0), np.ones(1), 0, "bucket"), When(before=broken))
        for thread in threads:
            thread.join(LIMIT_S)
        assert caught == [explained, explained]
        for call in (
            lambda: both[0].wait(),
            lambda: both[0].start(Order(ring(0), np.ones(1), 5, "bucket")),
            lambda: both[0].send(1, 5, b"", "message"),
            lambda: both[0].wait_any([stuck], until=lambda: False),
        ):
            with pytest.raises(SynclineError, match="explained"):
                call()


def test_the_first_fault_stays() -> None:
    with engines() as both:
        both[0].fail(SynclineError("first"))
        both[0].fail(SynclineError("second"))
        with pytest.raises(SynclineError, match="first"):
            both[0].wait()


def test_a_peer_that_dies_is_named_with_what_was_under_way() -> None:
    hub = Hub(2)
    engine = Engine(hub.transport(0))
    works = [engine.start(Order(ring(0), np.ones(4), key, f"bucket {key}")) for key in range(2)]
    hub.kill(1)
    with pytest.raises(PeerLost, match=r"bucket \d: .* rank 1") as caught:
        engine.wait(*works, timeout=LIMIT_S)
    assert caught.value.rank == 1
    engine.close()


def test_a_tolerant_work_neither_fails_when_its_peer_leaves_nor_holds_up_the_end() -> None:
    hub = Hub(2)
    left: set[int] = set()
    engine = Engine(hub.transport(0), has_left=left.__contains__)
    request = engine.recv(1, 7, 8, "a request", tolerant=True)
    step = engine.start(Order(ring(0), np.ones(4), 0, "the next step", tolerant=True))
    assert engine.doing == "no exchange"
    left.add(1)
    hub.kill(1)
    gone = threading.Event()
    engine.wait_any([request, step], until=lambda: bool(left) and not gone.set())
    assert gone.is_set()
    engine.close()
    assert not request.done
    assert not step.done
    assert isinstance(engine.error, ClosedError)


def test_a_tolerant_work_does_fail_when_its_peer_dies() -> None:
    hub = Hub(2)
    engine = Engine(hub.transport(0))
    request = engine.recv(1, 7, 8, "a request", tolerant=True)
    hub.kill(1)
    with pytest.raises(PeerLost, match="a request"):
        engine.wait_any([request], until=lambda: False)
    engine.close()


@pytest.mark.parametrize("kind", [PeerLost, PeerLeft])
def test_when_the_others_have_left_it_is_no_fault_that_they_are_gone(kind: type[PeerError]) -> None:
    engine, holds = Engine(Hub(2).transport(0)), iter([False, True])
    engine.fail(kind("it is gone", rank=1))
    engine.wait_any([], until=lambda: True)
    assert engine.over(lambda: True)
    with pytest.raises(kind):
        engine.over(lambda: False)
    assert engine.over(lambda: next(holds))  # the goodbye came between two looks
    assert isinstance(engine.close(), kind)  # the end tells it all the same


def test_when_the_others_have_left_any_other_fault_is_one() -> None:
    engine = Engine(Hub(2).transport(0))
    engine.fail(ProtocolError("an update that fails", rank=1))
    for call in (engine.over, lambda until: engine.wait_any([], until=until)):
        with pytest.raises(ProtocolError, match="an update that fails"):
            call(lambda: True)
    engine.close()


def test_close_finishes_what_is_under_way_and_frees_everything() -> None:
    hub = Hub(2)
    both = [Engine(hub.transport(rank)) for rank in range(2)]
    arrays = [np.ones(100_000), np.ones(100_000)]
    for rank, engine in enumerate(both):
        engine.start(Order(ring(rank), arrays[rank], 0, "the last exchange"))
    said: list[bool] = []
    closing = [
        threading.Thread(target=engine.close, args=(lambda engine=engine: said.append(engine._thread.is_alive()),))
        for engine in both
    ]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(LIMIT_S)
    assert said == [True, True]
    assert all((array == 2).all() for array in arrays)
    for engine in both:
        assert not engine._thread.is_alive()
        with pytest.raises(ClosedError):
            engine.start(Order(ring(0), arrays[0], 1, "too late"))
        with pytest.raises(ClosedError):
            engine.transport.poll(0.0)
        engine.close()


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
        words = r"nothing has moved for (\d+\.\d) s, .*; rank 1 has not looked for messages for (\d+\.\d) s: a call"
        try:
            with pytest.raises(PeerTimeout, match=words) as caught:
                both[0].wait(work, timeout=LIMIT_S)
        finally:
            over.set()
        found = re.search(words, str(caught.value))
        assert found is not None
        assert float(found[1]) > float(found[2])
        assert caught.value.rank == 1
