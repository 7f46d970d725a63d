"""``--json -`` and its kin: standard output has the result and nothing else, whichever verb writes it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from syncline_bench import accuracy, compare
from syncline_bench.cases import Case
from syncline_bench.cli import cli
from syncline_bench.collectives import collective_bench
from syncline_bench.report.bench import BenchResult, Measured
from syncline_bench.report.comparison import Row


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained or measured."""

    def trained(case: Case, *_: Any, **__: Any) -> Row:
        return Row(case.strategy, case.workers, accuracy=0.9, iteration_s=0.01, images_per_s=9.0, replicas_equal=True)

    def benched(_: Any, result: BenchResult, save: Any, __: Any) -> None:
        for nbytes in (1000, 2000):
            result = result.with_rows((Measured("shm", "auto", 2, nbytes, median_s=0.1, correct=True),))
            save(result)

    monkeypatch.setattr(compare, "measure", trained)
    monkeypatch.setattr(accuracy, "measure", trained)
    monkeypatch.setattr(collective_bench, "measure", benched)


LINES = (
    "compare --workload digits --workers 2 --strategies ring --iterations 2",
    "accuracy --workload digits --workers 2 --codecs int8 --seeds 0",
    "bench --sizes 1KB --ranks 2 --with shm:auto",
    "bench codecs --elements 2000 --codecs none --repetitions 1 --workers 2",
)


@pytest.mark.parametrize("line", LINES)
def test_rows_on_standard_output_are_all_there_is(line: str) -> None:
    done = CliRunner().invoke(cli, [*line.split(), "--json", "-"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)
    assert done.stderr  # the table is for people


@pytest.mark.parametrize(
    ("line", "begins"),
    [
        (f"{LINES[0]} --report -", "<!doctype html>"),
        (f"{LINES[1]} --markdown -", "digits, 2 workers"),
        (f"{LINES[1]} --report -", "<!doctype html>"),
        (f"{LINES[2]} --report -", "<!doctype html>"),
    ],
)
def test_pages_on_standard_output_are_all_there_is(line: str, begins: str) -> None:
    done = CliRunner().invoke(cli, line.split())
    assert done.exit_code == 0, done.output
    assert done.stdout.lower().startswith(begins)


@pytest.mark.parametrize("line", [f"{LINES[0]} --report -", f"{LINES[1]} --markdown -", f"{LINES[2]} --report -"])
def test_only_one_result_fits(line: str) -> None:
    done = CliRunner().invoke(cli, [*line.split(), "--json", "-"])
    assert done.exit_code == 2
    assert "both name standard output" in done.stderr
    assert done.stdout == ""
