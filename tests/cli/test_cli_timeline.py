"""Timelines from the command line: of runs, and of what runs have left."""

from __future__ import annotations

from pathlib import Path

import pytest
from calling import call

from syncline.engine.trace import begin
from syncline.timeline.folder import open_part
from timelines import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "numpy_loop.py"


def test_run_records_all_processes_and_numpy_scripts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_TRACE", str(tmp_path / "by variable.json"))  # what an option says counts
    path = tmp_path / "t.json.gz"
    files = ("--trace", str(path), "--flight", str(tmp_path / "f.json"))  # the second only if it ends badly
    result = call("run", "-n", "2", "--servers", "1", *files, str(EXAMPLE), "ps(servers=1)")
    assert result.exit_code == 0, result.output
    assert f"syncline: timeline: {path} (" in result.output
    assert [found.name for found in tmp_path.iterdir()] == ["t.json.gz"]
    found = load(path)
    names = [name.partition(" (")[0] for name in found["otherData"]["processes"]]
    assert names == ["rank 0", "rank 1", "server 0"]
    kinds = {event["cat"] for event in found["traceEvents"] if event["ph"] != "M"}
    assert {"work", "run", "wait", "update"} <= kinds
    assert not {"forward", "backward"} & kinds
    assert len([event for event in found["traceEvents"] if event.get("cat") == "update"]) == 300


@pytest.mark.parametrize(("name", "part"), [("t.txt", "a timeline is a file such as"), ("nowhere/t.json", "no folder")])
def test_a_run_that_could_not_be_recorded_does_not_begin(tmp_path: Path, name: str, part: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("import pathlib; pathlib.Path(__file__).with_name('begun').touch()")
    result = call("run", "-n", "1", "--trace", str(tmp_path / name), str(script))
    assert result.exit_code == 2
    assert part in result.output
    assert [found.name for found in tmp_path.iterdir()] == ["train.py"]


def test_a_script_that_joins_no_run_leaves_no_timeline(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    (tmp_path / "t.json").write_text("of an earlier run")
    result = call("run", "-n", "1", "--trace", str(tmp_path / "t.json"), str(script))
    assert result.exit_code == 0
    assert "no timeline: no process joined a run" in result.output
    assert (tmp_path / "t.json").read_text() == "of an earlier run"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["t.json", "train.py"]


def test_parts_are_put_together_where_they_were_to_be(tmp_path: Path) -> None:
    folder = tmp_path / "t.json.parts"
    for process in range(2):
        file = open_part(folder, process, 0)
        begin(file, "wait", "bucket 1")
        file.close()
    assert call("timeline", str(folder)).exit_code == 0
    assert len(load(tmp_path / "t.json")["otherData"]["processes"]) == 2
    assert call("timeline", str(folder), "-o", str(tmp_path / "t.csv")).exit_code == 2
    for process in (1, 2):  # a later run's
        file = open_part(folder, process, 0)
        file.note(run="the last one")
        file.close()
    assert "1 part of earlier runs is left out" in call("timeline", str(folder)).output
    (folder / "process-1-0.names").write_text("{")
    result = call("timeline", str(folder))
    assert result.exit_code == 0
    assert "0 spans of 1 process, on one clock" in result.output
    assert "process-1-0.spans is not a part of a timeline" in result.output


def test_a_folder_without_parts_is_refused(tmp_path: Path) -> None:
    result = call("timeline", str(tmp_path), "-o", str(tmp_path / "t.json"))
    assert result.exit_code == 2
    assert "no parts of a timeline" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_that_is_killed_has_its_timeline(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, threading, time, numpy as np, syncline\n"
        "from syncline.process import process\n"
        "syncline.init('ring transport=tcp')\n"
        "for step in range(3):\n"
        "    syncline.allreduce(np.ones(1000))\n"
        "def end():\n"
        "    limit = time.monotonic() + 30\n"
        "    while process.joined.engine.doing == 'no exchange' and time.monotonic() < limit:\n"
        "        time.sleep(0.001)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if syncline.rank() == 1:\n"
        "    threading.Thread(target=end).start()\n"
        "    syncline.allreduce(np.ones(1000))  # the other one never comes to it\n"
        "time.sleep(60)\n"
    )
    result = call("run", "-n", "2", "--trace", str(tmp_path / "t.json"), str(script))
    assert result.exit_code == 137, result.output
    found = load(tmp_path / "t.json")
    unfinished = {event["pid"] for event in found["traceEvents"] if event.get("args", {}).get("unfinished")}
    assert len(found["otherData"]["processes"]) == 2
    assert 2 in unfinished  # the process of rank 1: what it had begun is there
    assert sorted(found.name for found in tmp_path.iterdir()) == ["t.json", "train.py"]
