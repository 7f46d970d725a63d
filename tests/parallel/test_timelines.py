"""Timelines of real processes: every message has its two ends, in the order of time, however the run ends."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import timeline_bodies as bodies
from click.testing import CliRunner

from pool import Pool
from syncline.timeline.flight_memory import record_in
from syncline_bench.cli.show import timeline
from timelines import load

Events = list[dict[str, Any]]


def everyone(world: int, address: str, *case: Any) -> list[list[Any]]:
    return [[[index, world, address], *case] for index in range(world)]


def of(events: Events, *kinds: str) -> Events:
    return [event for event in events if event.get("cat") in kinds]


def put_together(folder: Path) -> None:
    result = CliRunner().invoke(timeline, [str(folder)])
    assert result.exit_code == 0, result.output


def check_messages(events: Events, error_us: float) -> None:
    """What one process sends another receives, of as many bytes, and not before it began to be sent."""
    ends: dict[str, Events] = defaultdict(list)
    for event in of(events, "send", "receive"):
        assert event["args"]["bytes"] >= 0
        if "key" in event["args"] and "unfinished" not in event["args"]:  # a server's for a step that does not come
            assert {"of", "peer", "phase", "step", "priority"} <= event["args"].keys()
            ends[event["bind_id"]].append(event)
    assert ends
    for one, other in ends.values():
        sent, received = (one, other) if one["cat"] == "send" else (other, one)
        assert (sent["cat"], received["cat"]) == ("send", "receive")
        assert (sent["args"]["peer"] + 1, received["args"]["peer"] + 1) == (received["pid"], sent["pid"])
        for what in ("bytes", "key", "phase", "step"):
            assert sent["args"][what] == received["args"][what]
        assert received["ts"] + received["dur"] >= sent["ts"] - error_us


@pytest.mark.parametrize(
    ("strategy", "world", "clocks"),
    [
        ("ring transport=tcp schedule=wait_free", 3, True),
        ("ps(servers=1) transport=tcp codec=int8", 3, True),
        ("ring transport=shm", 2, False),
    ],
)
def test_rank_0_collects_what_all_have_recorded(
    pool: Pool, address: str, tmp_path: Path, strategy: str, world: int, clocks: bool
) -> None:
    path = tmp_path / "t.json.gz"
    environ = {"SYNCLINE_TRACE": str(path), "SYNCLINE_FLIGHT": str(tmp_path / "f.json")}
    with pool.start(bodies.trains, everyone(world, address, strategy, clocks), environ) as group:
        times = [ends for ends in group.results() if ends is not None]  # a server ends in prepare
        assert "syncline: timeline: " in group.ranks[0].printed(), group.ranks[0]
    assert [found.name for found in tmp_path.iterdir()] == ["t.json.gz"]  # and nothing of the flight record
    found = load(path)
    events, error_us = found["traceEvents"], found["otherData"]["clock error (us)"]
    servers = strategy.count("servers")
    kinds = {(event["pid"], event["cat"]) for event in of(events, "forward", "backward", "optimizer", "wait")}
    workers = range(1, world + 1 - servers)
    assert kinds == {(rank, cat) for rank in workers for cat in ("forward", "backward", "optimizer", "wait")} | (
        {(world, "wait")} if servers else set()
    )
    assert (error_us > 0) == clocks
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last <= 1e6 * (max(end for _, end in times) - min(begin for begin, _ in times)) + 2 * error_us
    if "shm" in strategy:
        assert of(events, "advance")
        assert {event["ph"] for event in of(events, "reduce")} == {"i"}
    else:
        check_messages(events, 2 * error_us)
    if servers:
        assert len(of(events, "update")) == 4
        assert {event["args"]["phase"] for event in of(events, "compute")} == {"encode", "decode"}


@pytest.mark.parametrize("how", ["raised", "killed"])
def test_what_a_failed_run_has_left_can_be_put_together(pool: Pool, address: str, tmp_path: Path, how: str) -> None:
    """And its flight record, in a folder where no launcher collects it."""
    folder, flights = tmp_path / "t.json.parts", tmp_path / "f.json.parts"
    environ = {"SYNCLINE_TRACE": str(tmp_path / "t.json"), "SYNCLINE_FLIGHT": str(tmp_path / "f.json")}
    with pool.start(bodies.fails, everyone(3, address, how), environ) as group:
        group.hear(1, among=[0, 2])
        group.ranks[1].line.send("end")
        group.end()
        told = "".join(rank.printed() for rank in group.ranks)
    assert f"syncline timeline {folder}" in told
    assert not (tmp_path / "t.json").exists()
    put_together(folder)
    events = load(tmp_path / "t.json")["traceEvents"]
    assert {event["pid"] for event in of(events, "run")} == {1, 2, 3}
    stuck = {event["pid"] for event in of(events, "run") if event["args"].get("unfinished")}
    assert 1 in stuck
    assert 2 not in stuck
    assert told.count(f"syncline flight {flights}") >= 1
    record = record_in(flights)
    assert record is not None
    assert record.culprits == (1,)
    assert [len(part.operations) - len(record.parts[1].operations) for part in record.parts] == [1, 0, 1]
    said = "failed with ValueError: the data of this rank are spoilt and " if how == "raised" else ""
    assert record.verdict.startswith(f"rank 1 {said}did not enter allreduce; ranks 0, 2 waited for it")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_who_is_gone_before_rank_0_ends_leaves_its_part(
    pool: Pool, address: str, tmp_path: Path, elsewhere: bool
) -> None:
    path, folder, other = tmp_path / "t.json", tmp_path / "t.json.parts", tmp_path / "of another host"
    patience_s = 2.0 if elsewhere else 60.0
    with pool.start(bodies.leaves_first, everyone(3, address, patience_s), {"SYNCLINE_TRACE": str(path)}) as group:
        group.end(among=[1])
        if elsewhere:
            other.mkdir()
            for part in folder.glob("process-1-*"):
                part.rename(other / part.name)
        for rank in (0, 2):
            group.ranks[rank].line.send("go on")
        group.results()
        told = group.ranks[0].printed()
    found = {event["pid"] for event in of(load(path)["traceEvents"], "run")}
    assert found in ([{1, 3}, {1}] if elsewhere else [{1, 2, 3}])  # on a busy machine rank 2 may be late as well
    assert ("the timeline lacks rank 1 (" in told) == elsewhere
    assert folder.exists() == elsewhere
    if elsewhere:
        for part in other.iterdir():
            part.rename(folder / part.name)
        put_together(folder)
        assert {event["pid"] for event in of(load(path)["traceEvents"], "run")} == {1, 2, 3}


def test_sessions_that_follow_each_other_have_a_timeline_each(pool: Pool, address: str, tmp_path: Path) -> None:
    with pool.start(bodies.twice, everyone(2, address), {"SYNCLINE_TRACE": str(tmp_path / "t.json.gz")}) as group:
        group.results()
    assert sorted(found.name for found in tmp_path.iterdir()) == ["t-2.json.gz", "t.json.gz"]
    assert all(len(load(found)["otherData"]["processes"]) == 2 for found in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("paths", "part"),
    [
        (["t.txt", "t.txt"], "a timeline is a file such as trace.json.gz"),
        (["nowhere/t.json", "nowhere/t.json"], "there is no folder"),
        (["t.json", ""], "has SYNCLINE_TRACE"),
    ],
)
def test_what_cannot_be_recorded_is_refused_at_the_start(
    pool: Pool, address: str, tmp_path: Path, paths: list[str], part: str
) -> None:
    named = [path and str(tmp_path / path) for path in paths]
    with pool.start(bodies.starts, everyone(2, address, named)) as group:
        assert all(part in text for _, text in group.results())
    assert not list(tmp_path.iterdir())
