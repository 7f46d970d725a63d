"""The arithmetic of a slow line: never faster than its rate, never idle without need, late by exactly the delay."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.nouns import Rate, Seconds
from syncline.wire.shaped import LATE_S, PACKET_BYTES, QUANTUM_S, WINDOW_BYTES, DelayLine, Pacer, Shape

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


@given(rates, st.floats(1.0, 1e5))
def test_a_pause_gives_no_credit(rate: float, pause: float) -> None:
    pacer = Pacer(rate)
    pacer.rest(0.0)
    pacer.spend(pacer.allowance(0.0))
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
