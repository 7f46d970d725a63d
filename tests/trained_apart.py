"""Comparisons in real processes whose modules are seen: what tests of frameworks share."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from syncline.bench import compare, processes
from syncline.bench.frameworks import framework_of

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
from syncline.bench.train import main
main(sys.argv[1])
"""


def compared(
    folder: Path, frameworks: Sequence[str], strategies: Sequence[str], workers: int, **options: Any
) -> tuple[dict[str, Any], list[set[str]], str]:
    """The result file, the top-level modules of every process that a row started, and the page."""
    seen = folder / "seen"
    seen.mkdir()
    script = ("-c", SEEN.replace("FOLDER", repr(str(seen))))
    console = Console(file=io.StringIO(), force_terminal=False, width=120)

    def measured(*arguments: Any, **named: Any) -> Any:
        return processes.measure(*arguments, script=script, **named)

    paths = {"json_path": folder / "r.json", "report_path": folder / "r.html"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "measure", measured)
        options = {"timeout": 200, "console": console, **paths, "framework": list(frameworks), **options}
        status = compare.run("digits", workers, strategies, **options)
        data = json.loads(paths["json_path"].read_text())
        if {row["strategy"] for row in data["rows"] if row["error"]} == {"ddp"}:  # torch may end Gloo's group for ever
            for each in seen.iterdir():
                each.unlink()
            status = compare.run("digits", workers, strategies, **options)
            data = json.loads(paths["json_path"].read_text())
    assert [row["error"] for row in data["rows"]] == [None] * len(data["rows"])
    assert status == 0
    return data, modules_of(seen), paths["report_path"].read_text()


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


PARENT = """
import sys
from syncline.bench import compare
if compare.run("digits", 2, ["ring"], iterations=2, framework=sys.argv[1], timeout=200, report_path=sys.argv[2]):
    raise SystemExit("the comparison has failed")
print("modules:", *{name.partition(".")[0] for name in sys.modules})
"""


def frameworks_of_parent(folder: Path, framework: str) -> set[str]:
    """What frameworks the process has imported that has started a comparison, with a page."""
    command = [sys.executable, "-c", PARENT, framework, str(folder / "p.html")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, check=True, timeout=300, env=environ, stdout=subprocess.PIPE, text=True)
    return set(done.stdout.rpartition("modules:")[2].split()) & FRAMEWORKS


STEPS = """
import sys
import numpy as np
from syncline.bench.batches import batches
from syncline.bench.frameworks import frameworks_of
from syncline.bench.messages import Job
from syncline.bench.sides import Alone
from syncline.workloads import load

name, path = sys.argv[1:]
workload, (entry,) = load("digits"), frameworks_of([name])
job = Job("digits", "single", 64, 6, 3, (), framework=name)
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
