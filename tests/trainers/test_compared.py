"""Frameworks in a comparison: the steps of NumPy, four workers as one, a framework's own processes beside."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from trained_apart import FRAMEWORKS, check_rows, compared, foreign, same_steps


@dataclass(frozen=True)
class Compared:
    """A framework: what has to be installed, its own way over processes, and what rows and the page say of it.

    ``version`` takes what a row says: TensorFlow is a package of several names.
    """

    name: str
    packages: tuple[str, ...]
    peer: str
    chosen: str
    version: Callable[[str], str]
    says: Callable[[], str]

    @property
    def absent(self) -> list[str]:
        packages = (*self.packages, "sklearn", "jinja2", "matplotlib")
        return [package for package in packages if importlib.util.find_spec(package) is None]


JAX = Compared(
    "jax",
    ("jax", "optax"),
    "spmd",
    "spmd over gloo",
    lambda _: version("jax"),
    lambda: "step as one computation",
)
TENSORFLOW = Compared(
    "tensorflow",
    ("tensorflow", "keras"),
    "multiworker",
    "MultiWorkerMirroredStrategy, ring over gRPC",
    lambda said: f"{said.partition(',')[0]}, Keras {version('keras')}",
    lambda: f"Keras {version('keras')}",
)


@pytest.fixture(params=[JAX, TENSORFLOW], ids=lambda framework: framework.name)
def framework(request: pytest.FixtureRequest) -> Compared:
    found: Compared = request.param
    if found.absent:
        pytest.skip(f"{', '.join(found.absent)} is not installed: make test-all installs it")
    return found


def test_a_framework_and_numpy_compute_the_same_steps(tmp_path: Path, framework: Compared) -> None:
    same_steps(tmp_path, framework.name)


@pytest.mark.beyond(1)
def test_workers_learn_what_one_does_beside_a_frameworks_own_way(tmp_path: Path, framework: Compared) -> None:
    """On batches that cannot be shared out evenly; no worker imports another framework, and their starter none."""
    strategies = ["ps(servers=1)", framework.peer]
    data, modules, starter, page = compared(tmp_path, [framework.name], strategies, 3, epochs=5)
    *ours, own = data["rows"]
    check_rows(data | {"rows": ours}, framework.name, framework.version(own["framework_version"]))
    assert all(row["forward_s"] is row["backward_s"] is None and row["step_s"] > 0 for row in ours)
    assert own["loss"] == pytest.approx(ours[0]["loss"], abs=1e-3)
    assert own["chosen"] == framework.chosen
    assert own["exposed_comm_s"] is None
    assert len(modules) == 1 + 4 + 3
    assert not foreign(modules, framework.name)
    assert not starter & FRAMEWORKS
    assert framework.says() in page
    assert "step includes communication" in page
