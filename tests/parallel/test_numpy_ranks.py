"""Models of NumPy between processes: who fails in the middle of a step is named, and statistics count what went."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LIMIT_S = 120.0
SCRIPT = """
import os, signal, sys
import numpy as np
import syncline

def descend(weights, gradient, state, *, lr=0.1):
    weights -= lr * gradient

syncline.init(sys.argv[1])
weights, optimizer = syncline.prepare({"first": np.ones(1000), "last": np.ones((10, 5))}, descend)
for step in range(3):
    optimizer.produced("last", np.ones((10, 5)))
    if step == 1 and syncline.rank() == 1 and sys.argv[2] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.produced("first", np.ones(1000))
    optimizer.step()
stats = syncline.stats()
if syncline.rank() == 0:
    print(stats.strategy, sum(stats.bytes_sent.values()) > 3 * 8 * 1050, stats.blocked_s > 0, sep=";")
"""


def run(folder: Path, strategy: str, what: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "syncline", "run", "-n", "2", str(script), strategy, what],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_a_rank_that_dies_in_the_middle_of_backward_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "ring schedule=wait_free", "dies")
    assert done.returncode != 0
    assert "rank 1" in done.stderr
    assert "died: its connection to rank" in done.stderr
    # How far rank 0 has come by then, the ticket of the step or one of the buckets, is a matter of the machine.
    assert any(part in done.stderr for part in ("a training step", "bucket 0 (last", "bucket 1 (first"))


def test_statistics_count_what_went(tmp_path: Path) -> None:
    done = run(tmp_path, "ring schedule=wait_free transport=tcp", "ends")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ring schedule=wait_free transport=tcp;True;True"
