"""Whole runs under launchers: statuses, what is printed, and that nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nodes_script as nodes
import numpy as np
import psutil
import pytest
import restarted_script as restarted
import torch

from mpi_launch import LIBRARIES, mpi_command

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
LIMIT_S = 60.0
RUN = [sys.executable, "-m", "syncline", "run"]

pytestmark = pytest.mark.slow


@contextmanager
def started(command: list[str], environ: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A launcher with its output; whatever of it is left at the end is killed."""
    pipe, env = subprocess.PIPE, {**os.environ, **(environ or {})}
    process = subprocess.Popen(
        command, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=env
    )
    try:
        yield process
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        for child in children:
            child.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def script(how: str, *options: str, liveness: float = 2.0) -> list[str]:
    return [*RUN, *options, str(HERE / "launched_script.py"), how, str(liveness)]


def gone(pid: int, limit_s: float = LIMIT_S) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        psutil.Process(pid).wait(limit_s)
    return not psutil.pid_exists(pid)


def whole(command: list[str], environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a launcher to its end: status and output; the processes it has named are gone."""
    with started(command, environ) as process:
        text, _ = process.communicate(timeout=LIMIT_S)
    pids = [int(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("running as")]
    assert all(gone(pid) for pid in pids)
    return process.returncode, text


def test_a_killed_rank_decides_the_status_and_is_named_by_all() -> None:
    status, text = whole(script("kill", "-n", "2", "--strategy", "ps(servers=1) transport=tcp"))
    assert status == 128 + signal.SIGKILL, text
    for name in ("rank 0 (", "rank 2 ("):
        assert any(name in line.partition(": ")[2][:20] and "rank 1 (" in line for line in text.splitlines()), text
    assert "rank 1 was killed by SIGKILL" in text


def test_the_last_line_names_who_failed_first_with_its_own_error() -> None:
    """Although every rank ends with the same status, and the others need not end later."""
    status, text = whole(script("raise", "-n", "2", "--strategy", "ps(servers=1)"))
    assert status == 1, text
    last = text.splitlines()[-1]
    assert last.startswith("syncline: rank 1 failed: ValueError: the data of this rank are spoilt; "), text
    assert "died" not in text


def test_torchrun_calls_who_failed_first_the_root_cause() -> None:
    status, text = whole(torchrun_command("--nproc-per-node", "3", str(HERE / "launched_script.py"), "raise", "2.0"))
    assert status == 1, text
    cause = text.partition("Root Cause")[2]
    assert "rank      : 1 (local_rank: 1)" in cause, text
    assert "failed: ValueError: the data of this rank are spoilt" in cause, text
    assert "died" not in text


def test_ctrl_c_ends_everything_at_once() -> None:
    with started(script("none", "-n", "2", "--strategy", "ring")) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().rpartition(" ")[2]) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        text = process.stdout.read()
        assert process.wait(LIMIT_S) == 130, text
    assert all(gone(pid) for pid in pids)
    assert "Traceback" not in text


def test_a_stopped_rank_is_killed_in_the_end() -> None:
    from syncline.launch.local import LocalRun

    lines: list[str] = []
    command = script("stop")[len(RUN) :]
    environ = {"SYNCLINE_STRATEGY": "ring transport=shm"}
    say = lambda rank, line: lines.append(f"{rank}: {line}")  # noqa: E731
    with LocalRun([sys.executable, *command], 2, env=environ, grace_s=0.5, on_output=say) as run:
        outcome = run.wait(LIMIT_S)
        pids = run.pids
    assert outcome.status == 1
    assert outcome.endings[0].rank == 0
    assert any(line.startswith("0: ") and "rank 1 (" in line and "is stopped" in line for line in lines), lines
    assert all(gone(pid) for pid in pids)


def test_torchrun() -> None:
    torchrun = shutil.which("torchrun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if torchrun is None:
        pytest.skip("there is no torchrun")
    pytest.importorskip("sklearn")
    status, text = whole([torchrun, "--nproc-per-node", "2", "--standalone", str(EXAMPLES / "train.py")])
    assert status == 0, text
    right = re.search(r"direct .*: ([\d.]+) *% of the test images right", text)
    assert right is not None, text
    assert float(right[1]) > 80
    assert "no secret is set" in text


def torchrun_command(*arguments: str, place: tuple[str, ...] = ("--standalone",)) -> list[str]:
    torchrun = shutil.which("torchrun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if torchrun is None:
        pytest.skip("there is no torchrun")
    return [torchrun, *place, *arguments]


@pytest.mark.parametrize("how", ["none", "backend"])
def test_the_workers_of_a_killed_torchrun_end(how: str) -> None:
    command = torchrun_command("--nproc-per-node", "2", str(HERE / "launched_script.py"), how, "2.0")
    with started(command) as process:
        assert process.stdout is not None
        pids: list[int] = []
        while len(pids) < 2:
            line = process.stdout.readline()
            assert line, "ended too early"
            pids += [int(line.rpartition(" ")[2])] if line.startswith("running as") else []
        process.kill()
        assert all(gone(pid) for pid in pids)
        said = process.stdout.read()  # the second may hear of the first before it looks for the launcher
        assert said.count("the launcher is gone") + said.count("died: its connection to") >= 2
        assert "the launcher is gone" in said


@pytest.mark.beyond(1)
@pytest.mark.parametrize(("victim", "script"), [(0, "backend"), (1, "syncline")])
def test_torchrun_restarts_a_script_at_its_checkpoint(tmp_path: Path, victim: int, script: str) -> None:
    """A killed rank costs one step: its checkpoint was not written. Rank 0 writes those of the backend's script."""
    options = "--nproc-per-node", "2", "--max-restarts", "1", str(HERE / "restarted_script.py")
    status, text = whole(torchrun_command(*options, str(tmp_path), str(victim), script))
    assert status == 0, text
    steps = [tuple(map(int, line.split()[:2])) for line in (tmp_path / "steps").read_text().splitlines()]
    lost, first = restarted.LOST, [step for attempt, step in steps if attempt == 0]
    again = [step for attempt, step in steps if attempt == 1]
    assert first in (list(range(lost)), list(range(lost + 1)))  # rank 0 may be ended before it has written its last
    assert again == list(range(again[0], restarted.STEPS))
    assert again[0] in ({lost} if victim == 0 else {lost, lost + 1})
    x, y, model, optimizer = restarted.problem()
    for step in range(restarted.STEPS):
        restarted.learn(x[step], y[step], model, optimizer)
    state = torch.load(tmp_path / "newest.pt")["model"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_under_torchrun_a_node_joins_and_is_killed(tmp_path: Path, address: str) -> None:
    """The first one has restarted before, the second one never. The second one gets rank 0, and is then lost.

    Neither a join nor a loss costs more than the step under way.
    """
    plan: Any = {"fails": [1, 1], "holds": [[1, 3]]}, {"holds": [[2, 6]]}
    wait = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1,join_timeout=60"
    place = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--rdzv-conf", wait)
    more = ("--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.1", "--rdzv-id", "nodes")

    def node(number: int) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        script = (str(HERE / "nodes_script.py"), str(tmp_path), json.dumps(plan[number]))
        name = ("localhost", "127.0.0.1")[number]  # torchrun numbers nodes by their names
        command = torchrun_command(*more, "--local-addr", name, *script, place=place)
        return started(command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "SYNCLINE_SECRET": "of the nodes"})

    with node(0) as first:
        await_file(tmp_path / "holds [1, 3]", first)
        with node(1) as second:
            await_file(tmp_path / "holds [2, 6]", second)
            second.kill()
            text, _ = first.communicate(timeout=LIMIT_S)
    assert first.returncode == 0, text
    check_steps(tmp_path, [1, 1, 1, 2, 2, 2, 1, 1])


def check_steps(folder: Path, workers: list[int]) -> None:
    """Each step was made once, by so many workers, and the weights are those of one process."""
    steps = [[int(word) for word in line.split()] for line in (folder / "steps").read_text().splitlines()]
    assert steps == [[number, step] for step, number in enumerate(workers)]
    x, y, weights = nodes.problem()
    rule, state = nodes.Momentum(), dict[str, Any]()
    for step in range(nodes.STEPS):
        batch = slice(step * nodes.BATCH, (step + 1) * nodes.BATCH)
        rule.update(weights, nodes.gradient(x[batch], y[batch], weights), state)
    np.testing.assert_allclose(np.load(folder / "weights.npy"), weights, rtol=1e-9, atol=1e-12)


def await_file(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a process has made a file."""
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


@pytest.mark.beyond(1)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_lost_rank_ends_a_job_of_mpi_and_the_next_one_goes_on_with_more_ranks(tmp_path: Path, library: str) -> None:
    def job(ranks: int, **plan: Any) -> tuple[int, str]:
        command, environ = mpi_command(library, ranks)
        script = [str(HERE / "nodes_script.py"), str(tmp_path), json.dumps(plan)]
        return whole([*command, sys.executable, *script], environ)

    status, text = job(2, init={"elastic": 2})
    assert status, text
    assert "its launcher lets no run go on when a worker is lost: start it with syncline run -n 2 --elastic 2" in text
    status, text = job(2, fails=[2, 2])
    assert status, text
    assert "ValueError: the data of this worker are spoilt" in text
    status, text = job(2, dies=[2, 5])
    assert status, text
    status, text = job(3)
    assert status == 0, text
    check_steps(tmp_path, [2, 2, 2, 2, 2, 3, 3, 3])


@pytest.mark.parametrize("launcher", ["syncline", "torchrun"])
def test_workers_have_a_world_and_a_group_of_torchs_to_themselves(launcher: str) -> None:
    """Nobody waits for the server, neither in the script's numbers nor in its process group."""
    command = [*RUN, "-n", "2", "--servers", "1"]
    if launcher == "torchrun":
        command = torchrun_command("--nproc-per-node", "3")
    status, text = whole([*command, str(HERE / "grouped_script.py")])
    assert status == 0, text
    assert text.count("a group of 2 in a world of 2 of 2 workers") == 2, text


def test_torch_multiprocessing() -> None:
    status, text = whole([sys.executable, str(EXAMPLES / "spawn.py")])
    assert status == 0, text
    assert "the sum over 2 workers is [3.0, 3.0, 3.0, 3.0, 3.0]" in text


def test_over_tls_a_run_ends_well_and_its_faults_are_named() -> None:
    """Under the secret that the launcher makes."""
    pytest.importorskip("cryptography")
    over = ["-n", "3", "--tls", "on", "--strategy"]
    done = whole([*RUN, *over, "ring transport=tcp", str(EXAMPLES / "numpy_loop.py")])
    assert done[0] == 0, done[1]
    status, text = whole(script("kill", *over, "ring transport=tcp"))
    assert status == 128 + signal.SIGKILL
    assert text.count("rank 1 (") >= 2, text
    assert "died: its connection to rank" in text
    status, text = whole(script("none", *over, "ring transport=grpc"))
    assert status == 1
    assert "tls= is set, but transport=grpc makes connections of its own and does not encrypt them: use tcp" in text
