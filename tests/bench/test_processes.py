"""A row's processes, played by small scripts: what they report, how they fail, and what is left of them."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from syncline_bench.cases import Case
from syncline_bench.display import RowDisplay
from syncline_bench.processes import measure
from syncline_bench.report.comparison import Row

PROLOGUE = """
import json, os, signal, sys, time
from syncline.launch.environment import recognise
rank = recognise().rank
pipe = open(json.loads(sys.argv[2])[rank].split()[0], "w", buffering=1)
def send(kind, **content):
    print(json.dumps({"kind": kind, **content}), file=pipe)
send("here")
def result(sha256="a"):
    names = ("loading_s h2d_s forward_s backward_s update_s step_s exposed_comm_s iteration_s compute_s "
             "images_per_s bytes_sent_per_step").split()
    send("result", iterations=10, warmup=2, measures=dict.fromkeys(names, 1.0 + rank), chosen="ring transport=shm",
         curve=[{"iteration": 10, "seconds": 1.0, "loss": 0.5, "accuracy": None, "test_loss": None}],
         sent={}, received={}, sha256=sha256, start_s=0.5, peak_bytes=1 << 28,
         staleness={}, version_lag={}, waited_s={}, mean_compute_s=1.0, cpu_s=5.0 + rank)
    send("done")
def forever():
    while True:
        signal.pause()
"""


def open_files() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def row_of(script: str, workers: int = 2, servers: int = 0, limit_s: float = 60.0) -> tuple[Row, str]:
    case = Case("ring", workers, servers, 64, 10)
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    with RowDisplay(console) as display:
        row = measure(case, "digits", 0, limit_s, display, script=("-c", PROLOGUE + script))
    assert isinstance(console.file, io.StringIO)
    return row, console.file.getvalue()


def test_results_of_all_workers_make_a_row_and_servers_say_nothing() -> None:
    script = """
if rank == 0:
    send("progress", iteration=10, loss=0.5, images_per_s=100.0)
if rank < 2:
    result()
else:
    send("served", cpu_s=9.0)
    send("done")
"""
    row, shown = row_of(script, workers=2, servers=1)
    assert row.error is None
    assert row.finished
    assert row.images_per_s == 1.0 + 2.0
    assert row.cpu_s_per_step == (5.0 + 6.0 + 9.0) / 10
    assert (row.workers, row.servers, row.batch) == (2, 1, 64)
    assert "iteration 10/10, loss 0.5000" in shown
    assert shown.splitlines()[-1] == "ring: done"


def test_replicas_that_differ_do_not_finish_a_row() -> None:
    row, _ = row_of("result(sha256=str(rank))")
    assert row.error is None
    assert row.replicas_equal is False
    assert not row.finished


def test_the_error_names_the_process_that_failed_first() -> None:
    script = """
send("error", at=10.0 - rank, text=f"PeerLost: from {rank}")
sys.exit(1)
"""
    row, shown = row_of(script, workers=2, servers=1)
    assert row.error == "rank 2 (server 0): PeerLost: from 2"
    assert row.iteration_s is None
    assert shown.splitlines()[-1] == "ring: failed"


def test_a_process_that_dies_without_a_word_leaves_its_last_output() -> None:
    script = """
if rank == 1:
    print("out of luck", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
result()
"""
    row, _ = row_of(script)
    assert row.error is not None
    assert "rank 1 was killed by SIGKILL" in row.error
    assert "out of luck" in row.error


def test_a_worker_that_ends_without_a_result_is_named() -> None:
    row, _ = row_of("if rank == 0: result()")
    assert row.error is not None
    assert row.error == "rank 1 ended without a result"


def test_measured_numbers_are_kept_when_the_end_fails() -> None:
    row, _ = row_of("result(); sys.exit(3 if rank == 0 else 0)")
    assert row.iteration_s == 1.5
    assert row.error is not None
    assert not row.finished


def test_silence_beyond_the_limit_ends_the_row_and_its_processes(tmp_path: Path) -> None:
    script = f"open({str(tmp_path)!r} + '/' + str(os.getpid()), 'w').close(); forever()"
    row, _ = row_of(script, limit_s=1.0)
    assert row.error is not None
    assert "no report for" in row.error
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


def test_nothing_stays_open() -> None:
    before = open_files()
    row_of("result()")
    assert open_files() == before
