"""One iteration of a run: on all processes the same time, cut at its ends."""

from __future__ import annotations

from syncline.timeline.chrome import RecordedRun
from syncline.timeline.spans import ProcessSpans, TimedSpan
from syncline.timeline.window import Bar, middle
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
