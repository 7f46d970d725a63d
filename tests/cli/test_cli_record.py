"""``syncline record``: a script as it is, its trace, and what stands in the way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from syncline_bench.cli import cli
from syncline_bench.workloads._trace import read_trace

SCRIPT = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
if sys.argv[1] == "-2":
    sys.exit()
print("trained to the end")
"""


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_script_is_recorded_and_ended(tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "found.csv"
    script.write_text(SCRIPT)
    result = CliRunner().invoke(cli, ["record", "-o", str(file), "--steps", "3", "--skip", "1", str(script), "1000000"])
    assert result.exit_code == 0, result.output
    assert "found.csv: 4 tensors, 29 elements; forward" in result.output
    assert f"syncline compare --workload trace:{file} --workers 4" in result.output
    assert "trained to the end" not in result.output
    assert [layer.name for layer in read_trace(file).layers] == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py"], "there is no file 'nowhere.py' to run"),
        (["-o", "nowhere/trace.csv", "train.py", "9"], "for trace.csv: make it"),
        (
            ["train.py", "4"],
            "the script ended after 4 steps of its optimizer, but 20 steps are measured after the first 5",
        ),
        (["train.py", "0"], "the script ended after 0 steps"),
        (["train.py", "-2"], "the script ended after 0 steps"),
    ],
)
def test_what_cannot_be_recorded_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    result = CliRunner().invoke(cli, ["record", *arguments])
    assert result.exit_code == 2
    assert says in result.output
    assert not (tmp_path / "trace.csv").exists()
