"""Caffe's two ways, by layers written in NumPy: their gradients, their sameness, and that no framework is loaded."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "caffe_way.py"
LIMIT_S = 180.0
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "jaxlib", "mxnet", "cupy"}
WATCHING = f"""
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
import syncline
if syncline.rank() == 0:
    print("loaded:", *sorted({{name.partition(".")[0] for name in sys.modules}} & {FRAMEWORKS!r}))
"""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("caffe_way", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gradients_of_its_layers_are_those_of_the_loss(example: Any) -> None:
    weights = example.start()
    assert sum(array.size for array in weights.values()) == 145_578  # as Caffe's
    layers, (x, labels) = example.network(weights), example.images(5, 2)

    def loss() -> float:
        shares = example.softmax(example.forward(layers, x))
        return float(-np.log(shares[np.arange(2), labels]).mean())

    found: dict[str, Any] = {}
    back = (example.softmax(example.forward(layers, x)) - np.eye(10)[labels]) / 2
    for layer in reversed(layers):
        back = layer.backward(back, found.__setitem__)
    draw = np.random.default_rng(3)
    for name, array in weights.items():
        before, way = array.copy(), draw.normal(size=array.shape)
        array += 1e-8 * way  # so little that no unit comes to the other side of its kink
        above = loss()
        array[...] = before - 1e-8 * way
        np.testing.assert_allclose((above - loss()) / 2e-8, (found[name] * way).sum(), rtol=1e-5, atol=1e-6)
        array[...] = before


def run(folder: Path, name: str, *options: str) -> tuple[dict[str, Any], str]:
    """The weights after three iterations, and what was printed."""
    script = folder / "watching.py"
    script.write_text(WATCHING)
    launcher, arguments = options[: options.index("--")], options[options.index("--") + 1 :]
    saved = folder / f"{name}.npz"
    case = [str(script), str(EXAMPLE), "--iterations", "3", "--batch", "12", "--save", str(saved), *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "syncline", "run", *launcher, *case],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replicas equal" in done.stdout
    with np.load(saved) as file:
        return dict(file), done.stdout


@pytest.mark.slow
def test_both_ways_train_as_one_process_on_all_images_and_load_no_framework(tmp_path: Path) -> None:
    alone, _ = run(tmp_path, "alone", "-n", "1", "--")
    ring, of_ring = run(tmp_path, "ring", "-n", "2", "--", "--way", "ring")
    trace = tmp_path / "t.json"
    served, of_ps = run(tmp_path, "ps", "-n", "3", "--servers", "1", "--trace", str(trace), "--", "--way", "ps")
    for name, array in alone.items():
        np.testing.assert_allclose(ring[name], array, rtol=1e-9, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(served[name], array, rtol=1e-9, atol=1e-12, err_msg=name)
    assert of_ring.startswith("ring schedule=fifo")
    assert of_ps.startswith("ps(servers=1) schedule=wait_free")
    for printed in (of_ring, of_ps):
        assert printed.rstrip().endswith("loaded:")
    text = trace.read_text()
    assert all(f'"{kind}"' in text for kind in ("backward", "optimizer", "update"))
    assert all(name in text for name in alone)  # in the labels of buckets
