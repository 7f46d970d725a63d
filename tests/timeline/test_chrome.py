"""The file that viewers open: what stands in it, on one clock, and what leads from where to where."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.engine.trace import Kind
from syncline.errors import UsageError
from syncline.timeline.chrome import RecordedRun, lines_of, write
from syncline.timeline.spans import TRAINING
from timelines import load, process, span


def sends(rank: int, peer: int, begin_s: float, **notes: Any) -> Any:
    """A process that sends a part of bucket 3 to its peer, twice, and receives as much."""
    found = []
    for again in (0.0, 10.0):
        place, at_s = len(found), begin_s + again
        found += [
            span(at_s, at_s + 5, kind="work", key=3, label="bucket 3 (a to b, 80 bytes)"),
            span(
                at_s, at_s + 5, kind="run", key=3, within=place, label="bucket 3 (a to b, 80 bytes)", phase="allreduce"
            ),
        ]
        what = {"within": place + 1, "segment": 0, "step": 1, "peer": peer, "nbytes": 40, "priority": 2.0}
        found += [span(at_s + 1, at_s + 2, kind=kind, label="bucket 3 (a)", **what) for kind in ("send", "receive")]
    return process(rank, *found, **notes)


def events(path: Path, kind: str, **args: Any) -> list[dict[str, Any]]:
    return [
        event
        for event in load(path)["traceEvents"]
        if event.get("cat") == kind and args.items() <= {**event, **event["args"]}.items()
    ]


@pytest.fixture(params=["t.json", "t.json.gz"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return tmp_path / str(request.param)


def test_messages_are_told_with_all_that_is_known_and_lead_to_their_receives(path: Path) -> None:
    written = write(path, [RecordedRun([sends(0, 1, 100.0), sends(1, 0, 100.5)])])
    assert written.text == "16 spans of 2 processes, on one clock"
    first, second = events(path, "send", pid=1)
    assert first["name"] == "bucket 3 to 1"
    assert first["args"] == {
        "of": "bucket 3 (a)", "bytes": 40, "peer": 1, "segment": 0, "step": 1, "key": 3, "phase": "allreduce",
        "priority": 2.0,
    }  # fmt: skip
    assert (first["ts"], first["dur"]) == (1e6, 1e6)
    arrows = {event["bind_id"]: event["ts"] for event in events(path, "receive", pid=2)}
    assert arrows == {first["bind_id"]: 1.5e6, second["bind_id"]: 11.5e6}


def test_times_are_those_of_one_clock_and_the_error_is_stated(path: Path) -> None:
    ahead = sends(1, 0, 0.5, clock=[[0.0, 100.0, 0.002], [20.0, 102.0, 0.004]])  # it loses one second in ten
    written = write(path, [RecordedRun([sends(0, 1, 100.0), ahead])])
    assert written.text == "16 spans of 2 processes, clocks within 2000 us"
    assert [event["ts"] for event in events(path, "send", pid=2)] == [pytest.approx(1.65e6), pytest.approx(12.65e6)]
    about = load(path)["otherData"]
    assert about["clock error (us)"] == 2000
    assert {name: one["clock error (us)"] for name, one in about["processes"].items()} == {"rank 0": 0, "rank 1": 2000}


def test_runs_that_follow_each_other_lie_one_above_the_other(path: Path) -> None:
    runs = [RecordedRun([sends(0, 1, at_s)], title) for title, at_s in (("ring", 100.0), ("tree", 700.0))]
    write(path, runs)
    names = [event["args"]["name"] for event in load(path)["traceEvents"] if event["name"] == "process_name"]
    assert names == ["ring: rank 0", "tree: rank 0"]
    assert [event["ts"] for event in events(path, "send")] == [1e6, 11e6] * 2
    assert len({event["pid"] for event in events(path, "send")}) == 2


def test_sessions_of_one_process_share_its_lines(path: Path) -> None:
    write(path, [RecordedRun([sends(0, 1, 100.0), sends(0, 1, 200.0, session=1)])])
    found = load(path)
    lines = {(event["pid"], event["tid"]) for event in found["traceEvents"] if event["name"] == "thread_name"}
    assert lines == {(1, 10_001), (1, 10_002), (1, 10_003)}
    assert list(found["otherData"]["processes"]) == ["rank 0", "rank 0, session 2"]


def test_what_has_no_end_and_what_was_left_out_are_said(path: Path) -> None:
    one = process(0, span(1, 0, label="bucket 1"), span(2, 4, kind="forward"), left_out=1234)
    assert "1,234 more left out" in write(path, [RecordedRun([one])]).text
    (wait,) = events(path, "wait")
    assert (wait["dur"], wait["args"]["unfinished"]) == (3e6, True)
    assert load(path)["otherData"]["left out"] == 1234


def test_what_compiled_code_has_done_are_instants_in_its_call(path: Path) -> None:
    call = span(1, 3, kind="advance", label="bucket 1", key=1)
    done = [span(3, 3, kind=kind, label="bucket 1", within=0, peer=1, nbytes=8) for kind in ("receive", "send")]
    write(path, [RecordedRun([process(0, call, *done)])])
    (receive,), (send,) = events(path, "receive"), events(path, "send")
    assert {receive["ph"], send["ph"]} == {"i"}
    assert receive["tid"] == events(path, "advance")[0]["tid"]


def test_priorities_without_bounds_are_still_json(path: Path) -> None:
    write(path, [RecordedRun([process(0, span(1, 2, kind="run", key=1, priority=float("inf")))])])
    assert events(path, "run")[0]["args"]["priority"] == "inf"


def test_nothing_is_a_timeline_too_and_a_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    assert write(tmp_path / "t.json", []).spans == 0
    assert load(tmp_path / "t.json")["traceEvents"] == []
    with pytest.raises(UsageError, match="cannot write"):
        write(tmp_path / "nowhere" / "t.json", [])
    assert [found.name for found in tmp_path.iterdir()] == ["t.json"]


# Lines of a timeline: in each, spans lie beside or in each other, whatever is under way at once


KINDS: tuple[Kind, ...] = ("run", "send", "receive", "wait", "reduce", "forward", "update", "compute")


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 10), st.sampled_from(KINDS), st.integers(0, 4)), max_size=40)
)
def test_spans_of_a_line_do_not_cross(made: list[tuple[int, int, Kind, int]]) -> None:
    spans = [span(begin, begin + length, kind=kind, thread=f"{thread}") for begin, length, kind, thread in made]
    lines = lines_of(spans, [one.end_s for one in spans])
    assert None not in lines
    together = defaultdict(list)
    for one, line in zip(spans, lines, strict=True):
        together[line].append(one)
    for here in together.values():
        for one in here:
            for other in here:
                apart = one.end_s <= other.begin_s or other.end_s <= one.begin_s
                inside = one.begin_s >= other.begin_s and one.end_s <= other.end_s
                around = other.begin_s >= one.begin_s and other.end_s <= one.end_s
                assert apart or inside or around


def test_an_exchange_has_what_it_consists_of_in_its_line_and_nothing_else() -> None:
    spans = [
        span(1, 9, kind="work", key=1),
        span(2, 8, kind="work", key=2),
        span(3, 7, kind="run", key=2, within=1),
        span(4, 6, kind="run", key=1, within=0),
        span(10, 11, kind="work", key=3),
        span(1, 9, kind="work"),  # of a message, which is a span by itself
    ]
    lines = lines_of(spans, [one.end_s for one in spans])
    assert [line and line.title for line in lines] == [
        "exchanges", "exchanges (2)", "exchanges (2)", "exchanges", "exchanges", None,
    ]  # fmt: skip


def test_threads_and_messages_have_lines_of_their_own() -> None:
    spans = [
        span(1, 9, kind="backward", thread="pt_autograd_0"),
        span(2, 8, kind="send", thread="syncline-progress"),
        span(3, 5, kind="send"),
        span(3, 4, kind="reduce"),
        span(3, 5, kind="advance"),
        span(5, 5, kind="receive", within=4),
        span(2, 3, kind="wait", thread="syncline-owner"),
        span(2, 3, kind="wait"),
        span(2, 3, kind="staging"),
    ]
    lines = lines_of(spans, [one.end_s for one in spans])
    assert [line and line.title for line in lines] == [
        TRAINING, "sends", "sends (2)", "memory", "memory", "memory", "syncline-owner", TRAINING,
        "copies from the device",
    ]  # fmt: skip
