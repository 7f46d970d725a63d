"""Ranks of JAX or TensorFlow: each a process of its own, which calls a function of its test's, and leaves the result.

They are forks of a server that has imported the framework, which takes TensorFlow six seconds; there is one for each
framework in each process that runs tests, which itself loads none.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from pool import Group, Pool

HERE = Path(__file__).resolve().parent
FOLDERS = [str(HERE / name) for name in ("trainers", "frameworks")]
LIMIT_S = 240.0
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "-1",
    "SYNCLINE_SECRET": "the secret of these tests",
}
MODULES = {
    "jax": ["array_ranks", "in_jax", "jax_bodies"],
    "tensorflow": ["array_ranks", "in_tensorflow", "tensorflow_bodies", "tensorflow_cases"],
}


class Ranks:
    """Processes that were started together, and have ended."""

    def __init__(self, folder: Path, group: Group, limit_s: float) -> None:
        with group:
            self.statuses = group.end(limit_s)
            self.printed = [rank.printed() for rank in group.ranks]
        paths = [folder / f"{rank.index}.pickle" for rank in group.ranks]
        self.results = [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]

    def found(self) -> list[Any]:
        """What each has given, all of them having ended well."""
        assert not any(self.statuses), "\n".join(self.printed)
        return self.results

    def all_named(self, says: str, dead: Sequence[int] = ()) -> None:
        """All have failed, and each but the dead has said so in a line that has ``says`` in it; ``*`` is anything."""
        assert all(self.statuses)
        for index, printed in enumerate(self.printed):
            lines, pattern = printed.splitlines(), f"*{says.replace('[', '[[]')}*"
            assert index in dead or any(fnmatchcase(line, pattern) for line in lines), printed


@cache
def pool_of(framework: str) -> Pool:
    """The server of a framework, begun when it is first asked for; it ends with this process.

    What XLA has compiled for a rank is not compiled again for the next one: that would take most of all the time.
    """
    environ = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([*FOLDERS, *filter(None, sys.path)])}
    pool = Pool(HERE, *MODULES[framework], environ=environ, whole=True, scratch="JAX_COMPILATION_CACHE_DIR")
    atexit.register(pool.close)
    return pool


def ranks(
    folder: Path,
    function: str,
    processes: int,
    *arguments: Any,
    x64: bool = True,
    limit_s: float = LIMIT_S,
    **environ: str,
) -> Ranks:
    """Have processes call ``module.name`` with their place and these arguments; all have ended when this returns."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    folder.mkdir(exist_ok=True)
    (folder / "arguments").write_bytes(pickle.dumps(arguments))
    each = [[function, index, processes, address, str(folder), x64] for index in range(processes)]
    return Ranks(folder, pool_of(function.partition("_")[0]).start(rank, each, environ), limit_s)


def rank(_: Connection, function: str, index: int, processes: int, address: str, folder: str, x64: bool) -> None:
    """Be one of them: JAX takes its environment as it is imported, which the server has done."""
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_enable_x64", x64)
    module, _, name = function.partition(".")
    arguments = pickle.loads(Path(folder, "arguments").read_bytes())
    found = getattr(importlib.import_module(module), name)((index, processes, address), *arguments)
    Path(folder, f"{index}.pickle").write_bytes(pickle.dumps(found))


def leaves(tree: Any) -> list[Any]:
    """The arrays of dictionaries and lists, in order."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, list):
        return [leaf for one in tree for leaf in leaves(one)]
    return [tree]


def check_near(found: Any, wanted: Any, what: str) -> None:
    """Weights in float64 are others', but for rounding."""
    for one, other in zip(leaves(found), leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12, err_msg=what)


def equal(one: Any, other: Any) -> bool:
    """Bit for bit."""
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(leaves(one), leaves(other), strict=True))


def train_as_one(
    folder: Path, function: str, workers: int, servers: int, cases: Sequence[tuple[str, ...]], steps: int
) -> None:
    """In each case workers end near one alone on the union of their batches, and with each other's very bits.

    ``function`` gives for each case weights, the number of steps, and, on rank 0, the weights of one worker.
    """
    first, *others = ranks(folder, function, workers + servers, cases, steps).found()[:workers]
    for case, (weights, made, wanted) in zip(cases, first, strict=True):
        check_near(weights, wanted, " ".join(case))
        assert made == steps
    for other in others:
        assert all(equal(one[0], mine[0]) for one, mine in zip(other, first, strict=True))


def are_refused(folder: Path, function: str, processes: int, cases: Mapping[tuple[str, str], str]) -> None:
    """In each case every process, before it waits for another, is told what stands beside the case."""
    for found in ranks(folder, function, processes, list(cases)).found():
        for (case, says), said in zip(cases.items(), found, strict=True):
            assert says in said, (case, said)


def train_digits_without(folder: Path, others: Sequence[str], example: str, **environ: str) -> None:
    """By a ring, where another framework that is imported ends the script; replicas are equal.

    Through a server, and beside what one worker learns, the tests of comparisons train the same network.
    """
    for name in others:
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')")
    script = HERE.parent / "examples" / example
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "syncline", "run", "-n", "2", "--strategy", "ring", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environ,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replicas equal" in done.stdout
    assert int(done.stdout.partition(": ")[2].split()[0]) > 340


def is_told_of(folder: Path, packages: Mapping[str, str], module: str, says: str) -> None:
    """Importing a module of ours where packages have these sources ends with an error that matches."""
    for name, source in packages.items():
        (folder / f"{name}.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])},
        check=False,
    )
    assert done.returncode == 1
    assert re.search(says, done.stderr), done.stderr
