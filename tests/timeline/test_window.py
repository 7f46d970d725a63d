"""The steps that a timeline records, and the clocks of its processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.timeline.chrome import Bar, RecordedRun, middle
from syncline.timeline.spans import Offset, ProcessSpans, Reading, TimedSpan, best, identity, offset_of
from timelines import process, span


def steps(count: int, length_s: float = 10.0) -> list[TimedSpan]:
    """Each with a forward pass, a wait and the optimizer's step at its end."""
    return [
        one
        for first in (length_s * (number + 1) for number in range(count))
        for one in (
            span(first + 1, first + 3, kind="forward"),
            span(first + 3, first + 6, kind="wait"),
            span(first + 8, first + 9, kind="optimizer"),
        )
    ]


def shifted(spans: list[TimedSpan], places: int) -> list[TimedSpan]:
    """Behind so many others."""
    return [one._replace(within=one.within + places if one.within >= 0 else -1) for one in spans]


def test_the_iteration_in_the_middle_is_that_of_rank_0() -> None:
    across = span(5, 1000, kind="send", label="bucket")
    other = process(1, across, span(12, 13, kind="run"))
    found = middle(RecordedRun([process(0, *steps(5)), other], "ring"))
    assert found is not None
    assert (found.title, found.number, found.count, found.length_s) == ("ring", 3, 5, 10.0)
    (_, first), (_, second) = found.processes
    assert first == (Bar(2.0, 4.0, "forward"), Bar(4.0, 7.0, "wait"), Bar(9.0, 10.0, "optimizer"))
    assert second == (Bar(0.0, 10.0, "send"),)


def test_a_receive_begins_when_its_message_is_sent() -> None:
    sends = [span(33, 34, kind="run", key=1), span(33, 34, kind="send", within=0, peer=1, nbytes=8)]
    posted = [span(30, 36, kind="run", key=1), span(30, 35, kind="receive", within=0, peer=0, nbytes=8)]
    unknown = span(30, 0, kind="receive", peer=0)
    found = middle(RecordedRun([process(0, *steps(5), *shifted(sends, 15)), process(1, *posted, unknown)]))
    assert found is not None
    (_, (_, _, _, sent)), (_, received) = found.processes
    assert sent == Bar(4.0, 5.0, "send")
    assert received == (Bar(4.0, 6.0, "receive"),)


def test_an_iteration_is_one_that_every_process_has_recorded() -> None:
    full = ProcessSpans(process(1).notes, tuple(steps(3)), left_out=99)
    found = middle(RecordedRun([process(0, *steps(9)), full]))
    assert found is not None
    assert (found.number, found.count) == (2, 2)


def test_runs_without_steps_have_none() -> None:
    assert middle(RecordedRun([])) is None
    assert middle(RecordedRun([process(0)])) is None
    assert middle(RecordedRun([process(0, *steps(1)), process(1)])) is None


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
