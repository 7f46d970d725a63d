"""The progress thread: exchanges and messages, the order of lanes and gates, and what waiting for them is."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from two_engines import LIMIT_S, engines, ring

from syncline.engine.order import Lane, Order, When
from syncline.errors import PeerTimeout, SynclineError
from syncline.plans.messages import Program


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
