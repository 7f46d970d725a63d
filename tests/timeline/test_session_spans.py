"""The recording of a session of one worker, in this process: what is asked for, what is refused, what is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import syncline
from syncline import process
from syncline.errors import SynclineError, UsageError
from syncline.timeline import recording
from timelines import load

Run = Callable[[], None]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """A session that is asked to write ``t.json``."""
    monkeypatch.setattr(process.process, "_recordings", 0)
    monkeypatch.setenv("SYNCLINE_TRACE", str(tmp_path / "t.json"))

    def run() -> None:
        syncline.init(rank=0, world_size=1)
        syncline.allreduce(np.ones(3))
        syncline.shutdown()

    return run


def test_a_world_of_one_has_a_timeline_too(recorded: Run, tmp_path: Path) -> None:
    recorded()
    assert list(load(tmp_path / "t.json")["otherData"]["processes"]) == ["rank 0"]
    assert [found.name for found in tmp_path.iterdir()] == ["t.json"]


def test_a_start_that_fails_leaves_nothing(recorded: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise SynclineError("no")

    monkeypatch.setattr(process, "alone", fails)
    with pytest.raises(SynclineError, match="no"):
        recorded()
    assert not list(tmp_path.iterdir())


def test_a_timeline_that_cannot_be_written_in_the_end_leaves_its_parts_and_the_run_ends_well(
    recorded: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise UsageError("the disk is full")

    monkeypatch.setattr(recording, "write", fails)
    recorded()
    assert "UsageError: the disk is full; `syncline timeline" in capfd.readouterr().err
    names = sorted(found.name for found in (tmp_path / "t.json.parts").iterdir())
    assert names == ["process-0-0.names", "process-0-0.spans"]


@pytest.mark.parametrize("name", ["t.csv", ".json", "nowhere/t.json", "."])
def test_other_names_are_refused_before_anything_runs(
    recorded: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("SYNCLINE_TRACE", str(tmp_path / name))
    with pytest.raises(UsageError):
        recorded()
    assert not syncline.is_initialized()


def test_nothing_is_recorded_where_nobody_asks(recorded: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_TRACE", "")
    recorded()
    assert not list(tmp_path.iterdir())
