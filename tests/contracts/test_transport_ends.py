"""Time limits and ends of every transport: polls that return, peers that end, calls after the end."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from ends import LIMIT_S, network, numbers

from syncline.errors import ClosedError, PeerLost


def test_poll_returns_after_its_time_limit(kind: str) -> None:
    with network(kind, 2) as net:
        handle = net.ends[0].recv(1, 0, np.zeros(1, np.uint8))
        assert net.ends[0].poll(0.01) == []
        assert not handle.done


def test_wake_ends_a_poll_from_another_thread(kind: str) -> None:
    with network(kind, 2) as net:
        begun = threading.Event()
        ended = threading.Event()

        def poll() -> None:
            begun.set()
            net.ends[0].poll(LIMIT_S)
            ended.set()

        thread = threading.Thread(target=poll)
        thread.start()
        begun.wait(LIMIT_S)
        net.ends[0].wake()
        assert ended.wait(LIMIT_S / 2)
        thread.join()


def test_a_peer_that_ends_fails_what_waits_for_it_only(kind: str) -> None:
    with network(kind, 3) as net:
        waits = net.ends[0].recv(2, 0, np.zeros(8, np.uint8))
        large = net.ends[0].send(2, 1, numbers(1_000_000))
        net.turn(2)
        net.ends.pop().close()
        for handle in (waits, large):
            with pytest.raises(PeerLost, match="rank 2"):
                net.wait(handle)
        late = net.ends[0].recv(2, 5, np.zeros(1, np.uint8))
        with pytest.raises(PeerLost):
            net.wait(late)
        into = np.zeros(3, np.uint8)
        net.wait(net.ends[1].recv(0, 0, into), net.ends[0].send(1, 0, numbers(3)))


def test_what_waits_for_a_peer_that_has_ended_keeps_nobody_from_ending(kind: str) -> None:
    with network(kind, 2) as net:
        for tag in range(3):
            net.ends[0].send(1, tag, numbers(60_000))
            net.ends[0].send(1, tag, numbers(1_000_000))
        net.ends.pop().close()
        for _ in range(200):
            if net.ends[0].idle:
                break
            net.ends[0].poll(0.01)
        assert net.ends[0].idle


def test_what_a_peer_sent_before_it_ended_still_arrives(kind: str) -> None:
    with network(kind, 2) as net:
        sent = net.ends[1].send(0, 0, numbers(100))
        if kind != "inproc":  # by reference: done when consumed
            net.wait(sent)
        net.turn(2)
        net.ends.pop().close()
        into = np.zeros(100, np.uint8)
        net.wait(net.ends[0].recv(1, 0, into))
        np.testing.assert_array_equal(into, numbers(100))


def test_what_was_acknowledged_last_is_written_before_the_end(kind: str) -> None:
    with network(kind, 2) as net:
        data = net.ends[0].allocate(300_000)
        sent = net.ends[0].send(1, 0, data)
        received = net.ends[1].recv(0, 0, np.zeros(300_000, np.uint8))
        net.wait(received)
        for _ in range(100):
            if net.ends[1].idle:
                break
            net.ends[1].poll(0.001)
        net.ends.pop().close()
        net.wait(sent)


def test_a_closed_transport_refuses_work(kind: str) -> None:
    with network(kind, 2) as net:
        end = net.ends.pop()
        end.close()
        end.close()
        with pytest.raises(ClosedError):
            end.poll(0)
        with pytest.raises(ClosedError):
            end.send(0, 0, numbers(1))


def test_a_wake_after_the_end_touches_no_file(kind: str) -> None:
    with network(kind, 2) as net:
        end = net.ends.pop()
        end.close()
        pipes = [os.pipe() for _ in range(4)]  # the numbers that the transport's own files had
        end.wake()
        for reading, writing in pipes:
            os.set_blocking(reading, False)
            with pytest.raises(BlockingIOError):
                os.read(reading, 8)
            os.close(reading)
            os.close(writing)
