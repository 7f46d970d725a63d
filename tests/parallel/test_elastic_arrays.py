"""Elastic runs of NumPy, JAX and TensorFlow: workers are lost and others join, and the weights are those of the log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from syncline.global_batches import read_log

LIMIT_S = 240.0
SCRIPT = Path(__file__).resolve().parent / "elastic_script.py"


def call(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "syncline", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "-1",
        }
        | environ,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def survivors(folder: Path, *arguments: str, workers: int = 3, elastic: str = "1:3") -> list[dict[str, Any]]:
    """What each worker has left that was there at the end. Every step is in the log, and gives the weights bit for
    bit when one process repeats it."""
    log, ran, again = folder / "samples.jsonl", folder / "run", folder / "again"
    ran.mkdir()
    again.mkdir()
    framework, strategy, *rest = arguments
    call("run", "-n", workers, "--elastic", elastic, "--samples", log, SCRIPT, framework, strategy, ran, *rest)
    found = [json.loads(path.read_text()) for path in sorted(ran.iterdir())]
    epochs = found[0]["epochs"]
    assert sorted(read_log(str(log))) == list(product(range(epochs), range(4)))
    call("repeat", log, SCRIPT, framework, strategy, again, *rest, EPOCHS=str(epochs))
    (repeated,) = [json.loads(path.read_text()) for path in again.iterdir()]
    assert [one["weights"] for one in found] == [repeated["weights"]] * len(found)
    return found


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        find_spec(package) is None, reason=f"{package} is not installed: make test-all installs it"
    )


@pytest.mark.slow
def test_numpy_goes_on_alone_and_takes_in_others(tmp_path: Path) -> None:
    """Worker 1 dies in the middle of a step and worker 0 before one, so that one is alone until others join it."""
    found = survivors(tmp_path, "numpy", "ring schedule=wait_free", "1:3,0:6", "4")
    assert [sorted(one["members"]) for one in found] == [[2, 3, 4]] * 3
    assert [one["repairs"] for one in found] == [2, 2, 2]
    assert found[0]["calls"] >= 4
    assert min(one["calls"] for one in found) == 1


@pytest.mark.beyond(1)
@pytest.mark.parametrize("framework", [pytest.param(one, marks=needs(one)) for one in ("jax", "tensorflow")])
def test_a_framework_goes_on_alone_and_takes_in_others(tmp_path: Path, framework: str) -> None:
    """As above: the same training step is then one of several workers, of one worker, and of several again."""
    found = survivors(tmp_path, framework, "ring", "1:3", "2", workers=2, elastic="1:2")
    assert [one["members"] for one in found] == [[0, 2]] * 2
    assert [one["repairs"] for one in found] == [1, 1]
    assert [one["calls"] for one in found] == [3, 1]
