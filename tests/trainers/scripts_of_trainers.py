"""Running a trainer's example, and what its ranks have trained to.

Each trainer has one run by the launcher of its users (``run``). The others are of ranks that are forks of a server,
with the environment that torchrun gives (``run_forked``): a trainer takes many seconds to be imported.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from pool import Pool

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "trainers"
LIMIT_S = 300.0
"""Trainers take their time to be imported, more so by several processes on a busy machine."""

RUN = ["-m", "syncline", "run", "-n", "2"]
GLOO_ENDED = "terminate called without an active exception"
"""What a process of the peer says, now and then, that torch ends while a thread of Gloo's still runs."""

MODULES = {
    "accelerate": ["accelerate", "torch.utils.data"],
    "keras": ["keras"],
    "lightning": ["lightning.pytorch", "syncline.lightning"],
    "ray": ["ray.train.torch"],
    "transformers": ["transformers.trainer", "transformers.models.bert.modeling_bert"],
}
"""What is slow to import for the scripts of each trainer."""

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def need(*packages: str) -> None:
    """Skip the tests of a file where one of its packages is not installed; none is loaded, which would take seconds."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make test-all installs it", allow_module_level=True)


def run(*arguments: Any, **environment: str) -> str:
    """Run Python with ``arguments`` in a process of its own; what it has printed, when it has ended well."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment_of_all() | environment,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def environment_of_all() -> dict[str, str]:
    """What all have, whoever starts them."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("SYNCLINE_STRATEGY", "HF_"))}
    path = os.pathsep.join(filter(None, sys.path))
    return alone | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SYNCLINE_SECRET": "a secret", "HF_HUB_OFFLINE": "1"}


@cache
def _pool_of(trainer: str) -> Pool:
    """The server of a trainer, begun when it is first asked for; it ends with this process."""
    environ = environment_of_all() | {"KERAS_BACKEND": "torch"}
    pool = Pool(Path(__file__).parent, "scripts_of_trainers", *MODULES[trainer], environ=environ)
    atexit.register(pool.close)
    return pool


def run_forked(trainer: str, script: Path, *arguments: Any, status: int = 0, **environment: str) -> str:
    """Run a script in two ranks as torchrun would; what both have printed, when they have ended as expected.

    The peer's run is begun again once where torch ends Gloo's group badly, or for ever.
    """
    case = script, [str(one) for one in arguments], environment
    statuses, printed = _forked(trainer, *case)
    if {"gloo", "ddp"} & set(arguments) and (None in statuses or GLOO_ENDED in printed):
        statuses, printed = _forked(trainer, *case)
    assert statuses == [status] * 2, printed
    return printed


def _forked(
    trainer: str, script: Path, arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[int | None], str]:
    """How both have ended, None for one that has not, and what they have printed."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    each = [[rank_variables(rank, store.port), str(script), list(arguments)] for rank in range(2)]
    with _pool_of(trainer).start(play, each, environment) as group:
        with contextlib.suppress(TimeoutError):
            group.end(LIMIT_S / 2)
        return [rank.status for rank in group.ranks], "\n".join(map(str, group.ranks))


def rank_variables(rank: int, port: int) -> dict[str, str]:
    """What torchrun gives one of two ranks, but for a file for its errors."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0, "MASTER_PORT": port}
    numbers |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "ROLE_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 1}
    numbers |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1}
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": "localhost",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": "here",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def play(_: Connection, variables: dict[str, str], script: str, arguments: list[str]) -> None:
    """Be a rank that runs a script."""
    os.environ |= variables
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


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
