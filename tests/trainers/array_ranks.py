"""Ranks of JAX or TensorFlow: each a process of its own, which calls a function of its test's, and leaves the result.

Imported by tests it starts them (``ranks``) and loads no framework; run as a program it is one.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

LIMIT_S = 240.0
SECRET = "the secret of these tests"


class Ranks:
    """Processes that were started together, and have ended."""

    def __init__(self, folder: Path, processes: Sequence[subprocess.Popen[str]]) -> None:
        self.printed, self.statuses, self.results = [], [], []
        try:
            for index, process in enumerate(processes):
                self.printed.append(process.communicate(timeout=LIMIT_S)[0])
                self.statuses.append(process.returncode)
                path = folder / f"{index}.pickle"
                self.results.append(pickle.loads(path.read_bytes()) if path.exists() else None)
        finally:
            for process in processes:
                process.kill()
                process.wait()

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


def ranks(folder: Path, function: str, processes: int, *arguments: Any, x64: bool = True, **environ: str) -> Ranks:
    """Have processes call ``module.name`` with their place and these arguments; all have ended when this returns."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    folder.mkdir(exist_ok=True)
    (folder / "arguments").write_bytes(pickle.dumps(arguments))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": str(int(x64)),
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
        "SYNCLINE_SECRET": SECRET,
    }
    return Ranks(folder, [
        subprocess.Popen(
            [sys.executable, __file__, function, str(index), str(processes), address, str(folder)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment | environ,
        )
        for index in range(processes)
    ])  # fmt: skip


def train_digits_without(folder: Path, others: Sequence[str], example: str, **environ: str) -> None:
    """Through servers too, where another framework that is imported ends the script; all within one test image."""
    for name in others:
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')")
    script = Path(__file__).resolve().parents[2] / "examples" / example
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    right = []
    for options in (["-n", "1"], ["-n", "4", "--strategy", "ring"], ["-n", "4", "--strategy", "ps(servers=1)"]):
        done = subprocess.run(
            [sys.executable, "-m", "syncline", "run", *options, str(script)],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environ,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "replicas equal" in done.stdout
        right.append(int(done.stdout.partition(": ")[2].split()[0]))
    assert right[0] > 340
    assert all(abs(found - right[0]) <= 1 for found in right)


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


def resume(
    folder: Path,
    function: str,
    workers: int,
    strategies: Sequence[str],
    servers: int,
    equal: Callable[[Any, Any], bool],
    near: Callable[[Any, Any, str], None],
) -> None:
    """A run of seven steps is one of four and one of three, bit for bit, and near one that goes on with a worker more.

    ``function`` gives for each strategy a state and weights, of which ``equal`` and ``near`` know.
    """
    processes = workers + servers
    through = ranks(folder / "all", function, processes, strategies, [], 0, 7).found()[:workers]
    begun = ranks(folder / "one", function, processes, strategies, [], 0, 4).found()[0]
    saved = [state for state, _ in begun]
    again = ranks(folder / "two", function, processes, strategies, saved, 4, 7).found()[:workers]
    for rank in range(workers):
        for text, (_, wanted), (_, found) in zip(strategies, through[rank], again[rank], strict=True):
            assert equal(wanted, found), text
    more = ranks(folder / "three", function, processes + 1, strategies, saved, 4, 7).found()[: workers + 1]
    for text, *found in zip(strategies, *more, strict=True):
        assert all(state["steps"] == 7 and state["world_size"] == workers + 1 for state, _ in found)
        for _, weights in found if "codec" not in text and "local" not in text else ():
            near(weights, through[0][strategies.index(text)][1], text)


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(".")
    place = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    folder = Path(sys.argv[5])
    function = getattr(importlib.import_module(module), name)
    found = function(place, *pickle.loads((folder / "arguments").read_bytes()))
    (folder / f"{place[0]}.pickle").write_bytes(pickle.dumps(found))
