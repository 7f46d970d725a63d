"""What the processes of a run say of its end: once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from syncline.launch.local import launch
from syncline.wire import saying

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saying, "_own", set())
    monkeypatch.delenv(saying.VARIABLE, raising=False)


def test_a_process_alone_says_everything_once() -> None:
    assert saying.first_time("rank 0 (host, pid 3): no")
    assert not saying.first_time("rank 1 (host, pid 4): no")  # whichever rank it is about
    assert saying.first_time("yes")


def test_what_cannot_be_encoded_is_said_as_those_who_hear_of_it_say_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert saying.first_time("cannot read caf\udce9.jpg")
    assert not saying.first_time("cannot read caf\\udce9.jpg")
    saying.say("cannot read caf\udce9.jpg\n")
    assert capfd.readouterr().err == "cannot read caf\\udce9.jpg\n"


def test_processes_that_share_a_list_say_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = saying.new_list()
    try:
        monkeypatch.setenv(saying.VARIABLE, str(fd))
        assert saying.first_time("no")
        saying._own.clear()  # as in another process
        assert not saying.first_time("no")
        for number in range(saying._MOST + 1):
            saying.first_time(str(number))
        assert os.fstat(fd).st_size == saying._CULPRIT_BYTES + saying._MOST * saying._DIGEST_BYTES
    finally:
        os.close(fd)


def test_who_holds_the_list_for_long_keeps_nobody_from_speaking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saying, "_LOCK_S", 0.0)
    fd = saying.new_list()
    monkeypatch.setenv(saying.VARIABLE, str(fd))
    holds = f"import fcntl\nfcntl.lockf({fd}, fcntl.LOCK_EX)\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", holds], pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        assert saying.first_time("no")
        other.communicate(b"\n", LIMIT_S)
    assert saying.first_time("yes")
    assert os.fstat(fd).st_size == saying._CULPRIT_BYTES + saying._DIGEST_BYTES  # of what was said when nobody held it
    os.close(fd)


@pytest.mark.parametrize("value", ["", "x", "-1", "1", "987654", "\u00b2", "9" * 5000])
def test_a_descriptor_that_is_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(saying.VARIABLE, value)
    assert saying.first_time("no")
    assert not saying.first_time("no")


def test_a_mistake_that_all_ranks_make_is_told_once(tmp_path: Path) -> None:
    script, printed = tmp_path / "script.py", []
    script.write_text("import syncline\nsyncline.init('ring')\n")
    outcome = launch(
        [sys.executable, str(script)], 3, servers=1, on_output=lambda _, line: printed.append(line), timeout_s=LIMIT_S
    )
    assert outcome.status == 1
    text = "\n".join(printed)
    assert text.count("Traceback") == 1
    assert text.count("has 0 server processes, 1 were started") == 1
    assert text.count("the same UsageError, see above") == 2


def test_the_first_note_of_a_culprit_stays_until_a_group_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = saying.new_list()
    monkeypatch.setenv(saying.VARIABLE, str(fd))
    assert saying.blamed(fd) is None
    saying.blame(3, "rank 3", "failed: ValueError: caf\udce9", own=True)
    saying.blame(1, "rank 1", "died", own=False)
    assert saying.first_time("no")  # beside the list
    assert saying.blamed(fd) == (3, "failed: ValueError: caf\\udce9")
    saying.absolve()
    assert saying.blamed(fd) is None
    saying.blame(1, "rank 1", "\u00e9" * 10_000, own=False)
    culprit = saying.blamed(fd)
    assert culprit is not None
    assert len(culprit[1]) > 100
    saying._own.clear()
    assert not saying.first_time("no")
    os.close(fd)


def test_torchrun_takes_the_culprit_for_the_root_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    failures = {}
    for rank, own in enumerate((False, True, False)):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank)))
        saying.blame(1, "rank 1 (host, pid 5)", "failed: ValueError: the data", own=own)
        saying.blame(2, "rank 2 (host, pid 6)", "died", own=False)  # the first stays
        failures[rank] = errors.ProcessFailure(rank, 100 + rank, 1, str(tmp_path / str(rank)))
    found = errors.ChildFailedError("script.py", failures)
    assert found.get_first_failure()[0] == 1
    assert str(found).count("traceback : rank 1 (host, pid 5) failed: ValueError: the data") == 3
