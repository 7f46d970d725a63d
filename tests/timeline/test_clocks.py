"""Offsets between clocks: within the error that is stated, whatever way takes how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.timeline.clocks import Offset, Reading, best, identity, offset_of

DELAYS = st.floats(1e-6, 0.1)
ASKED = st.lists(st.tuples(DELAYS, DELAYS), min_size=1, max_size=8)


def ask(at_s: float, ahead_s: float, drift: float, ways: list[tuple[float, float]]) -> Reading:
    """The best of some exchanges with a clock that shows ``ahead_s + (1 + drift) t``."""
    readings = []
    for there, back in ways:
        readings.append(Reading.of(at_s, ahead_s + (1 + drift) * (at_s + there), at_s + there + back))
        at_s += there + back
    return best(readings)


@given(st.floats(-1e5, 1e5), st.floats(-1e-4, 1e-4), ASKED, ASKED, st.floats(0, 1))
def test_an_offset_is_wrong_by_no_more_than_it_says(
    ahead_s: float,
    drift: float,
    first: list[tuple[float, float]],
    last: list[tuple[float, float]],
    share: float,
) -> None:
    start_s, stop_s = 1000.0, 1600.0
    offset = Offset((ask(start_s, ahead_s, drift, first), ask(stop_s, ahead_s, drift, last)))
    at_s = offset.readings[0].at_s + share * (offset.readings[1].at_s - offset.readings[0].at_s)
    assert abs(offset.there(at_s) - (ahead_s + (1 + drift) * at_s)) <= offset.error_s * 1.001 + 1e-9


def test_beyond_the_readings_the_offset_stays() -> None:
    """A session of a moment says little of how clocks drift."""
    offset = Offset((Reading.of(10.0, 110.0, 10.002), Reading.of(10.1, 110.102, 10.102)))
    assert offset.there(5.0) == pytest.approx(5.0 + offset.readings[0].offset_s)
    assert offset.there(50.0) == pytest.approx(50.0 + offset.readings[1].offset_s)


def test_one_reading_holds_for_ever_and_none_is_the_same_clock() -> None:
    assert Offset((Reading.of(10.0, 110.5, 11.0),)).there(70.0) == pytest.approx(170.0)
    assert Offset().there(70.0) == 70.0
    assert Offset().error_s == 0.0


def test_an_offset_is_noted_as_it_is_read() -> None:
    readings = [[10.0, 5.0, 0.5], [20.0, 6.0, 0.25]]
    assert offset_of({"clock": readings}) == Offset((Reading(10.0, 5.0, 0.5), Reading(20.0, 6.0, 0.25)))
    assert offset_of({}) == Offset()
    for wrong in ("x", [1.0], [[1.0, 2.0]], [[1.0, float("nan"), 1.0]], readings * 2):
        with pytest.raises(ValueError, match="clock"):
            offset_of({"clock": wrong})


def test_processes_of_one_kernel_share_a_clock() -> None:
    assert identity() == identity()
