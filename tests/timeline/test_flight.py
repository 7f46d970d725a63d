"""Flight records: the ring in memory, the file, and the verdict, which is a pure function of what processes left."""

from __future__ import annotations

import json
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.engine.flight import BYTES, HEAD_BYTES, ROWS, Flight
from syncline.errors import ClosedError, PeerLost, UsageError
from syncline.timeline.flight import (
    Fault,
    FlightOperation,
    FlightRecord,
    ProcessFlight,
    Verdict,
    dump,
    judge,
    load,
    merge,
    parse,
)
from syncline.timeline.flight_memory import FlightMemory, FlightPlace, forget_records, record_in

NOTES = {"name": "rank 1 (here, pid 7)", "processes": 3, "workers": 3, "run": "r"}


def memory() -> mmap.mmap:
    return mmap.mmap(-1, BYTES)


def parsed(of: mmap.mmap) -> ProcessFlight:
    found = parse(of[:])
    assert found is not None
    return found


def test_the_ring_keeps_the_last_operations_and_what_has_not_ended() -> None:
    where = memory()
    flight = Flight(where, 1, NOTES)
    flight.step = 4
    first = [flight.begin(number % 7, f"bucket {number % 7}", 8 * number) for number in range(ROWS)]
    assert len(parsed(where).operations) == ROWS
    last = flight.begin(7, "one past the ring's size", -1, tolerant=True)
    for number in first:
        flight.end(number)  # the first one's row belongs to the last operation, which has not ended
    done = flight.begin(8, "done", 4, False, 5.0, 6.0)
    found = parsed(where)
    assert found.begun == ROWS + 2
    assert [one.number for one in found.operations] == list(range(3, ROWS + 3))
    assert [one.number for one in found.operations if not one.end_s] == [last]
    *rest, past, short = found.operations
    assert (past.key, past.label, past.nbytes, past.tolerant) == (7, "one past the ring's size", -1, True)
    assert (short.number, short.turn, short.begin_s, short.end_s) == (done, 1, 5.0, 6.0)
    assert all(one.turn == (one.number - 1) // 7 + 1 and one.step == 4 and one.begin_s <= one.end_s for one in rest)


def test_the_first_fault_counts_and_a_record_without_one_is_empty_after_its_end() -> None:
    where, ends = memory(), list[bool]()
    flight = Flight(where, 1, NOTES, ends.append)
    flight.group(100, 10, [0, 2])
    for _ in range(1000):  # as many groups as there is room for
        flight.group(200, 1, range(3))
    flight.blocked(5.0)
    flight.fault(PeerLost("rank 2 died\n", rank=2), 2, {2: "bucket 1", 0: "bucket 2"})
    flight.fault(ValueError("later"), 1, {})
    flight.close()
    found = parsed(where)
    assert found.fault is not None
    assert (found.fault.kind, found.fault.text, found.fault.culprit) == ("PeerLost", "rank 2 died ", 2)
    assert found.fault.waits == {0: "bucket 2", 2: "bucket 1"}
    assert any("test_flight.py" in frame for frame in found.fault.frames)
    assert found.groups[0] == (100, 10, (0, 2))
    assert found.blocked_s == 5.0
    assert ends == [True]
    Flight(where, 1, NOTES, ends.append).close()
    assert parse(where[:]) is None
    assert ends == [True, False]


@pytest.mark.parametrize(
    ("at", "written"),
    [
        (0, b"SYNCLFR2"),
        (12, b"\xff\xff\xff\xff"),
        (16, b"\xff" * 8),
        (HEAD_BYTES, b"[[["),
        (HEAD_BYTES, b'{"fault":3}\n'),
    ],
)
def test_memory_that_no_process_of_this_version_wrote_is_refused(at: int, written: bytes) -> None:
    where = memory()
    Flight(where, 1, NOTES)
    where[at : at + len(written)] = written
    with pytest.raises(ValueError, match=r".+"):
        parse(where[:])
    with pytest.raises(ValueError, match="bytes"):
        parse(where[:100])


# The verdict


def operation(key: int, label: str, begin_s: float, end_s: float = 0.0, **more: Any) -> FlightOperation:
    about = {"number": key + 1, "nbytes": 4, "turn": 1, "step": 17, "tolerant": False, **more}
    return FlightOperation(key=key, label=label, begin_s=begin_s, end_s=end_s, **about)


def part(process: int, *operations: FlightOperation, fault: Fault | None = None, **more: Any) -> ProcessFlight:
    about = {"begun": len(operations), "processes": 4, "workers": 4, "at_s": 20.0, **more}
    return ProcessFlight(process, f"rank {process}", operations, fault=fault, **about)


TICKETS, BUCKET = operation(1, "a training step", 9.0, 9.5), operation(2, "bucket 3", 10.0)
BLAMES = Fault("PeerLost", "rank 2 died", 2, {2: "bucket 3"})
WAITING = [part(process, TICKETS, BUCKET, fault=BLAMES) for process in (0, 1, 3)]
OWN = Fault("ValueError", "bad batch", 2, frames=("train.py:31 (load)",))
TOLD = Fault("PeerLost", "this process is to blame", 2, frames=("train.py:31 (load)",))
STOPPED = Fault("ClosedError", "an exchange was interrupted by KeyboardInterrupt", -1)
DIFFERS = Fault("MismatchError", "rank 1 is at broadcast while rank 0 is at allreduce")
CASES = {
    "killed before it entered": (
        [*WAITING, part(2, TICKETS)],
        (-1, {2: "was killed by SIGKILL"}),
        "rank 2 was killed by SIGKILL and did not enter bucket 3, step 17; ranks 0-1, 3 waited for it for 10.0 s",
    ),
    "killed inside": (
        [*WAITING, part(2, TICKETS, BUCKET)],
        (-1, {2: "was killed by SIGKILL"}),
        "rank 2 was killed by SIGKILL in bucket 3, step 17; ranks 0-1, 3 waited for it for 10.0 s",
    ),
    "killed without a record": (
        WAITING,
        (-1, {}),
        "rank 2 failed and left no record; ranks 0-1, 3 waited in bucket 3, step 17 for 10.0 s",
    ),
    "an exception": (
        [*WAITING, part(2, TICKETS, fault=OWN)],
        (-1, {2: "ended with status 1"}),
        "rank 2 failed with ValueError: bad batch and did not enter bucket 3, step 17; ranks 0-1, 3 waited for it for"
        " 10.0 s; rank 2 was at train.py:31 (load)",
    ),
    "it never comes": (
        [*WAITING, part(2, TICKETS, fault=TOLD)],
        (2, {2: "ended with status 1"}),
        "rank 2 did not enter bucket 3, step 17; ranks 0-1, 3 waited for it for 10.0 s; rank 2 was at train.py:31"
        " (load)",
    ),
    "interrupted": (
        [replace(one, fault=STOPPED) for one in WAITING] + [part(2, TICKETS, fault=replace(BLAMES, culprit=0))],
        (0, {}),
        "rank 2 did not enter bucket 3, step 17; ranks 0-1, 3 waited for it for 10.0 s",
    ),
    "interrupted in an operation of all": (
        [part(process, BUCKET, fault=STOPPED) for process in range(4)],
        (-1, {}),
        "all processes had entered bucket 3, step 17, which did not end; ranks 0-3 waited in it for 10.0 s",
    ),
    "different calls": ([part(0, BUCKET, fault=DIFFERS), part(1, fault=BLAMES)], (0, {}), DIFFERS.text),
    "no operation": (
        [part(0, TICKETS, fault=replace(BLAMES, waits={})), part(2, TICKETS, fault=OWN)],
        (-1, {}),
        "rank 2 failed with ValueError: bad batch; no other process was in an operation",
    ),
    "nothing": ([part(0, TICKETS)], (-1, {}), "no process was in an operation that others had not entered"),
    "killed while the others are elsewhere": (
        [part(0, BUCKET), part(1, TICKETS), part(2, BUCKET._replace(end_s=11.0))],
        (2, {2: "was killed by SIGKILL"}),
        "rank 2 was killed by SIGKILL; rank 0 waited in bucket 3, step 17 for 10.0 s",
    ),
    "killed while nobody waits": (
        [part(0, TICKETS), part(2, TICKETS)],
        (2, {2: "was killed by SIGKILL"}),
        "rank 2 was killed by SIGKILL; no other process was in an operation",
    ),
    "a message": (
        [part(0, TICKETS, fault=replace(BLAMES, waits={2: "message of rank 2"})), part(2, TICKETS)],
        (2, {2: "was killed by SIGKILL"}),
        "rank 2 was killed by SIGKILL; rank 0 waited for it in message of rank 2",
    ),
    "it hangs inside": (
        [*WAITING, part(2, TICKETS, BUCKET, fault=TOLD)],
        (-1, {}),
        "rank 2 did not finish bucket 3, step 17; ranks 0-1, 3 waited for it for 10.0 s; rank 2 was at train.py:31"
        " (load)",
    ),
    "several never come": (
        [part(process, TICKETS, BUCKET, fault=BLAMES) for process in (0, 3)]
        + [part(process, TICKETS, fault=TOLD) for process in (1, 2)],
        (2, {}),
        "ranks 1-2 did not enter bucket 3, step 17; ranks 0, 3 waited for it for 10.0 s; rank 1 was at train.py:31"
        " (load); rank 2 was at train.py:31 (load)",
    ),
    "a group": (
        [
            part(0, operation(50, "a group's", 1.0), groups=((40, 20, (0, 3)),), fault=replace(STOPPED)),
            part(1, TICKETS),
            part(3, TICKETS),
        ],
        (-1, {}),
        "rank 3 did not enter a group's, step 17; rank 0 waited for it for 19.0 s",
    ),
    "a server": (
        [part(0, TICKETS, BUCKET, workers=2), part(1, TICKETS, BUCKET, workers=2), part(3, TICKETS, workers=2)],
        (3, {3: "was killed by SIGKILL"}),
        "server 1 was killed by SIGKILL and did not enter bucket 3, step 17; ranks 0-1 waited for it for 10.0 s",
    ),
    "a later turn of the same key": (
        [part(0, replace_turn := BUCKET._replace(turn=2)), part(1, replace_turn), part(3, BUCKET._replace(end_s=11.0))],
        (-1, {}),
        "rank 3 did not enter bucket 3, step 17; ranks 0-1 waited for it for 10.0 s",
    ),
    "what a ring has lost is not missing": (
        [part(0, BUCKET), part(1, operation(9, "later", 15.0, 16.0, number=5000), begun=5000)],
        (-1, {}),
        "all processes had entered bucket 3, step 17, which did not end; rank 0 waited in it for 10.0 s",
    ),
    "a tolerant operation may stay": (
        [part(0, TICKETS, BUCKET._replace(tolerant=True)), part(1, TICKETS)],
        (-1, {}),
        "no process was in an operation that others had not entered",
    ),
}

TELL_NOTHING = "no operation", "nothing", "a tolerant operation may stay"


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_names_who_was_waited_for_and_in_what(case: str) -> None:
    parts, (culprit, ended), said = CASES[case]
    assert judge(parts, culprit, ended).text == said
    assert judge(parts[::-1], culprit, ended).text == said or case == "different calls"
    assert judge(parts, culprit, ended).tells == (case not in TELL_NOTHING)


@settings(max_examples=40)
@given(st.integers(2, 12), st.data())
def test_whoever_has_not_entered_is_found(processes: int, data: st.DataObject) -> None:
    """All ranks have done some exchanges; some have entered the next one, and the others are still before it."""
    done = [operation(key, f"call {key}", key, key + 0.5) for key in range(data.draw(st.integers(0, 5)))]
    late = data.draw(st.sets(st.integers(0, processes - 1), min_size=1, max_size=processes - 1))
    hung = operation(100, "the last call", 50.0, number=101)
    parts = [
        part(process, *done, *([] if process in late else [hung]), processes=processes, workers=processes)
        for process in range(processes)
    ]
    verdict = judge(data.draw(st.permutations(parts)))
    assert verdict.culprits == tuple(sorted(late))
    assert verdict.operation == hung
    assert isinstance(verdict, Verdict)


# The file


def record() -> FlightRecord:
    found = merge([*WAITING, part(2, TICKETS, groups=((1, 2, (0, 2)),))], ["process 9 cannot be read"], 2)
    assert found is not None
    return found


def test_a_file_says_what_was_written(tmp_path: Path) -> None:
    path, was = tmp_path / "flight.json", record()
    path.write_text(dump(was))
    assert load(path) == was
    assert was.culprits == (2,)
    assert "did not enter bucket 3" in was.verdict


def damaged(change: Any) -> str:
    said = json.loads(dump(record()))
    change(said)
    return json.dumps(said)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (damaged(lambda said: said.update(version=2)), "its version is 2, and this one reads version 1"),
        (damaged(lambda said: said.update(format="x")), "does not say that its format is"),
        (damaged(lambda said: said.pop("records")), "it has no 'records'"),
        (damaged(lambda said: said["records"][0].update(process=4)), "'4' is not a whole number from 0 to 3"),
        (damaged(lambda said: said["records"][0]["operations"][0].pop()), "is not a flight record"),
        (damaged(lambda said: said["records"][0].update(operations=[0] * (ROWS + 1))), "and a record keeps 1024"),
        (damaged(lambda said: said["records"][0].update(at_s=float("inf"))), "'inf' is not a number"),
        (damaged(lambda said: said["records"][0]["fault"].update(waits=3)), "'3' is not a list"),
        (damaged(lambda said: said.update(verdict=3)), "'3' is not a text"),
        ("[" * 100_000, "is not a flight record"),
        ("\x80", "is not a flight record"),
        ("{}", "does not say"),
    ],
)
def test_other_files_and_versions_are_refused(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "flight.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="flight record") as found:
        load(path)
    assert part in str(found.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*flight\.json: No such file"):
        load(tmp_path / "flight.json")


def test_control_characters_of_others_do_not_reach_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "flight.json"
    path.write_text(damaged(lambda said: said.update(verdict="\x1b[31mred\nline")))
    assert load(path).verdict == "\N{REPLACEMENT CHARACTER}[31mred line"


# The memory


def test_a_launcher_reads_the_memory_of_processes_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = FlightMemory(3)
    try:
        for name, value in launcher.environ().items():
            monkeypatch.setenv(name, value)
        for process in range(2):
            monkeypatch.setenv("SYNCLINE_PROCESS", str(process))
            flight = FlightPlace(process, "0").begin(process, **NOTES)
            assert flight is not None
            flight.begin(1, "bucket 3", 4)
            if process:
                flight.end(1)
        assert FlightPlace(1, "1").begin(1, **NOTES) is None  # the first session uses the memory
        monkeypatch.setenv("SYNCLINE_PROCESS", "2")
        other = FlightPlace(0, "0").begin(0, **{**NOTES, "run": "of another group"})
        monkeypatch.setenv("SYNCLINE_PROCESS", "3")
        assert FlightPlace(3, "0").begin(3, **NOTES) is None  # there is no memory for it
        found = launcher.record(ended={0: "was killed by SIGKILL"})
    finally:
        launcher.close()
    assert found is not None
    assert [one.process for one in found.parts] == [0, 1]
    assert found.parts[0].ended == "was killed by SIGKILL"
    assert other is not None
    assert found.unread == ("records of other groups are left out: 1",)


def test_processes_leave_files_only_after_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_FLIGHT", str(tmp_path / "flight.json"))
    folder = tmp_path / "flight.json.parts"
    made = [FlightPlace(process, "0").begin(process, **NOTES) for process in range(2)]
    assert len(list(folder.iterdir())) == 2
    assert folder.stat().st_mode & 0o777 == 0o700
    for flight in made:
        assert flight is not None
        flight.close()
    assert not list(tmp_path.iterdir())
    for process, run in ((0, "before"), (2, "before"), (0, "now"), (1, "now")):
        flight = FlightPlace(process, "0").begin(process, **{**NOTES, "run": run})
        assert flight is not None
        flight.fault(ClosedError("x"), -1, {})
        flight.close()
    (folder / "process-5-0.flight").write_bytes(b"something else")
    found = record_in(folder)
    assert found is not None
    assert [(one.process, one.run) for one in found.parts] == [(0, "now"), (1, "now")]
    assert "1 part of earlier runs is left out" in found.unread
    assert any("process-5-0.flight is not a part of a flight record: it has 14 bytes" in said for said in found.unread)


def test_a_folder_of_others_and_a_full_disk_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_FLIGHT", str(tmp_path / "flight.json"))
    folder = tmp_path / "flight.json.parts"
    folder.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="is a link"):
        FlightPlace(0, "0")
    folder.unlink()
    monkeypatch.setattr("os.posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UsageError, match="No space left on device; choose another file for SYNCLINE_FLIGHT"):
        FlightPlace(0, "0")
    assert not list(folder.iterdir())
    folder.chmod(0o777)
    with pytest.raises(UsageError, match="can be written to by everybody"):
        record_in(folder)


def test_a_view_of_fewer_processes_forgets_the_records_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = FlightMemory(3)
    try:
        for name, value in launcher.environ().items():
            monkeypatch.setenv(name, value)
        for process in range(3):
            monkeypatch.setenv("SYNCLINE_PROCESS", str(process))
            assert FlightPlace(process, "0").begin(process, **NOTES) is not None
        forget_records(2)
        record = launcher.record()
        assert record is not None
        assert len(record.parts) == 2
        forget_records(0)
        assert launcher.record() is None
    finally:
        launcher.close()
