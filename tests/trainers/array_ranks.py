"""Ranks of JAX or TensorFlow: each a process of its own, which calls a function of its test's, and leaves the result.

Imported by tests it starts them (``ranks``) and loads no framework; run as a program it is one.
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
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


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(".")
    place = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    folder = Path(sys.argv[5])
    function = getattr(importlib.import_module(module), name)
    found = function(place, *pickle.loads((folder / "arguments").read_bytes()))
    (folder / f"{place[0]}.pickle").write_bytes(pickle.dumps(found))
