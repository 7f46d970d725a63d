"""The order of a comparison: what is kept, shown and returned, whatever its rows do. No process is started here."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from syncline.engine.trace import begin
from syncline.strategy.words import PRESETS
from syncline.timeline.folder import open_part
from syncline_bench import compare
from syncline_bench.cases import Case, Comparison
from syncline_bench.report.comparison import BASELINE, Row
from timelines import load

Measure = Callable[[Case], Row]


def finished(case: Case) -> Row:
    rate = 100.0 * case.workers
    return Row(case.strategy, case.workers, images_per_s=rate, iteration_s=0.01, replicas_equal=True, batch=case.batch)


def carry_out(
    monkeypatch: pytest.MonkeyPatch, folder: Path, measure: Measure, report: bool = False
) -> tuple[int, dict[str, Any], str]:
    """A comparison of single, ring and tree; returns its status, its result file and what it printed."""
    cases = tuple(Case(name, 1 if name == BASELINE else 2, 0, 64, 10) for name in (BASELINE, "ring", "tree"))
    path = folder / "r.json"
    comparison = Comparison("digits", cases, 0, None, 10, path, folder / "r.html" if report else None)
    monkeypatch.setattr(compare, "measure", lambda case, *_, **__: measure(case))
    output = Console(file=io.StringIO(), force_terminal=False, width=80)
    status = compare.carry_out(comparison, 10.0, Console(file=io.StringIO(), force_terminal=False), output)
    assert isinstance(output.file, io.StringIO)
    return status, json.loads(path.read_text()), output.file.getvalue()


def test_rows_that_finish_give_status_0_and_efficiencies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, data, shown = carry_out(monkeypatch, tmp_path, finished)
    assert status == 0
    assert [row["scaling_efficiency"] for row in data["rows"]] == [1.0, 1.0, 1.0]
    assert "tree" in shown
    assert str(tmp_path / "r.json") in shown.replace("\n", "")


def test_a_failing_row_keeps_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(case: Case) -> Row:
        return finished(case) if case.strategy != "ring" else Row("ring", 2, error="rank 1: PeerLost")

    status, data, shown = carry_out(monkeypatch, tmp_path, measure, report=True)
    assert status == 1
    assert [row["error"] for row in data["rows"]] == [None, "rank 1: PeerLost", None]
    assert "rank 1: PeerLost" in shown
    assert "rank 1: PeerLost" in (tmp_path / "r.html").read_text()


def test_rows_say_what_their_strategy_was_asked_for_as() -> None:
    case = Case("ring", 2, 0, 64, 10, preset=PRESETS["caffe-mpi"], requested="caffe-mpi")
    row = compare._asked(case, finished(case))
    assert (row.strategy, row.preset, row.note) == ("ring", "caffe-mpi", "the original sums with NCCL")
    assert row.requested == "caffe-mpi"
    assert row.name == "caffe-mpi: ring"
    plain = compare._asked(replace(case, preset=None, requested="ring codec=none"), finished(case))
    assert plain == replace(finished(case), requested="ring codec=none")
    assert plain.name == "ring"


def test_without_the_single_worker_there_is_no_efficiency(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(case: Case) -> Row:
        return Row(case.strategy, 1, error="no") if case.strategy == BASELINE else finished(case)

    status, data, _ = carry_out(monkeypatch, tmp_path, measure)
    assert status == 1
    assert [row["scaling_efficiency"] for row in data["rows"]] == [None, None, None]


def test_replicas_that_differ_give_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, _, _ = carry_out(monkeypatch, tmp_path, lambda case: Row(case.strategy, 2, replicas_equal=False))
    assert status == 1


def test_an_interrupt_keeps_the_rows_so_far(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(case: Case) -> Row:
        if case.strategy == "tree":
            raise KeyboardInterrupt
        return finished(case)

    status, data, shown = carry_out(monkeypatch, tmp_path, measure, report=True)
    assert status == 130
    assert [row["strategy"] for row in data["rows"]] == [BASELINE, "ring"]
    assert "ring" in shown
    assert (tmp_path / "r.html").exists()


def test_the_result_file_grows_with_every_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def measure(case: Case) -> Row:
        path = tmp_path / "r.json"
        seen.append([row["strategy"] for row in json.loads(path.read_text())["rows"]] if path.exists() else None)
        return finished(case)

    carry_out(monkeypatch, tmp_path, measure)
    assert seen == [None, [BASELINE], [BASELINE, "ring"]]


def test_rows_are_recorded_apart_and_put_together_whatever_becomes_of_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases = tuple(Case(name, 2, 0, 64, 10) for name in ("ring", "ddp", "tree", "direct"))

    def measure(case: Case, *_: Any, env: dict[str, str]) -> Row:
        if case.strategy == "direct":
            raise KeyboardInterrupt
        if case.strategy != "ddp":  # which records nothing
            file = open_part(Path(env["SYNCLINE_TRACE_PARTS"]), 0, 0)
            for _ in range(3):
                begin(file, "optimizer", "SGD").end()
            file.close()
        return finished(case)

    monkeypatch.setattr(compare, "measure", measure)
    paths = (tmp_path / "r.json", tmp_path / "r.html")
    comparison = Comparison("digits", cases, 0, None, 10, *paths, timeline_path=tmp_path / "t.json.gz")
    output = Console(file=io.StringIO(), force_terminal=False, width=80)
    assert compare.carry_out(comparison, 10.0, Console(file=io.StringIO(), force_terminal=False), output) == 130
    names = list(load(tmp_path / "t.json.gz")["otherData"]["processes"])
    assert [name.partition(":")[0] for name in names] == ["ring", "tree"]
    assert isinstance(output.file, io.StringIO)
    assert "6 spans of 2 processes" in output.file.getvalue()
    page = (tmp_path / "r.html").read_text()
    assert "Timeline: ring" in page
    assert "Timeline: tree" in page
    assert sorted(found.name for found in tmp_path.iterdir()) == ["r.html", "r.json", "t.json.gz"]
