"""``syncline bench steps`` of the frameworks that ``make test`` does not install."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from syncline_bench.cli import cli
from syncline_bench.report.bench import StepResult
from syncline_bench.steps.loops import FRAMEWORKS


@pytest.mark.deep
@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_steps_are_measured_and_right(framework: str, tmp_path: Path) -> None:
    if missing := [package for package in FRAMEWORKS[framework] if find_spec(package) is None]:
        pytest.skip(f"{missing[0]} is not installed: make test-all installs it")
    path = tmp_path / "steps.json"
    arguments = ["--frameworks", framework, "--tensors", "1", "3", "--repetitions", "2", "--json", str(path)]
    done = CliRunner().invoke(cli, ["bench", "steps", *arguments])
    assert done.exit_code == 0, done.output
    rows = StepResult.from_json(path.read_text()).rows
    assert [row.tensors for row in rows] == [1, 3]
    assert all(row.finished for row in rows)
