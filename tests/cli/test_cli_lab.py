"""What lab passes on, and what it refuses."""

from __future__ import annotations

import pytest
from calling import Recorder, call


def test_lab_passes_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(3)
    monkeypatch.setattr("syncline_bench.lab.job.run", recorder)
    line = "lab --hosts 3 --rate 500Mbit --per-host 2 --strategy ps --name n --timeout 9 -- train.py --hosts 7"
    assert call(*line.split()).exit_code == 3
    assert recorder.args == (("train.py", "--hosts", "7"),)
    assert recorder.kwargs == {
        "hosts": 3,
        "rate": 500e6,
        "per_host": 2,
        "servers": 1,
        "name": "n",
        "mpi": None,
        "env": {"SYNCLINE_STRATEGY": "ps(servers=1)"},
        "timeout_s": 9.0,
    }


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("lab --hosts 4", "no command"),
        ("lab --list -- true", "take no command"),
        ("lab --hosts 0 -- true", "0 is not in the range"),
        ("lab --rate fast -- true", "--rate must be a number with a unit"),
        ("lab --rate 5 -- true", "1Mbit to 100Gbit"),
        ("lab --hosts 500 -- true", "1 to 200 hosts"),
        ("lab --name A_B -- true", "cannot be a lab's name"),
        ("lab --hosts 1 --strategy ps -- true", "leave no worker"),
        ("lab --strategy sp -- true", "sp"),
        ("lab --mpi openmpi --strategy ps -- true", "an MPI job has no server processes"),
        ("lab --mpi lam -- true", "lam"),
    ],
)
def test_lab_refuses_what_makes_no_sense(line: str, says: str) -> None:
    result = call(*line.split())
    assert result.exit_code == 2
    assert says in result.output
