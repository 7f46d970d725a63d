"""Flight records from the command line: of runs that end badly, none of others, and what is shown of them."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
from calling import call
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir

from syncline.engine.flight import Flight
from syncline.errors import ClosedError
from syncline.timeline.flight import FlightRecord, load
from syncline.timeline.flight_memory import FlightPlace

SCRIPT = """
import os, signal, sys, time
import numpy as np
import syncline
from syncline.engine.flight import BYTES
from syncline.process import process
from syncline.timeline.flight import parse
from syncline.timeline.flight_memory import MEMORY

class Plain:
    def update(self, weights, gradient, state):
        weights -= 0.1 * gradient

def are_there(step):
    for rank in (0, 2):
        part = parse(os.pread(int(os.environ[MEMORY]), BYTES, rank * BYTES))
        if part.operations[-1].step < step:
            return False
    return True

def fail_alone():
    here = os.path.dirname(__file__)
    os.mkdir(os.path.join(here, f"rank {syncline.rank()}"))
    if syncline.rank() != 1:
        wait_until_failed()
    limit = time.monotonic() + 30
    while not all(os.path.isdir(os.path.join(here, f"rank {rank}")) for rank in (0, 2)) and time.monotonic() < limit:
        time.sleep(0.001)
    raise ValueError("the script's own")

def wait_elsewhere():
    os.mkdir(os.path.join(os.path.dirname(__file__), "flight.json"))
    wait_until_failed()

def wait_until_failed():
    limit = time.monotonic() + 30
    while not process.joined.process.failed and time.monotonic() < limit:
        time.sleep(0.01)
    sys.exit(1)

syncline.init("ring", progress=0.8)
if HOW == "alone":
    fail_alone()
weights, optimizer = syncline.prepare({"first": np.zeros(50)}, Plain())
for step in range(6):
    if step == 4 and syncline.rank() == 1:
        limit = time.monotonic() + 30
        while not are_there(step) and time.monotonic() < limit:
            time.sleep(0.001)
        if HOW == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif HOW == "elsewhere":
            wait_elsewhere()
        elif HOW == "differs":
            syncline.broadcast(np.ones(3))
    optimizer.step({"first": np.ones(50)})
"""


def run(folder: Path, how: str, *options: str) -> tuple[Any, Path]:
    """A training of three ranks that goes this way, and the file of its record."""
    script, path = folder / "train.py", folder / "flight.json"
    script.write_text(f"HOW = {how!r}\n{SCRIPT}")
    return call("run", "-n", "3", *(options or ("--flight", str(path))), str(script)), path


def analyzed(record: Path, folder: Path) -> list[Any]:
    """The collectives that PyTorch's analyzer finds."""
    assert call("flight", str(record), "--torch", str(folder)).exit_code == 0
    args = JobConfig().parse_args([str(folder)])
    try:
        return list(build_db(*(lambda found, version: (found, args, version))(*read_dir(args))).collectives)
    finally:
        gc.enable()  # the analyzer switches it off


def steps(record: FlightRecord) -> list[int]:
    """The last training step of each process."""
    return [part.operations[-1].step for part in record.parts]


def test_a_killed_rank_leaves_its_record_in_the_launcher(tmp_path: Path) -> None:
    result, path = run(tmp_path, "killed")
    assert result.exit_code == 137, result.output
    file, verdict = result.output.splitlines()[-2:]
    assert file == f"syncline: flight record: {path}"
    assert verdict.startswith(
        "syncline: rank 1 was killed by SIGKILL and did not enter a training step, step 4; ranks 0, 2 waited for it"
    )
    record = load(path)
    assert [part.process for part in record.parts] == [0, 1, 2]
    assert steps(record) == [4, 3, 4]
    assert f"syncline: {record.verdict}" == verdict
    assert record.parts[1].fault is None
    assert record.parts[1].ended == "was killed by SIGKILL"
    assert 1 in record.parts[2].fault.waits if record.parts[2].fault else False
    missing = [one.missing_ranks for one in analyzed(path, tmp_path / "dumps")]
    common = len(record.parts[1].operations)
    assert missing == [None] * common + [{1}] * (len(missing) - common)  # the tickets, and the bucket behind them
    assert len(missing) > common > 0
    page = tmp_path / "page.html"
    shown = call("flight", str(path), "--report", str(page))
    assert shown.exit_code == 0, shown.output
    assert record.verdict in page.read_text()
    first, *others = shown.output.splitlines()
    assert first == record.verdict
    assert "after bucket 0" in others[1]
    assert "was killed by SIGKILL" in others[1]


def test_a_script_that_fails_by_itself_leaves_no_record(tmp_path: Path) -> None:
    """No process waits for another: the error of the script says all."""
    result, path = run(tmp_path, "alone")
    assert result.exit_code == 1
    assert "rank 1 failed: ValueError: the script's own" in result.output
    assert "flight record" not in result.output
    assert not path.exists()


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_even_if_no_file_can_be_written(tmp_path: Path) -> None:
    """The file's name is a folder by then; a full disk or a folder that became read-only is no different."""
    result, path = run(tmp_path, "elsewhere")
    assert result.exit_code == 1
    error, file, verdict = result.output.splitlines()[-3:]
    assert error.startswith("syncline: rank 1 ")
    assert file.startswith(f"syncline: no flight record: cannot write {path}: ")
    assert "rank 1 did not enter a training step, step 4; ranks 0, 2 waited for it for " in verdict
    assert f"; rank 1 was at {tmp_path / 'train.py'}:" in verdict
    assert "(wait_until_failed)" in verdict


def test_ranks_that_make_different_calls_are_named_and_found_by_the_analyzer(tmp_path: Path) -> None:
    result, path = run(tmp_path, "differs")
    assert result.exit_code == 1
    verdict = result.output.splitlines()[-1]
    assert "is at broadcast" in verdict
    assert "is at a training step" in verdict
    first = next(one for one in analyzed(path, tmp_path / "dumps") if not one.pass_check)
    kinds = [str(one.type_of_mismatch) for one in first.mismatch_collectives.values()]
    assert any("Expected collective type" in kind and "'broadcast'" in kind for kind in kinds), kinds


@pytest.mark.parametrize(
    ("name", "said"), [("f.txt", "a flight record is a file such as flight.json"), ("no/f.json", "there is no folder")]
)
def test_a_record_that_could_not_be_written_is_refused_before_the_run(tmp_path: Path, name: str, said: str) -> None:
    result, _ = run(tmp_path, "well", "--flight", str(tmp_path / name))
    assert result.exit_code == 2
    assert said in result.output


def test_parts_become_a_file_beside_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_FLIGHT", str(tmp_path / "f.json"))
    notes = {"processes": 3, "workers": 2, "run": "r"}
    for process in (0, 2):
        made = FlightPlace(process, "0").begin(process, name=f"process {process}", **notes)
        assert isinstance(made, Flight)
        made.begin(1, "bucket 0", 4)
        made.fault(ClosedError("interrupted"), -1, {})
    result = call("flight", str(tmp_path / "f.json.parts"))
    assert result.exit_code == 0, result.output
    file, verdict, *lines = result.output.splitlines()
    assert file == f"flight record: {tmp_path / 'f.json'}"
    assert verdict.startswith("all processes had entered bucket 0, which did not end; rank 0 and server 0 waited in it")
    assert lines[-1] == "  rank 1 left no record"
    assert load(tmp_path / "f.json").verdict == verdict
    dumps = tmp_path / "dumps"
    assert call("flight", str(tmp_path / "f.json"), "--torch", str(dumps)).exit_code == 0
    assert sorted(found.name for found in dumps.iterdir()) == ["rank_0", "rank_2"]
    assert pickle.loads((dumps / "rank_0").read_bytes())["entries"][0]["state"] == "started"
    assert "choose a new folder" in call("flight", str(tmp_path / "f.json"), "--torch", str(dumps)).output
    (tmp_path / "empty.parts").mkdir()
    result = call("flight", str(tmp_path / "empty.parts"), "-o", str(tmp_path / "e.json"))
    assert result.exit_code == 2
    assert "no parts of a flight record" in result.output
