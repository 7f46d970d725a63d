"""``make gpu`` calls wrong what hangs or has other bits; on a machine without a GPU, whose ranks are replaced."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
LIMIT_S = 30.0


@pytest.fixture
def gpu(program: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program on a machine that seems to have a GPU."""
    found = program("gpu")
    monkeypatch.setattr(found, "why_not_here", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    return found


def python(folder: Path, does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the interpreter that ranks and tests are started with by a script."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def status(gpu: ModuleType, section: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu", section])
    found: int = gpu.main()
    return found


def test_tests_that_hang_are_wrong_and_end_with_what_they_have_started(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "alive")
    alive, mine = (os.open(tmp_path / "alive", how | os.O_NONBLOCK) for how in (os.O_RDONLY, os.O_WRONLY))
    python(tmp_path, f"exec 3>{tmp_path}/alive; sleep 600 & wait", monkeypatch)
    monkeypatch.setattr(gpu, "TESTS_S", 0.3)
    assert status(gpu, "tests", monkeypatch) == 1
    assert "WRONG  not done in 0 s" in capsys.readouterr().out
    os.close(mine)
    ended, _, _ = select.select([alive], [], [], LIMIT_S)  # the end of a pipe that no process writes to
    assert ended
    os.close(alive)


@pytest.mark.parametrize(("code", "wanted"), [(0, 0), (1, 1)])
def test_tests_that_end_are_judged_by_their_status_however_late_it_is(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, wanted: int
) -> None:
    python(tmp_path, f"echo 3 tests; exit {code}", monkeypatch)
    monkeypatch.setattr(gpu, "BEGUN_S", time.monotonic() - gpu.TOTAL_S)
    assert status(gpu, "tests", monkeypatch) == wanted


def test_a_row_is_left_out_only_before_it_starts(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is left for one row, whose ranks hang."""
    python(tmp_path, "exec sleep 600", monkeypatch)
    monkeypatch.setattr(gpu, "LEAST_S", 0.01)
    monkeypatch.setattr(gpu, "BEGUN_S", time.monotonic() - (gpu.TOTAL_S - gpu.TESTS_S) + 0.5)
    first, *others = gpu.arrays()
    assert (first.right, first.said) == (False, "not done in 0 s")
    assert others
    assert all((row.right, row.said) == (None, gpu.LEFT_OUT) for row in others)


@pytest.mark.parametrize("section", ["coded", "trainings", "arrays"])
def test_a_row_without_time_starts_nothing(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, section: str) -> None:
    monkeypatch.setattr(gpu, "BEGUN_S", time.monotonic() - gpu.TOTAL_S)
    monkeypatch.setattr(gpu, "started", None)
    rows = list(gpu.SECTIONS[section]())
    assert rows
    assert all((row.right, row.said) == (None, gpu.LEFT_OUT) for row in rows)


@pytest.mark.parametrize("off", [0.0, 1e-7])
@pytest.mark.parametrize("on_processor", [False, True])
def test_codecs_on_the_device_have_to_give_the_bits_of_the_processor(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, off: float, on_processor: bool
) -> None:
    """One rank's weights are off by the last bit, of those with codecs on the device or of the others."""

    def started(ranks: int, processor: bool = False, **_: Any) -> Any:
        weights = [torch.ones(9) for _ in range(ranks)]
        weights[-1][4] -= off * (processor == on_processor)
        return [{"step_s": 0.01}] * ranks, weights, ""

    monkeypatch.setattr(gpu, "started", started)
    rows = list(gpu.coded())
    assert rows
    assert all(row.right == (off == 0) for row in rows)
    assert all("weights off by " in row.said for row in rows)
