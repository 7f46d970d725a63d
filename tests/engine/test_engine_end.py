"""How an engine ends: by a fault, which reaches whoever waits, by a peer that has gone, or when it is closed."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from two_engines import LIMIT_S, engines, ring

from syncline.engine.engine import Engine
from syncline.engine.order import Order, When
from syncline.errors import ClosedError, PeerError, PeerLeft, PeerLost, ProtocolError, SynclineError
from syncline.transports.inproc import Hub


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
