"""Frameworks that train in a comparison: the same network from the same weights, and nothing of another framework."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from syncline import registry
from syncline.errors import UsageError
from syncline_bench import compare
from syncline_bench.cases import comparison_of
from syncline_bench.frameworks import numpy as by_hand
from syncline_bench.workloads import load
from trained_apart import FRAMEWORKS, check_rows, compared, foreign, same_steps

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="the digits are a file of scikit-learn")


@pytest.mark.slow
def test_pytorch_and_numpy_compute_the_same_steps(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    same_steps(tmp_path, "torch")


def test_gradients_by_hand_are_those_of_differences() -> None:
    """In float64, at a few elements of every tensor."""
    blueprint = load("digits(hidden=16)").blueprint
    assert blueprint is not None
    weights = {name: array.astype(np.float64) for name, array in blueprint.start(1).items()}
    draw = np.random.default_rng(5)
    images, back = draw.normal(size=(3, 8, 8, 1)), draw.normal(size=(3, 10))
    layers, found = by_hand.layers(blueprint, weights), {}
    by_hand.through(layers, images)
    flowing = back
    for layer in reversed(layers):
        flowing = layer.backward(flowing, found.__setitem__)
    assert list(found) == list(reversed(weights))

    def value() -> float:
        return float((by_hand.through(by_hand.layers(blueprint, weights), images) * back).sum())

    for name, array in weights.items():
        flat = array.reshape(-1)
        for place in draw.integers(flat.size, size=4):
            kept, ends = flat[place], []
            for step in (1e-6, -1e-6):
                flat[place] = kept + step
                ends.append(value())
            flat[place] = kept
            assert found[name].reshape(-1)[place] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4, abs=1e-6)


@pytest.mark.deep
def test_workers_learn_what_one_does_in_rows_of_several_frameworks_side_by_side(tmp_path: Path) -> None:
    """No process imports another framework than its own, and their starter none."""
    torch = pytest.importorskip("torch")
    data, modules, starter, page = compared(tmp_path, ["numpy", "torch"], ["ring", "ddp"], 2, epochs=5)
    assert [(row["framework"], row["strategy"], row["workers"]) for row in data["rows"]] == [
        ("numpy", "single", 1),
        ("numpy", "ring", 2),
        ("torch", "single", 1),
        ("torch", "ring", 2),
        ("torch", "ddp", 2),
    ]
    versions = {"numpy": np.__version__, "torch": torch.__version__}
    for framework, used in versions.items():
        rows = [row for row in data["rows"] if row["framework"] == framework]
        check_rows({"rows": rows}, framework, used)
        assert rows[0]["scaling_efficiency"] == 1.0
        assert all(row["step_s"] is None and row["forward_s"] > 0 for row in rows)
    losses = [row["loss"] for row in data["rows"]]
    assert losses == pytest.approx([losses[0]] * 5, abs=1e-3)
    for title in ("numpy single", "numpy ring", "torch ring", "torch ddp", "torch single", f"numpy {np.__version__}"):
        assert title in page
    of_torch = [names for names in modules if "torch" in names]
    of_numpy = [names for names in modules if "torch" not in names]
    assert (len(of_numpy), len(of_torch)) == (1 + 2, 1 + 2 + 2)
    assert not foreign(of_numpy, "numpy")
    assert not foreign(of_torch, "torch")
    assert not starter & FRAMEWORKS


@pytest.mark.slow
def test_all_that_compare_does_is_there_under_numpy_too(tmp_path: Path) -> None:
    """A timeline, a target and looks, pipelines and slow workers, workers at their own pace, wider networks."""
    path, timeline = tmp_path / "r.json", tmp_path / "t.json.gz"
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    workload = "digits(hidden=32, prefetch=1, slow_rank=1, slowdown=2.0)"
    status = compare.run(
        workload, 2, ["ps(servers=1) sync=asp", "ring sync=local(steps=3)"], iterations=8, json_path=path,
        timeout=120, console=console, target=0.05, evaluate_every=2, timeline_path=timeline, framework="numpy",
    )  # fmt: skip
    rows = json.loads(path.read_text())["rows"]
    assert [(row["error"], row["replicas_equal"]) for row in rows] == [(None, True)] * 3
    assert status == 0
    assert timeline.stat().st_size > 0
    for row in rows:
        assert row["time_to_accuracy_s"] is not None
        assert [point["iteration"] for point in row["curve"] if point["accuracy"] is not None][-1] == 8


REFUSED = [
    ({"framework": "jex"}, "unknown framework 'jex'; did you mean 'jax'"),
    ({"framework": []}, "--framework takes names that differ, got none"),
    ({"framework": ["numpy", "numpy"]}, "--framework takes names that differ, got numpy, numpy"),
    (
        {"framework": "numpy", "strategies": ["ddp"]},
        "ddp is a peer under torch, not under numpy: use --framework torch, or leave it out",
    ),
    (
        {"framework": "numpy", "workload": "synthetic:alexnet"},
        "cannot train synthetic:alexnet: its model is written for PyTorch only; use --framework torch",
    ),
    (
        {"framework": "numpy", "workload": "digits(channels_last=on)"},
        "device=, channels_last= and autotune= are PyTorch's; use --framework torch",
    ),
    (
        {"framework": "numpy", "strategies": ["ring schedule=merged"]},
        "--framework numpy cannot train under ring schedule=merged: .* --framework torch can",
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_a_framework_cannot_take_is_refused_before_anything_starts(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(").replace(")", r"\)")):
        refused(changes)


def refused(changes: Mapping[str, Any]) -> None:
    values: dict[str, Any] = {"workload": "digits", "workers": 2, "strategies": ["ring"], **changes}
    text, workers, strategies = (values.pop(name) for name in ("workload", "workers", "strategies"))
    comparison_of(text, workers, strategies, None, 1, None, 0, None, None, **values)


def test_what_has_to_be_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline_bench import frameworks

    monkeypatch.setattr(frameworks, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"--framework jax needs jax and optax: pip install 'syncline\[jax\]'"):
        refused({"framework": "jax"})


def test_a_peer_has_rows_under_its_own_framework_only() -> None:
    cases = comparison_of(
        "digits", 2, ["ring", "ddp"], None, 1, None, 0, None, None, framework=["torch", "numpy"]
    ).cases
    assert [(case.framework, case.strategy) for case in cases] == [
        *(("torch", name) for name in ("single", "ring", "ddp")),
        *(("numpy", name) for name in ("single", "ring")),
    ]


def test_every_framework_says_what_it_needs_and_every_peer_where_it_trains() -> None:
    names = registry.names("frameworks")
    for entry in registry.entries("frameworks"):
        assert {"needs", "install", "environ"} <= entry.capabilities.keys()
    for peer in registry.entries("peers"):
        assert peer.capabilities.get("framework") in names or not peer.capabilities.get("trains")
