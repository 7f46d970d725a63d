"""Lines between real sockets: limits in both directions over all connections, round trips, urgency and fairness.

Times are bounded from below only, which a busy machine cannot break.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from syncline.nouns import Rate, Seconds
from syncline.transports import Handle
from syncline.transports.tcp import Tcp
from syncline.wire.links import Link
from syncline.wire.shaped import Line, Pacer, Shape, ShapedLoop

LIMIT_S = 20.0
RATE = Rate(4e8)


@contextmanager
def ends(*options: dict[str, float]) -> Iterator[list[Tcp]]:
    """One end for each set of options, all connected."""
    socks: list[dict[int, socket.socket]] = [{} for _ in options]
    for low in range(len(options)):
        for high in range(low + 1, len(options)):
            with socket.create_server(("127.0.0.1", 0)) as door:
                socks[low][high] = socket.create_connection(door.getsockname())
                socks[high][low], _ = door.accept()
    made = [Tcp(rank, mine, **option) for rank, (mine, option) in enumerate(zip(socks, options, strict=True))]  # type: ignore[arg-type]
    try:
        yield made
    finally:
        for end in made:
            end.close()


def drive(made: list[Tcp], until: Callable[[], bool]) -> float:
    """Poll all ends in turn; seconds that it took."""
    begun = time.monotonic()
    while not until():
        for end in made:
            end.poll(0.0002)
        assert time.monotonic() - begun < LIMIT_S
    return time.monotonic() - begun


def exchange(made: list[Tcp], pairs: list[tuple[int, int]], nbytes: int) -> float:
    """A message for every pair (from, to), all at once; seconds until all have arrived."""
    handles: list[Handle] = []
    for src, dst in pairs:
        handles.append(made[dst].recv(src, 0, np.zeros(nbytes, np.uint8)))
        handles.append(made[src].send(dst, 0, np.ones(nbytes, np.uint8)))
    return drive(made, lambda: all(handle.done for handle in handles))


def least_s(nbytes: int, rate: float = RATE) -> float:
    """What so many bytes take at least."""
    return (nbytes - Pacer(rate / 8).burst_bytes) / (rate / 8)


TICK_S = 0.001


class Clock:
    """Seconds that go on when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


SLOW: dict[str, float] = {"rate": RATE}
PLAIN: dict[str, float] = {}


@pytest.mark.parametrize(
    ("options", "pairs", "through"),
    [
        ([SLOW, PLAIN], [(0, 1)], 1),
        ([PLAIN, SLOW], [(0, 1)], 1),
        ([SLOW, PLAIN, PLAIN], [(0, 1), (0, 2)], 2),
        ([SLOW, PLAIN, PLAIN], [(1, 0), (2, 0)], 2),
        ([SLOW, SLOW], [(0, 1), (1, 0)], 1),
    ],
    ids=["out", "in", "out to two", "in from two", "both ways at once"],
)
def test_a_port_keeps_to_its_rate_in_each_direction(
    options: list[dict[str, float]], pairs: list[tuple[int, int]], through: int
) -> None:
    nbytes = 3_000_000
    with ends(*options) as made:
        assert exchange(made, pairs, nbytes) >= least_s(through * nbytes)


def test_directions_do_not_share_the_rate() -> None:
    """In so many seconds of the shaper's own clock each direction passes what the rate is, and both at once."""
    clock, seconds = Clock(), 0.05
    links = [
        Link(Line(sock, 0.0, clock), peer, lambda *_: memoryview(bytearray(4_000_000)), lambda *_: None)
        for peer, sock in enumerate(socket.socketpair())
    ]
    loops = [ShapedLoop([link], lambda _: None, Shape(RATE), clock) for link in links]
    for link in links:
        link.push(1, 0, body=memoryview(bytes(4_000_000)))
    for _ in range(int(seconds / TICK_S)):
        clock.now += TICK_S
        for loop in loops * 3:  # what is there has been read before the clock goes on
            loop.turn(0.0)
    passed = [link.sent_bytes for link in links] + [link.received_bytes for link in links]
    for loop in loops:
        loop.close()
    most = RATE / 8 * seconds + Pacer(RATE / 8).burst_bytes
    assert 0.95 * RATE / 8 * seconds <= min(passed) <= max(passed) <= most


@pytest.mark.parametrize("nbytes", [10, 500_000])
def test_bytes_come_later_by_the_delay_each_way(nbytes: int) -> None:
    delay = 0.02
    with ends({"delay": delay}, {"delay": delay}) as made:
        there = exchange(made, [(0, 1)], nbytes)
        back = exchange(made, [(1, 0)], nbytes)
    assert there >= delay
    assert there + back >= 2 * delay


def test_a_large_message_whose_receive_comes_late_costs_a_round_trip() -> None:
    delay = 0.02
    with ends({"delay": delay}, {"delay": delay}) as made:
        sent = made[0].send(1, 0, np.ones(500_000, np.uint8))
        received = made[1].recv(0, 0, np.zeros(500_000, np.uint8))
        assert drive(made, lambda: received.done) >= 2 * delay
        assert sent.done


def test_connections_of_equal_urgency_share_a_port_evenly() -> None:
    with ends(SLOW, PLAIN, PLAIN) as made:
        handles = []
        for peer in (1, 2):
            made[peer].recv(0, 0, np.zeros(6_000_000, np.uint8))
            handles.append(made[0].send(peer, 0, np.ones(6_000_000, np.uint8)))
        drive(made, lambda: any(handle.done for handle in handles))
        sent = made[0].traffic()[0]
        assert min(sent.values()) > 3_000_000  # not all of it: the kernel may be full for one of them for a moment


def test_what_is_urgent_overtakes_on_another_connection() -> None:
    with ends(SLOW, PLAIN, PLAIN) as made:
        for peer in (1, 2):
            made[peer].recv(0, 0, np.zeros(3_000_000, np.uint8))
        drive(made, lambda: made[0].poll(0.001) == [] and made[0].traffic()[1][2] > 0)  # both have given credit
        bulk = made[0].send(1, 0, np.ones(3_000_000, np.uint8), priority=5.0)
        urgent = made[0].send(2, 0, np.ones(3_000_000, np.uint8), priority=1.0)
        drive(made, lambda: urgent.done or bulk.done)
        assert urgent.done
        assert not bulk.done


def test_an_idle_shaped_transport_sleeps() -> None:
    """No timer keeps it awake: a poll lasts as long as it may and turns once."""
    with ends(SLOW, SLOW) as made:
        exchange(made, [(0, 1)], 200_000)
        drive(made, lambda: all(end.idle for end in made))
        for end in made:
            end.poll(0.02)  # the last timer
        begun = time.monotonic()
        assert made[0].poll(0.05) == []
        assert time.monotonic() - begun >= 0.049


def test_a_line_takes_the_connection_over() -> None:
    a, b = socket.socketpair()
    with b, Line(a, 0.0) as line:
        assert a.fileno() == -1
        line.setblocking(False)
        with pytest.raises(BlockingIOError):
            line.sendmsg([b"nothing granted"])
        line.granted = 3
        assert line.sendmsg([b"ab", b"cdef"]) == 3
        assert b.recv(10) == b"abc"


def test_the_shape_of_a_transport_is_checked_when_it_is_made() -> None:
    with pytest.raises(Exception, match="cannot be shaped"):
        Tcp(0, {}, rate=Rate(-1.0))
    assert Shape(RATE, Seconds(0.1)).bytes_per_s == RATE / 8
