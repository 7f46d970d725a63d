"""Keras on TensorFlow in a comparison: the steps of NumPy, four workers as one, TensorFlow's own way beside."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest

from trained_apart import check_rows, compared, foreign, frameworks_of_parent, same_steps

for package in ("tensorflow", "keras", "sklearn", "jinja2", "matplotlib"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-all installs it", allow_module_level=True)


def test_keras_and_numpy_compute_the_same_steps(tmp_path: Path) -> None:
    same_steps(tmp_path, "tensorflow")


def test_four_workers_by_keras_learn_what_one_does_and_import_no_other_framework(tmp_path: Path) -> None:
    data, modules, page = compared(tmp_path, ["tensorflow"], ["ring", "ps(servers=1)"], 4)
    check_rows(
        data, "tensorflow", f"{data['rows'][0]['framework_version'].partition(',')[0]}, Keras {version('keras')}"
    )
    assert all(row["forward_s"] is row["backward_s"] is None and row["step_s"] > 0 for row in data["rows"])
    assert len(modules) == 1 + 4 + 5
    assert not foreign(modules, "tensorflow")
    assert f"Keras {version('keras')}" in page


def test_tensorflows_own_way_over_processes_trains_beside(tmp_path: Path) -> None:
    """On batches that cannot be shared out evenly."""
    data, modules, _ = compared(tmp_path, ["tensorflow"], ["ring", "multiworker"], 3, iterations=30)
    single, ring, own = data["rows"]
    assert ring["loss"] == pytest.approx(single["loss"], abs=1e-3)
    assert own["loss"] == pytest.approx(single["loss"], abs=1e-3)
    assert own["chosen"] == "MultiWorkerMirroredStrategy, ring over gRPC"
    assert own["exposed_comm_s"] is None
    assert not foreign(modules, "tensorflow")


def test_who_starts_a_comparison_imports_no_framework(tmp_path: Path) -> None:
    assert not frameworks_of_parent(tmp_path, "tensorflow")
