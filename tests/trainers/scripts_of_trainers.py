"""Running a trainer's example, and what its ranks have trained to."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "trainers"
LIMIT_S = 300.0
"""Trainers take their time to be imported, more so by several processes on a busy machine."""

RUN = ["-m", "syncline", "run", "-n", "2"]
GLOO_ENDED = "terminate called without an active exception"
"""What a process of the peer says, now and then, that torch ends while a thread of Gloo's still runs."""

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def need(*packages: str) -> None:
    """Skip the tests of a file where one of its packages is not installed; none is loaded, which would take seconds."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make test-all installs it", allow_module_level=True)


def run(*arguments: Any, status: int = 0, limit_s: float = LIMIT_S, **environment: str) -> str:
    """Run Python with ``arguments`` in a process of its own; what it has printed, when it has ended as expected."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("SYNCLINE_STRATEGY", "HF_"))}
    started = partial(
        subprocess.run,
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=alone
        | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", "SYNCLINE_SECRET": "a secret"}
        | environment,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    again = status == 0 and "gloo" in arguments
    try:
        done = started(timeout=limit_s / 2 if again else limit_s)
        again = again and GLOO_ENDED in done.stderr
    except subprocess.TimeoutExpired:
        if not again:
            raise
    if again:
        done = started()
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def weights(folder: Path, name: str, world: int = 2) -> dict[str, torch.Tensor]:
    """What all ranks of a run have left, which has to be the same on all."""
    first, *others = (torch.load(folder / f"{name}-{rank}.pt") for rank in range(world))
    assert first
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[key], other[key]) for key in first)
    return first  # type: ignore[no-any-return]


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference between two runs' weights."""
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).abs().max()) for key in one)
