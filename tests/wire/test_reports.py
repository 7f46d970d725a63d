"""What the processes of a run report: each sentence once, who has failed first, who is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from syncline.launch.local import Outcome, launch
from syncline.wire import reports
from syncline.wire.reports import VARIABLE, Reports

LIMIT_S = 60.0
HEAD = "import os, sys; from syncline.wire import reports as a; "


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_own", set())
    monkeypatch.delenv(VARIABLE, raising=False)


def shared(monkeypatch: pytest.MonkeyPatch, ranks: int = 1, rank: int = 0) -> Reports:
    """The memory of so many ranks, of which this process is one."""
    kept = Reports(ranks)
    monkeypatch.setenv(VARIABLE, kept.environ(rank)[VARIABLE])
    return kept


def test_a_process_alone_says_everything_once() -> None:
    assert reports.first_time("rank 0 (host, pid 3): no")
    assert not reports.first_time("rank 1 (host, pid 4): no")  # whichever rank it is about
    assert reports.first_time("yes")


def test_what_cannot_be_encoded_is_said_as_those_who_hear_of_it_say_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert reports.first_time("cannot read caf\udce9.jpg")
    assert not reports.first_time("cannot read caf\\udce9.jpg")
    reports.say("cannot read caf\udce9.jpg\n")
    assert capfd.readouterr().err == "cannot read caf\\udce9.jpg\n"


def test_processes_that_share_a_list_say_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = shared(monkeypatch)
    reports.join()
    size = os.fstat(kept.fd).st_size
    assert reports.first_time("no")
    reports._own.clear()  # as in another process
    assert not reports.first_time("no")
    for number in range(reports._MOST + 1):
        reports.first_time(str(number))
    assert os.fstat(kept.fd).st_size == size
    assert kept.present(0)
    reports._own.clear()
    assert reports.first_time(str(reports._MOST))  # for which there was no room
    assert not reports.first_time("no")
    kept.close()


def test_who_holds_the_list_for_long_keeps_nobody_from_speaking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_LOCK_S", 0.0)
    kept = shared(monkeypatch)
    holds = f"import fcntl\nfcntl.lockf({kept.fd}, fcntl.LOCK_EX)\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", holds], pass_fds=[kept.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        assert reports.first_time("no")
        other.communicate(b"\n", LIMIT_S)
    assert reports.first_time("yes")
    reports._own.clear()
    assert reports.first_time("no")  # what was said while it was held is not there
    assert not reports.first_time("yes")
    kept.close()


@pytest.mark.parametrize("value", ["", "x", "-1:0", "1:0", "987654:0", "\u00b2:0", "9" * 5000 + ":0", "7", "x:y"])
def test_a_descriptor_that_is_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert reports.first_time("no")
    assert not reports.first_time("no")


def test_a_mistake_that_all_ranks_make_is_told_once(tmp_path: Path) -> None:
    script, printed = tmp_path / "script.py", []
    script.write_text("import syncline\nsyncline.init('ring')\n")
    outcome = launch(
        [sys.executable, str(script)], 3, servers=1, on_output=lambda _, line: printed.append(line), timeout_s=LIMIT_S
    )
    assert outcome.status == 1
    text = "\n".join(printed)
    assert text.count("Traceback") == 1
    assert text.count("but 1 were started") == 1
    assert text.count("the same UsageError, see above") == 2


def test_the_first_note_of_a_culprit_stays_until_a_group_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = shared(monkeypatch)
    assert kept.culprit() is None
    reports.blame(3, "rank 3", "failed: ValueError: caf\udce9", own=True)
    reports.blame(1, "rank 1", "died", own=False)
    assert reports.first_time("no")  # beside the list
    assert kept.culprit() == (3, "failed: ValueError: caf\\udce9")
    reports.absolve()
    assert kept.culprit() is None
    reports.blame(1, "rank 1", "\u00e9" * 10_000, own=False)
    culprit = kept.culprit()
    assert culprit is not None
    assert len(culprit[1]) > 100
    reports._own.clear()
    assert not reports.first_time("no")
    kept.close()


def test_torchrun_takes_the_culprit_for_the_root_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    failures = {}
    for rank, own in enumerate((False, True, False)):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank)))
        reports.blame(1, "rank 1 (host, pid 5)", "failed: ValueError: the data", own=own)
        reports.blame(2, "rank 2 (host, pid 6)", "died", own=False)  # the first stays
        failures[rank] = errors.ProcessFailure(rank, 100 + rank, 1, str(tmp_path / str(rank)))
    found = errors.ChildFailedError("script.py", failures)
    assert found.get_first_failure()[0] == 1
    assert str(found).count("traceback : rank 1 (host, pid 5) failed: ValueError: the data") == 3


def run(script: str, processes: int = 2) -> Outcome:
    return launch([sys.executable, "-c", HEAD + script], processes, timeout_s=60.0)


def test_a_rank_that_ends_in_the_middle_of_a_run_has_failed_whatever_its_status() -> None:
    outcome = run("a.join(); os.environ['RANK'] == '1' and os._exit(0); a.leave()")
    assert outcome.status == 1
    assert outcome.text.startswith("rank 1 ended with status 0 in the middle of the run")


@pytest.mark.parametrize("script", ["", "a.leave()", "a.join(); a.leave(); a.join(); a.leave()"])
def test_who_has_left_or_never_joined_is_judged_by_its_status(script: str) -> None:
    assert run(script).status == 0


def test_a_status_of_its_own_stays() -> None:
    outcome = run("a.join(); sys.exit(7)", 1)
    assert (outcome.status, outcome.text) == (7, "rank 0 ended with status 7")


def test_ranks_of_a_run_inside_a_rank_are_not_taken_for_it() -> None:
    inner = "import os; print(os.environ.get('SYNCLINE_REPORTS'))"
    script = (
        "a.join(); from syncline.launch.local import launch; said = [];"
        f" launch([sys.executable, '-c', {inner!r}], 1, ranked=False, on_output=lambda _, line: said.append(line));"
        " a.leave(); sys.exit(said != ['None'])"
    )
    assert run(script, 1).status == 0


def test_another_file_in_the_place_of_the_descriptor_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("somebody-else's")
    monkeypatch.setenv(VARIABLE, f"{fd}:0")
    reports.join()
    assert os.pread(fd, 1, 0) == b""
    os.close(fd)
    reports.join()


def test_every_rank_has_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = shared(monkeypatch, 3, 2)
    reports.join()
    assert [kept.present(rank) for rank in range(3)] == [False, False, True]
    reports.leave()
    assert not kept.present(2)
    kept.close()
