"""Spans in files: what was told is there, whatever has become of who told it, and no more than the limit.

The recording of a session of one worker, in this process: what is asked for, what is refused, what is left.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import syncline
from syncline import process
from syncline.engine.trace import begin
from syncline.errors import SynclineError, UsageError
from syncline.timeline import recording
from syncline.timeline import spans as module
from syncline.timeline.spans import TRAINING, ProcessSpans, SpanFile, parse, read
from timelines import load

NOTES = {"process": 3, "session": 0}


def ticks() -> Callable[[], float]:
    looks = count(1)
    return lambda: float(next(looks))


def opened(folder: Path, **options: Any) -> SpanFile:
    return SpanFile(folder, "one", NOTES, ticks(), **options)


def found(of: SpanFile) -> ProcessSpans:
    of.close()
    return read(of.paths[0])


def test_what_is_told_is_there(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.note(name="rank 3")
    run = begin(file, "run", "bucket 7 (é)", key=7, phase="allreduce", priority=2.5, nbytes=1 << 40)
    segment = begin(file, "segment", "bucket 7 (é)", run, segment=4)
    sent = begin(file, "send", "bucket 7 (é)", segment, segment=4, step=1, peer=2, nbytes=12)
    begin(file, "wait", "bucket 7 (é)")
    for one in (sent, segment, run):
        one.end()
    read_back = found(file)
    assert read_back.notes == NOTES | {"name": "rank 3", "ended": True}
    assert read_back.left_out == 0
    assert read_back.spans == (
        module.TimedSpan(1.0, 7.0, 1 << 40, 2.5, -1, 7, -1, -1, -1, "run", "bucket 7 (é)", "allreduce", TRAINING),
        module.TimedSpan(3.0, 5.0, 12, 0.0, 0, -1, 4, 1, 2, "send", "bucket 7 (é)", "", TRAINING),
        module.TimedSpan(4.0, 0.0, -1, 0.0, -1, -1, -1, -1, -1, "wait", "bucket 7 (é)", "", TRAINING),
    )


def test_calls_of_compiled_code_are_there_when_they_have_done_something(tmp_path: Path) -> None:
    file = opened(tmp_path)
    run = begin(file, "run", "bucket", key=0)
    begin(file, "advance", "bucket", run).end()
    working = begin(file, "advance", "bucket", run)
    begin(file, "receive", "bucket", working, peer=1).end()
    working.end()
    run.end()
    kinds = [(one.kind, one.within) for one in found(file).spans]
    assert kinds == [("run", -1), ("advance", 0), ("receive", 1)]


def test_what_is_beyond_the_limit_is_counted(tmp_path: Path) -> None:
    file = opened(tmp_path, limit=3)
    told = [begin(file, "wait", "x") for _ in range(10)]
    for one in told:
        one.end()
    read_back = found(file)
    assert (len(read_back.spans), read_back.left_out) == (3, 7)
    assert [one.end_s for one in read_back.spans] == [11.0, 12.0, 13.0]


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    room = (1 << 20) // 64 - 1
    for _ in range(room + 5):
        begin(file, "wait", "x").end()
    read_back = found(file)
    assert (len(read_back.spans), read_back.left_out) == (room, 5)
    with pytest.raises(OSError, match="No space"):
        SpanFile(tmp_path, "another", NOTES)
    assert not list(tmp_path.glob("another*"))


def test_names_that_are_too_many_are_empty_and_long_ones_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_NAMES", 4)
    file = opened(tmp_path)
    for label in ("a", "b" * 1000, "c", "a"):
        begin(file, "wait", label).end()
    assert [one.label for one in found(file).spans] == ["a", "b" * 300 + "...", "", "a"]


def test_a_process_that_is_killed_leaves_what_it_told(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        file = opened(tmp_path)
        begin(file, "forward", "forward").end()
        begin(file, "wait", "for ever")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [(one.label, one.end_s) for one in read(tmp_path / "one.spans").spans] == [
        ("forward", 2.0),
        ("for ever", 0.0),
    ]


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    file = opened(tmp_path)
    begin(file, "wait", "the parent's").end()
    child = os.fork()
    if child == 0:
        file.forget()
        begin(file, "wait", "the child's").end()
        file.note(more="nothing")
        os._exit(0)
    os.waitpid(child, 0)
    assert [one.label for one in found(file).spans] == ["the parent's"]


def test_threads_have_names_and_write_at_once(tmp_path: Path) -> None:
    file = SpanFile(tmp_path, "one", NOTES)

    def tell(number: int) -> None:
        for step in range(500):
            begin(file, "wait", f"{number}", step=step).end()

    with ThreadPoolExecutor(4, thread_name_prefix="owner") as threads:
        list(threads.map(tell, range(4)))
    spans = found(file).spans
    assert sorted((one.label, one.step) for one in spans) == [(str(n), step) for n in range(4) for step in range(500)]
    assert all(one.thread.startswith("owner") and 0 < one.begin_s <= one.end_s for one in spans)


def test_after_its_end_nothing_is_kept_and_it_can_be_removed(tmp_path: Path) -> None:
    file = opened(tmp_path)
    open_one = begin(file, "wait", "x")
    file.close()
    open_one.end()
    begin(file, "wait", "y").end()
    file.note(more=1)
    assert [one.label for one in found(file).spans] == ["x"]
    file.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rows", "names"),
    [(b"", b""), (b"x" * 64, b'{"process": 0, "session": 0}\n'), (None, b"{\n"), (None, b'{"process": -1}\n')],
)
def test_other_files_are_refused(tmp_path: Path, rows: bytes | None, names: bytes) -> None:
    file = opened(tmp_path)
    file.close()
    if rows is not None:
        file.paths[0].write_bytes(rows)
    file.paths[1].write_bytes(names)
    with pytest.raises(UsageError, match="is not a part of a timeline"):
        read(file.paths[0])


def test_rows_of_nonsense_are_read_as_such(tmp_path: Path) -> None:
    """Of a proved peer of the same version, or of a disk that lost something."""
    file = opened(tmp_path)
    begin(file, "wait", "x").end()
    file.close()
    rows, names = (path.read_bytes() for path in file.paths)
    (row,) = parse(rows[:64] + b"\xff" * 63 + b"\x00", names).spans
    assert (row.kind, row.label, row.within) == ("work", "", -1)
    assert parse(rows + b"more", names + b'"half a na').spans == parse(rows, names).spans


def test_names_that_are_nested_too_deeply_are_no_part(tmp_path: Path) -> None:
    """A peer's, which may be anything, do not end the timeline of the others."""
    file = opened(tmp_path)
    file.close()
    rows, names = (path.read_bytes() for path in file.paths)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse(rows, names + b"[" * 100_000 + b"\n")


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
    def fails(*_: object, **__: object) -> None:
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


def test_the_use_of_cores_is_measured_between_two_looks(tmp_path: Path) -> None:
    """Of the usable cores alone, without idle time and waits for disks."""
    core, ticks = min(os.sched_getaffinity(0)), os.sysconf("SC_CLK_TCK")

    def write(busy: int) -> None:
        lines = [
            "cpu 9 9 9 9 9 9 9 9 9 9",
            f"cpu{core} {busy} 0 {busy} 777 {busy} 0 0 0 9 9",
            "cpu9999 5 5 5 5 5 5 5 5",
        ]
        (tmp_path / "stat").write_text("\n".join([*lines, "ctxt 1"]))

    write(ticks)
    cores = recording._Cores(tmp_path)
    write(3 * ticks)
    until = time.process_time() + 0.02
    while time.process_time() < until:
        pass
    used = cores.used()
    assert used["busy_s"] == pytest.approx(4.0)
    assert core in used["usable"]
    assert 0.02 <= used["own_s"] < 1.0
    assert 0 < used["wall_s"] < 60
    (tmp_path / "stat").unlink()
    with pytest.raises(OSError, match="stat"):
        recording._Cores(tmp_path)
