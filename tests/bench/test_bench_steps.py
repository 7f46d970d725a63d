"""``syncline bench steps``: what is asked for, rows of real ranks, their file and table, and failures."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from syncline_bench.cli import cli
from syncline_bench.report.bench import StepResult, StepRow, each, render_steps
from syncline_bench.steps import step_bench
from syncline_bench.steps.loops import FRAMEWORKS, installed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--frameworks", "numpi"], "did you mean 'numpy'"),
        (["--frameworks", "absent"], "absent cannot be measured: no_such_package is not installed"),
        (["--tensors", "0"], "--tensors has to be 1 or more"),
        (["--ranks", "1"], "x>=2"),
        (["--strategy", "ps(servers=1)"], "give an allreduce such as ring or direct"),
        (["--strategy", "ring sync=local(steps=2)"], "give an allreduce such as ring or direct"),
        (["--json", "/proc/nowhere/rows.json"], "choose another path"),
    ],
)
def test_mistakes_are_named_before_anything_is_measured(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_bench, "measure", lambda *_: pytest.fail("was measured"))
    monkeypatch.setitem(FRAMEWORKS, "absent", ("no_such_package",))
    done = CliRunner().invoke(cli, ["bench", "steps", *arguments])
    assert done.exit_code == 2, done.output
    assert says in " ".join(done.output.split())


@pytest.mark.slow
def test_steps_are_measured_and_right(tmp_path: Path) -> None:
    """Those of JAX and TensorFlow are among the tests of trainers."""
    path = tmp_path / "steps.json"
    names = [name for name in installed() if name in ("numpy", "torch")]
    arguments = ["--tensors", "1", "3", "--elements", "10", "--repetitions", "2", "--json", str(path)]
    arguments += ["--frameworks", *names]
    done = CliRunner().invoke(cli, ["bench", "steps", *arguments])
    assert done.exit_code == 0, done.output
    result = StepResult.from_json(path.read_text())
    assert [(row.framework, row.tensors) for row in result.rows] == [(name, n) for name in names for n in (1, 3)]
    for row in result.rows:
        assert row.finished
        assert min(row.bare_s or 0, row.exchange_s or 0, row.step_s or 0) > 0
    assert json.loads(path.read_text())["strategy"].endswith("schedule=fixed(bucket=40B)")


def test_a_rank_that_fails_makes_rows_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    request = step_bench.request_of(["numpy"], "ring transport=shm", tensors=[2], elements=1, repetitions=1)
    monkeypatch.setattr(step_bench.Request, "whole_strategy", "ring transport=nothing")
    out = io.StringIO()
    assert step_bench.run(request, console=Console(file=out, width=100)) == 1
    assert "numpy: rank" in out.getvalue()
    assert "'nothing'" in out.getvalue()


def test_a_bucket_more_is_counted_from_the_row_before() -> None:
    rows = tuple(
        StepRow("numpy", n, 1000, 1e-4, 1e-3, 2e-3, 9e-4, quiet, 1e-4, correct=True)
        for n, quiet in ((1, 1e-4), (11, 3e-4))
    )
    assert each(rows[0], rows) is None
    assert each(rows[1], rows) == pytest.approx(2e-5)
    assert rows[1].goal_s == pytest.approx(1.22e-3)
    result = StepResult(machine="here", cores=2, strategy="ring", ranks=2, repetitions=5, rows=rows)
    out = io.StringIO()
    Console(file=out, width=120).print(render_steps(result))
    assert all(f" {text} " in out.getvalue() for text in ("20.0 us", "1.22 ms", "yes"))
