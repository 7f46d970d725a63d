"""MPI jobs in a lab: started on every host, and their messages travel over the links."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from syncline.errors import UsageError
from syncline.launch.local import launch
from syncline.launch.mpi_library import MpiLibrary
from syncline_bench.lab import Lab
from syncline_bench.peers import library_of

LIMIT_S = 120.0
SCRIPT = Path(__file__).with_name("mpi_allreduce.py")

pytestmark = pytest.mark.usefixtures("able")


def received(lab: Lab, host: int) -> int:
    """How many bytes a host's interface has received."""
    path = f"/sys/class/net/{lab.interface}/statistics/rx_bytes"
    done = subprocess.run([*lab.enter(host), "cat", path], capture_output=True, check=True, timeout=LIMIT_S)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("library", "per_host"), [("openmpi", 1), ("mpich", 1), ("openmpi", 2)])
def test_an_allreduce_runs_over_the_links(lab: Lab, library: str, per_host: int) -> None:
    found = library_of(library)
    if not isinstance(found, MpiLibrary):
        pytest.skip(found)
    before = [received(lab, host) for host in range(2)]
    ranks, nbytes = 2 * per_host, 4_000_000
    argv, env = lab.mpi_command(ranks, [found.python, str(SCRIPT), str(nbytes)], found, per_host)
    lines: list[str] = []
    outcome = launch(argv, 1, env=env, ranked=False, on_output=lambda _, line: lines.append(line), timeout_s=LIMIT_S)
    assert outcome.status == 0, lines
    # Not every launcher keeps the lines of different ranks apart.
    places = sorted(re.findall(r"[a-z0-9]+-h\d+ rank \d+ of \d+", "\n".join(lines)))
    assert places == [f"{lab.host_name(rank // per_host)} rank {rank} of {ranks}" for rank in range(ranks)], lines
    # An allreduce between two hosts brings each at least one half of the data, and the other half's sum.
    assert all(received(lab, host) - before[host] >= nbytes for host in range(2))


def test_a_job_that_does_not_fit_or_has_no_library_is_refused(lab: Lab) -> None:
    with pytest.raises(UsageError, match="no place on 2 hosts"):
        lab.mpi_command(3, ["true"])
    with pytest.raises(UsageError, match="unknown MPI library 'lam'"):
        lab.mpi_command(2, ["true"], "lam")
    with pytest.raises(UsageError, match=r"Intel MPI does not run in a lab.*: use openmpi or mpich"):
        lab.mpi_command(2, ["true"], MpiLibrary("intelmpi", "", ()))
