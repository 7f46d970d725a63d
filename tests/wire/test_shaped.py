"""A slow line never exceeds its rate and is never idle without need, by itself and between sockets."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.nouns import Rate, Seconds
from syncline.transports import Handle
from syncline.transports.tcp import Tcp
from syncline.wire.links import Link
from syncline.wire.shaped import (
    LATE_S,
    LEAST_QUEUE_BYTES,
    MOST_QUEUE_BYTES,
    PACKET_BYTES,
    QUANTUM_S,
    QUEUE_S,
    WINDOW_BYTES,
    DelayLine,
    Departures,
    Line,
    Pacer,
    Shape,
    ShapedLoop,
)

rates = st.sampled_from([125.0, 1e4, 1.25e6, 1.25e8, 1.25e11])
gaps = st.one_of(st.just(0.0), st.floats(0, 0.02), st.floats(0, 3.0))


@given(rates, st.lists(st.tuples(gaps, st.integers(0, 10**9), st.booleans()), min_size=1, max_size=60))
def test_no_interval_sees_more_than_its_rate_and_a_burst(rate: float, events: list[tuple[float, int, bool]]) -> None:
    """Whoever asks, however often, and with whatever pauses."""
    pacer = Pacer(rate)
    now, passed = 0.0, []
    for gap, wanted, rests in events:
        now += gap
        count = min(wanted, pacer.allowance(now))
        pacer.spend(count)
        passed.append((now, count))
        if rests:
            pacer.rest(now)
    sums = [0, *accumulate(count for _, count in passed)]
    for first, (begin, _) in enumerate(passed):
        for last in range(first, len(passed)):
            through = sums[last + 1] - sums[first]
            assert through <= rate * (passed[last][0] - begin) * (1 + 1e-9) + pacer.burst_bytes + 1


@given(rates, st.lists(st.floats(0, LATE_S / 2), min_size=1, max_size=60))
def test_who_has_much_to_send_gets_the_whole_rate_although_it_wakes_late(rate: float, late: list[float]) -> None:
    pacer = Pacer(rate)
    now = start = 10.0
    pacer.rest(now)
    passed = 0
    for lateness in late:
        now = max(now, pacer.opens_at) + lateness
        count = pacer.allowance(now)
        assert count >= PACKET_BYTES
        pacer.spend(count)
        passed += count
        assert passed >= rate * (now - start) * (1 - 1e-9)


@given(rates, st.lists(st.tuples(gaps, st.integers(0, 10**9), st.floats(0, 2.0)), min_size=1, max_size=40))
def test_what_waits_leaves_at_the_rate_however_late_anybody_looks(
    rate: float, bursts: list[tuple[float, int, float]]
) -> None:
    """In every burst all that waits leaves at the rate from its begin on, and a pause before it gives nothing."""
    port, now, through = Departures(rate), 10.0, 10.0
    for gap, waiting, late in bursts:
        now = max(now, through) + gap
        port.begin(now)
        opens, through = port.opens_at(waiting), now + waiting / rate
        assert now <= opens <= through * (1 + 1e-9)
        assert port.due(now) <= 1
        left = min(waiting, port.due(opens + late))
        assert left == pytest.approx(min(waiting, (opens + late - now) * rate), rel=1e-6, abs=2 + 1e-9 * rate)
        port.spend(waiting)
        assert port.due(through) <= 1 + 1e-9 * rate


@given(rates, st.floats(1.0, 1e5))
def test_a_pause_gives_credit_up_to_a_limit_and_none_once_noted(rate: float, pause: float) -> None:
    pacer = Pacer(rate)
    pacer.rest(0.0)
    pacer.spend(pacer.allowance(0.0))
    assert pacer.allowance(pause * (1 + QUANTUM_S)) <= pacer.burst_bytes + 1
    pacer.rest(pause * (1 + QUANTUM_S))
    assert pacer.allowance(pause * (1 + QUANTUM_S)) <= max(rate * QUANTUM_S, PACKET_BYTES) + 1


@given(st.floats(0, 100), st.integers(0, 10**12))
def test_without_a_rate_all_may_pass(now: float, nbytes: int) -> None:
    pacer = Pacer(None)
    pacer.spend(nbytes)
    assert pacer.allowance(now) > 0
    assert pacer.opens_at <= now


@given(
    st.sampled_from([0.0, 0.005, 0.3]),
    st.lists(st.tuples(st.floats(0, 0.4), st.binary(max_size=50)), max_size=20),
    st.lists(st.tuples(st.floats(0, 0.4), st.lists(st.integers(0, 40), max_size=3)), max_size=30),
)
def test_bytes_come_out_in_order_once_they_are_old_enough(
    delay: float, puts: list[tuple[float, bytes]], takes: list[tuple[float, list[int]]]
) -> None:
    line = DelayLine(delay)
    put_times = list(accumulate(gap for gap, _ in puts))
    stream = b"".join(data for _, data in puts)
    took, at = b"", 0
    now = 0.0
    for gap, sizes in takes:
        now += gap
        while at < len(puts) and put_times[at] <= now:
            if puts[at][1]:
                line.put(puts[at][1], put_times[at])
            at += 1
        views = [memoryview(bytearray(size)) for size in sizes]
        got = line.take(views, now)
        due = sum(len(data) for time, (_, data) in zip(put_times, puts, strict=True) if time + delay <= now)
        assert (got or 0) == min(sum(sizes), due - len(took))
        assert (got is None) == (due == len(took))
        took += b"".join(views)[: got or 0]
        assert line.nbytes == sum(len(data) for _, data in puts[:at]) - len(took)
    assert stream.startswith(took)


def test_the_end_of_the_stream_comes_behind_all_bytes_and_stays() -> None:
    line = DelayLine(1.0)
    line.put(b"last", 0.0)
    line.put(b"", 0.5)
    space = [memoryview(bytearray(100))]
    assert line.take(space, 1.0) == 4
    assert line.take(space, 1.2) is None
    assert line.due_at == 1.5
    assert [line.take(space, 2.0), line.take(space, 9.0)] == [0, 0]


def test_a_line_holds_no_more_than_its_window() -> None:
    line = DelayLine(5.0)
    megabyte = bytes(1 << 20)
    while not line.full:
        line.put(megabyte, 0.0)
    assert line.nbytes == WINDOW_BYTES
    assert line.take([memoryview(bytearray(1))], 5.0) == 1
    assert not line.full


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rate": 0.0}, "rate of 0 bit/s"),
        ({"rate": -1e9}, "from 1Kbit to 1Tbit"),
        ({"rate": 1.0}, "from 1Kbit"),
        ({"rate": 1e15}, "to 1Tbit"),
        ({"rate": float("nan")}, "nan"),
        ({"delay": -0.001}, "from 0s to 10s"),
        ({"delay": 3600.0}, "delay of 3600 s"),
        ({"delay": float("nan")}, "nan"),
    ],
)
def test_values_that_no_line_has_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Shape(**values)


def test_a_line_as_fast_as_it_is_needs_no_shaping() -> None:
    assert Shape().plain
    assert not Shape(rate=Rate(1e9)).plain
    assert not Shape(delay=Seconds(1e-6)).plain
    assert Shape(rate=Rate(1e9)).bytes_per_s == 1.25e8


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
        Link(Line(sock, Shape(RATE), clock), peer, lambda *_: memoryview(bytearray(4_000_000)), lambda *_: None)
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


class Queued:
    """A loop with one line, whose clock a test sets, and the peer's socket."""

    def __init__(self, shape: Shape = Shape(RATE)) -> None:  # noqa: B008 - a frozen value
        self.clock, self.lost = Clock(), list[int]()
        with socket.create_server(("127.0.0.1", 0)) as door:
            mine = socket.create_connection(door.getsockname())
            self.peer, _ = door.accept()
        self.line = Line(mine, shape, self.clock)
        self.link = Link(self.line, 1, lambda *_: None, lambda *_: None)  # type: ignore[arg-type]
        self.loop = ShapedLoop([self.link], self.lost.append, shape, self.clock)
        self.accepted = list[int]()

    def push(self, nbytes: int, priority: float = 0.0) -> None:
        self.link.push(
            1, 0, body=memoryview(bytes(nbytes)), priority=priority, after=lambda: self.accepted.append(nbytes)
        )
        self.loop.write()

    def at(self, now: float) -> int:
        """Go on to a time; the bytes that have left since the start. The peer reads them."""
        self.clock.now = 100.0 + now
        before = -1
        while before < self.link.sent_bytes:
            before = self.link.sent_bytes
            self.loop.turn(0.0)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                while self.peer.recv(1 << 20, socket.MSG_DONTWAIT):
                    pass
        return self.link.sent_bytes


@pytest.fixture
def queued() -> Iterator[Queued]:
    made = Queued()
    yield made
    made.loop.close()
    made.peer.close()


def test_a_message_after_a_pause_takes_its_time_and_its_sender_none(queued: Queued) -> None:
    for begun in (0.0, 5.0, 5.1):
        before = queued.at(begun)
        queued.push(100_000)
        assert queued.accepted.pop() == 100_000
        assert not queued.loop.idle
        whole_s = 100_024 * 8 / RATE
        assert queued.at(begun + 0.5 * whole_s) - before == pytest.approx(50_012, abs=1)
        assert queued.at(begun + whole_s - 1e-6) < before + 100_024
        assert queued.at(begun + whole_s + 1e-9) == before + 100_024
        assert queued.loop.idle


def test_late_turns_cost_a_full_queue_nothing_and_an_empty_one_all(queued: Queued) -> None:
    queued.push(20_000_000)
    size = len(queued.line.queue)
    assert size == RATE / 8 * QUEUE_S
    queued.at(QUEUE_S / 2)
    assert queued.at(QUEUE_S) == size
    assert queued.at(9.0) == 2 * size  # of what was accepted until then
    assert queued.at(9.0 + 0.25 * QUEUE_S) == 2.25 * size


@pytest.mark.parametrize("rate", [1e3, 4e8, 1e12])
def test_queues_are_bounded(rate: float) -> None:
    found = Queued(Shape(Rate(rate)))
    found.push(20_000_000)
    assert LEAST_QUEUE_BYTES <= len(found.line.queue) <= MOST_QUEUE_BYTES
    found.loop.close()
    found.peer.close()


def test_behind_a_queue_urgent_frames_wait_no_longer_than_behind_the_kernels(queued: Queued) -> None:
    queued.push(4_000_000, priority=5.0)
    assert len(queued.line.queue) <= 512 * 1024
    queued.push(100, priority=1.0)
    now = 0.0
    while 100 not in queued.accepted:
        now += TICK_S
        queued.at(now)
    assert queued.accepted[0] == 4_000_000  # it had begun


def test_a_peer_that_takes_nothing_earns_no_rate_for_others() -> None:
    """Its queue is full for ten seconds. Then bytes for another one take their time."""
    shape, clock = Shape(RATE), Clock()
    lines, peers = [], []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as door:
            lines.append(Line(socket.create_connection(door.getsockname()), shape, clock))
            peers.append(door.accept()[0])
    links = [Link(line, rank, lambda *_: None, lambda *_: None) for rank, line in enumerate(lines)]  # type: ignore[arg-type]
    loop = ShapedLoop(links, lambda _: None, shape, clock)
    links[0].push(1, 0, body=memoryview(bytes(300_000_000)))
    for tick in range(1_000):
        clock.now = 100.0 + tick / 100
        loop.turn(0.0)
    assert lines[0].queue
    assert not lines[0].writable
    links[1].push(1, 0, body=memoryview(bytes(100_000)))
    loop.write()
    whole_s, begun = 100_024 * 8 / RATE, clock.now
    clock.now = begun + whole_s / 2
    loop.turn(0.0)
    assert links[1].sent_bytes <= 50_012 + 1
    clock.now = begun + whole_s + 1e-6
    loop.turn(0.0)
    assert links[1].sent_bytes == 100_024
    loop.close()
    for peer in peers:
        peer.close()


def test_what_was_accepted_arrives_although_the_end_is_closed(queued: Queued) -> None:
    queued.push(100_000)
    assert queued.at(0.0) == 0
    queued.loop.close()
    queued.peer.settimeout(5.0)
    come = 0
    while got := queued.peer.recv(1 << 20):
        come += len(got)
    assert come == 100_024


def test_a_dead_peer_is_found_while_a_queue_is_full(queued: Queued) -> None:
    queued.push(4_000_000)
    queued.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    queued.peer.close()
    for _ in range(3):
        queued.loop.turn(0.0)
    assert queued.lost == [1]


def test_the_shape_of_a_transport_is_checked_when_it_is_made() -> None:
    with pytest.raises(Exception, match="cannot be shaped"):
        Tcp(0, {}, rate=Rate(-1.0))
    assert Shape(RATE, Seconds(0.1)).bytes_per_s == RATE / 8
