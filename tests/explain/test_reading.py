"""Timelines are read back as they were written, and whatever else a file may hold is refused in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from planted import Planted, causes, slower

from syncline.errors import UsageError
from syncline.timeline.chrome import RecordedRun, write
from syncline_bench.explain import reading
from syncline_bench.explain.command import explain
from syncline_bench.explain.reading import read_timeline
from timelines import process, span

SLOW = Planted(workers=3, slow=slower(1, "backward", 0.2), host=lambda rank: f"node{rank}")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / "t.json.gz"
    write(path, [SLOW.run(), Planted(servers=1).run()])
    return path


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
@pytest.mark.parametrize("planted", [SLOW, Planted(servers=1, rate=2e8), Planted(rates={(0, 1): 2e7})])
def test_what_was_written_has_the_causes_that_it_had(tmp_path: Path, name: str, planted: Planted) -> None:
    write(tmp_path / name, [planted.run()])
    (run,) = read_timeline(tmp_path / name)
    before, after = causes(planted.run()), causes(run)
    assert [(one.cause, one.rank, one.link, one.said) for one in after] == [
        (one.cause, one.rank, one.link, one.said) for one in before
    ]
    assert [one.seconds for one in after] == pytest.approx([one.seconds for one in before], rel=1e-3)


def test_runs_are_told_apart_by_their_titles(tmp_path: Path) -> None:
    titles = "ring, 3 workers", "a: rank 3 (x): b"
    write(tmp_path / "t.json", [RecordedRun(SLOW.run().processes, title) for title in titles])
    runs = read_timeline(tmp_path / "t.json")
    assert [run.title for run in runs] == list(titles)
    assert [one.notes["name"] for one in runs[1].processes] == ["rank 0 (node0)", "rank 1 (node1)", "rank 2 (node2)"]


def test_spans_without_an_end_and_instants_are_no_messages(tmp_path: Path) -> None:
    call = span(1, 3, kind="advance", label="bucket 1", key=1)
    done = span(3, 3, kind="receive", label="bucket 1", within=0, peer=1, nbytes=8)
    write(tmp_path / "t.json", [RecordedRun([process(0, call, done, span(4, 0, label="bucket 2"))])])
    (run,) = read_timeline(tmp_path / "t.json")
    assert [(one.kind, one.end_s > 0) for one in run.processes[0].spans] == [("advance", True), ("wait", False)]


FOREIGN: dict[str, tuple[Any, str]] = {
    "of a browser": ({"traceEvents": [{"ph": "X", "name": "x", "ts": 1, "dur": 2}]}, "not a timeline of Syncline"),
    "a bare list": ([{"ph": "X"}], "not a timeline of Syncline"),
    "no JSON": ("{", "neither a timeline nor JSON"),
    "a number": (5, "no timeline, flight record or result"),
    "of a table": ({"rows": [{"x": 1}]}, "no timeline, flight record or result"),
    "nested": ("[" * 100_000, "not a timeline"),
    "a prediction": (
        {"machine": "", "workload": "", "single_s": {}, "rows": [{"strategy": "ring"}]},
        "syncline predict",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_others_are_refused(tmp_path: Path, name: str) -> None:
    content, part = FOREIGN[name]
    path = tmp_path / "t.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    refused(path, part)


def refused(path: Path, part: str) -> None:
    with pytest.raises(UsageError) as told:
        explain(path)
    assert part in str(told.value)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 600


def test_a_file_without_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for content in (b"\xff\xfe\x00", b"\x1f\x8b rest", b""):
        path.write_bytes(content)
        refused(path, str(path))


def test_a_truncated_timeline_is_refused_wherever_it_ends(written: Path, tmp_path: Path) -> None:
    data = written.read_bytes()
    for count in (3, 20, len(data) // 2, len(data) - 1):
        (tmp_path / "t.json.gz").write_bytes(data[:count])
        refused(tmp_path / "t.json.gz", "t.json.gz")
    text = gzip.decompress(data)
    for count in (100, len(text) // 2, len(text) - 2):
        (tmp_path / "t.json").write_bytes(text[:count])
        refused(tmp_path / "t.json", "t.json")


def test_another_version_and_another_maker_are_refused(written: Path, tmp_path: Path) -> None:
    text = gzip.decompress(written.read_bytes()).decode()
    for old, new, part in (
        ('"format": 1', '"format": 2', "another version of Syncline"),
        ('"made by": "syncline"', '"made by": "x"', "another program's trace"),
        ('"cat":"forward"', '"cat":"forwards"', "not a timeline of this version"),
        ('"ts":', '"when":', "not a timeline of this version"),
    ):
        path = tmp_path / "t.json"
        path.write_text(text.replace(old, new))
        refused(path, part)


def test_a_small_file_that_unpacks_to_huge_events_is_refused(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_CHARACTERS", 3_000_000)
    assert read_timeline(written)
    lines = gzip.decompress(written.read_bytes()).decode().splitlines(keepends=True)
    path = tmp_path / "t.json"
    path.write_text("".join([lines[0], " " * 3_000_000 + "\n", *lines[1:]]))
    refused(path, "events of more than 3000000 characters")
