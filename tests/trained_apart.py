"""Comparisons in real processes whose modules are seen: what tests of frameworks share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from syncline_bench.frameworks import framework_of

TEST_IMAGES = 360
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "optax"}
OWN = {"torch": {"torch"}, "tensorflow": {"tensorflow", "keras", "jax"}, "jax": {"jax", "optax"}, "numpy": set()}
"""TensorFlow by itself imports JAX where that is installed."""

SEEN = """
import atexit, os, sys
from pathlib import Path

def tell():
    names = sorted({name.partition(".")[0] for name in sys.modules})
    Path(FOLDER, str(os.getpid())).write_text(" ".join(names))

atexit.register(tell)
from syncline_bench.train import main
main(*sys.argv[1:])
"""


STARTER = """
import io, json, sys
from pathlib import Path
from rich.console import Console
from syncline_bench import compare, processes

script, workers, strategies, paths, options = json.loads(sys.argv[1])
paths = {name: Path(path) for name, path in paths.items()}
def measured(*arguments, **named):
    return processes.measure(*arguments, script=("-c", script), **named)

compare.measure = measured
console = Console(file=io.StringIO(), force_terminal=False, width=120)
status = compare.run("digits", workers, strategies, timeout=200, console=console, **paths, **options)
print(json.dumps([status, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


class Comparison(NamedTuple):
    """A result file, the top-level modules of every process that a row started and of who started them, and a page."""

    data: dict[str, Any]
    modules: list[set[str]]
    starter: set[str]
    page: str


def compared(
    folder: Path, frameworks: Sequence[str], strategies: Sequence[str], workers: int, **options: Any
) -> Comparison:
    """Compare in a process that has imported nothing before."""
    for _ in range(2):
        seen = Path(tempfile.mkdtemp(dir=folder))
        script = SEEN.replace("FOLDER", repr(str(seen)))
        paths = {"json_path": str(folder / "r.json"), "report_path": str(folder / "r.html")}
        asked = json.dumps([script, workers, strategies, paths, {"framework": list(frameworks), **options}])
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [sys.executable, "-c", STARTER, asked], check=True, timeout=600, env=environ, stdout=subprocess.PIPE
        )
        status, names = json.loads(done.stdout.splitlines()[-1])
        data = json.loads(Path(paths["json_path"]).read_text())
        if {row["strategy"] for row in data["rows"] if row["error"]} != {"ddp"}:  # torch may end Gloo's group for ever
            break
    assert [row["error"] for row in data["rows"]] == [None] * len(data["rows"])
    assert status == 0
    return Comparison(data, modules_of(seen), set(names), Path(paths["report_path"]).read_text())


def modules_of(folder: Path) -> list[set[str]]:
    """What each process has told."""
    return [set(path.read_text().split()) for path in folder.iterdir()]


def foreign(modules: Sequence[set[str]], framework: str) -> set[str]:
    """What of other frameworks has been imported."""
    return set().union(*modules) & (FRAMEWORKS - OWN[framework])


def check_rows(data: dict[str, Any], framework: str, version: str) -> None:
    """Replicas are equal bit for bit, and within one test image of the single worker."""
    single = data["rows"][0]
    assert single["accuracy"] > 0.97
    for row in data["rows"]:
        assert (row["framework"], row["framework_version"]) == (framework, version)
        assert row["replicas_equal"] is True
        assert row["replica_sha256"] is not None
        assert abs(row["accuracy"] - single["accuracy"]) * TEST_IMAGES <= 1 + 1e-9


STEPS = """
import sys
import numpy as np
from syncline_bench.batches import batches
from syncline_bench.frameworks import frameworks_of
from syncline_bench.messages import Job
from syncline_bench.sides import Alone
from syncline_bench.workloads import load

name, path = sys.argv[1:]
workload, (entry,) = load("digits"), frameworks_of([name])
job = Job("digits", "single", 64, 6, 3, framework=name)
entry.target.loaded()
made = entry.target(workload, job, 0)
made.prepare(Alone(), 1)
for batch in batches(workload, 0, 1, job, made.taken):
    made.forward(batch)
    made.backward()
    made.update(batch.position)
made.pause()
np.savez(path, *made.evaluate(), **{name: np.asarray(one) for name, one in made.copied().items()})
"""


def steps_of(folder: Path, framework: str) -> dict[str, Any]:
    """Weights, accuracy and loss after six steps by a framework, in a process of its own."""
    path = folder / f"{framework}.npz"
    environ = dict(framework_of(framework).capabilities["environ"])
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", STEPS, framework, str(path)]
    subprocess.run(command, check=True, timeout=200, env=os.environ | environ)
    return dict(np.load(path))


def same_steps(folder: Path, framework: str) -> None:
    """Weights agree with NumPy's to 1e-5 after six steps, and so do their scores."""
    found, wanted = steps_of(folder, framework), steps_of(folder, "numpy")
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-5 if "." in name else 1e-4, err_msg=name)
