"""What tests of timelines share: spans of no run, and what has to hold for every file."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from syncline.timeline.spans import TRAINING, ProcessSpans, TimedSpan

NONE = TimedSpan(0.0, 0.0, -1, 0.0, -1, -1, -1, -1, -1, "wait", "", "", TRAINING)


def span(begin_s: float, end_s: float, **what: Any) -> TimedSpan:
    return NONE._replace(begin_s=begin_s, end_s=end_s, **what)


def process(number: int, *spans: TimedSpan, left_out: int = 0, **notes: Any) -> ProcessSpans:
    said = {"process": number, "session": 0, "name": f"rank {number}"}
    return ProcessSpans(said | notes, spans, left_out)


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is no number of JSON")


def load(path: Path) -> dict[str, Any]:
    """A timeline that a viewer could open, checked for what holds in every one."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    check(found["traceEvents"])
    return found


def check(events: list[dict[str, Any]]) -> None:
    """Processes and threads have names; spans of a thread lie one in another; arrows have two ends."""
    named = {(event["pid"], event["tid"], event["name"]) for event in events if event["ph"] == "M"}
    threads, arrows = defaultdict(list), defaultdict(list)
    for event in events:
        assert event["ph"] in ("M", "X", "i")
        if event["ph"] == "M":
            continue
        assert (event["pid"], 0, "process_name") in named
        assert (event["pid"], event["tid"], "thread_name") in named
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if "bind_id" in event:
            arrows[event["bind_id"]].append("flow_out" in event)
    for spans in threads.values():
        around: list[float] = []
        for begin, end in sorted(spans, key=lambda one: (one[0], -one[1])):
            while around and around[-1] <= begin + 0.002:  # written to the nanosecond
                around.pop()
            assert not around or end <= around[-1] + 0.002
            around.append(end)
    assert all(sorted(ends) == [False, True] for ends in arrows.values())
