"""Who ends with status 0 in the middle of a run has failed, for its launcher too."""

from __future__ import annotations

import os
import sys

import pytest

from syncline.launch import attendance
from syncline.launch.attendance import VARIABLE, Attendance
from syncline.launch.local import Outcome, launch

HEAD = "import os, sys; from syncline.launch import attendance as a; "


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
    inner = "import os; print(os.environ.get('SYNCLINE_ATTENDANCE'))"
    script = (
        "a.join(); from syncline.launch.local import launch; said = [];"
        f" launch([sys.executable, '-c', {inner!r}], 1, ranked=False, on_output=lambda _, line: said.append(line));"
        " a.leave(); sys.exit(said != ['None'])"
    )
    assert run(script, 1).status == 0


def test_another_file_in_the_place_of_the_descriptor_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("somebody-else's")
    monkeypatch.setenv(VARIABLE, f"{fd}:0")
    attendance.join()
    assert os.pread(fd, 1, 0) == b""
    os.close(fd)
    for text in ("", "7", "x:y", f"{fd}:0"):
        monkeypatch.setenv(VARIABLE, text)
        attendance.join()


def test_every_rank_has_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Attendance(3)
    monkeypatch.setenv(VARIABLE, kept.environ(2)[VARIABLE])
    attendance.join()
    assert [kept.present(rank) for rank in range(3)] == [False, False, True]
    attendance.leave()
    assert not kept.present(2)
    kept.close()
