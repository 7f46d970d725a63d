"""Flight records: the process that is to blame for the end comes first, then the rank that came late before."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from syncline.errors import UsageError
from syncline.timeline.flight import Fault, FlightOperation, FlightRecord, ProcessFlight, dump
from syncline_bench.cli import cli
from syncline_bench.explain.command import explain

STEP_S = 0.1


def record(late: int | None = 1, host: str = "one", verdict: str = "rank 1 was killed") -> FlightRecord:
    parts = []
    for rank in range(3):
        begins = [step * STEP_S + 0.04 * (rank == late) for step in range(6)]
        operations = [
            FlightOperation(number + 1, 7, 80, number + 1, number, at, at + 0.01, False, "bucket 0")
            for number, at in enumerate(begins)
        ]
        fault = Fault("ValueError", "bad", 1, {}, ("train.py:3 (main)",)) if rank == 1 else None
        where = host if rank else "one"
        part = ProcessFlight(rank, f"rank {rank} ({where}, pid {rank})", tuple(operations), 6, 1e6 - rank, 1.0)
        parts.append(ProcessFlight(**{**vars(part), "fault": fault, "processes": 3, "workers": 3}))
    # each process has a clock of its own, and the wall clock is what they share
    shifted = [
        ProcessFlight(
            **{
                **vars(part),
                "operations": tuple(
                    one._replace(begin_s=one.begin_s + part.process, end_s=one.end_s + part.process)
                    for one in part.operations
                ),
            }
        )
        for part in parts
    ]
    return FlightRecord(3, 3, tuple(shifted), verdict, (1,))


def test_the_end_comes_first_and_then_the_rank_that_came_late(tmp_path: Path) -> None:
    path = tmp_path / "flight.json"
    path.write_text(dump(record()))
    found = explain(path)
    assert [(one.cause, one.rank) for one in found.causes] == [("failure", 1), ("slow_rank", 1)]
    assert found.causes[1].seconds == pytest.approx(0.04, rel=0.01)
    assert found.iteration_s == pytest.approx(STEP_S, rel=0.01)
    assert "train.py:3" in (found.causes[0].remedy or "")
    result = CliRunner(env={"COLUMNS": "60"}).invoke(cli, ["explain", str(path)])
    assert result.exit_code == 0
    assert "Cause: failure: rank 1 was killed." in result.output
    assert max(map(len, result.output.splitlines())) <= 60


def test_no_rank_is_late_where_none_was_or_clocks_differ(tmp_path: Path) -> None:
    path = tmp_path / "flight.json"
    for made in (record(late=None), record(host="other")):
        path.write_text(dump(made))
        assert [one.cause for one in explain(path).causes] == ["failure"]


def test_what_a_hostile_record_says_is_printed_without_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "flight.json"
    path.write_text(dump(record(verdict="\x1b[2J[red]evil\n")))
    output = CliRunner().invoke(cli, ["explain", str(path)]).output
    assert "\x1b" not in output
    assert "[red]evil" in output


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "flight.json"
    path.write_text(dump(record()).replace('"version": 1', '"version": 2', 1))
    with pytest.raises(UsageError, match="version"):
        explain(path)
