"""``syncline calibrate`` with real ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from syncline_bench.predict.networks import load_network

CALIBRATE = [sys.executable, "-m", "syncline", "calibrate", "--codecs", "none"]
COMMAND = [*CALIBRATE, "--transport", "tcp"]
LIMIT_S = 120.0


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "torch"])
def test_two_ranks_write_a_network_that_can_be_read(tmp_path: Path, transport: str) -> None:
    """The process with its children; nothing but the file is left."""
    path = tmp_path / "mine.json"
    # A busy machine may show no bandwidth in so short a time: then the command says so, and is asked again.
    for seconds in ("0.1", "1", "4"):
        done = subprocess.run(
            [*CALIBRATE, "--transport", transport, "--seconds", seconds, "-o", str(path)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if "show no bandwidth" not in done.stderr:
            break
        assert not path.exists()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "between.alpha" in done.stdout
    assert "slowdown.cpu" in done.stdout  # its value, or that other work hid it
    assert ("tensor was not measured: the ranks" in done.stdout) == (transport == "torch")
    assert f"--network {path}".replace("\n", "") in done.stdout.replace("\n", "")
    assert list(tmp_path.iterdir()) == [path]
    cluster = load_network(str(path))
    assert (cluster.name, cluster.cores, cluster.one_machine) == ("mine", len(os.sched_getaffinity(0)), True)
    assert cluster.source.startswith(f"syncline calibrate --transport {transport} --codecs none --seconds {seconds};")
    wanted = {"between.alpha", "between.beta", "between.flight", "message", "byte_cpu", "bucket", "gamma", "copy"}
    wanted |= {"tensor"} if transport == "tcp" else set()
    assert wanted <= set(cluster.constants)
    assert (cluster.native is not None) == (transport == "torch")
    assert all(cluster.constants[name].measured for name in wanted)
    # A byte takes some time to send, and a processor some to send it.
    assert max(piece.per_byte_s for piece in cluster.between.pieces) > 0
    assert cluster.message_s > 0


@pytest.mark.parametrize("how", ["a rank is killed", pytest.param("interrupt", marks=pytest.mark.slow)])
def test_nothing_is_left_when_it_ends_early(how: str, tmp_path: Path) -> None:
    """A rank that dies is named; Ctrl-C ends all; there is no file, and no process."""
    command = [*COMMAND, "--seconds", "600", "-o", str(tmp_path / "mine.json")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as started:
        assert started.stdout is not None
        lines = iter(started.stdout)
        assert any("messages of up to" in line for line in lines)  # all have met
        ranks = psutil.Process(started.pid).children()
        if how == "interrupt":
            os.killpg(started.pid, signal.SIGINT)
        else:
            killed = max(ranks, key=lambda rank: int(rank.environ()["SYNCLINE_PROCESS"]))
            killed.kill()
        told = "".join(lines)
        status = started.wait(LIMIT_S)
    assert status == (130 if how == "interrupt" else 128 + signal.SIGKILL), told
    said = "syncline: interrupted" if how == "interrupt" else "syncline: rank 1 was killed by SIGKILL"
    assert told.splitlines()[-1].startswith(said), told
    assert not any(rank.is_running() for rank in ranks)
    assert not list(tmp_path.iterdir())
