"""TensorFlow: workers train as one does on the union of their batches, by ``fit`` and in loops."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from array_ranks import ranks

for package in ("tensorflow", "keras"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-all installs it", allow_module_level=True)

WORKERS, STEPS = 2, 5
WAYS = ["fit", "loop", "eager", "several"]
REDUCED = ["ring", "direct schedule=wait_free", "tree schedule=fifo", "ring schedule=fixed(bucket=64B)"]
SHARED = ["ps(servers=2, on=workers, update=worker)"]


def cases(strategies: list[str]) -> list[tuple[str, str, str]]:
    """Every strategy with Adam, the first one with the other optimizers, and in all ways of training."""
    found = [(text, "adam", "fit") for text in strategies]
    found += [(strategies[0], name, "loop") for name in ("sgd", "momentum", "adamw")]
    return found + [(strategies[-1], "adam", way) for way in WAYS]


@pytest.mark.parametrize(("strategies", "servers"), [(REDUCED + SHARED, 0)])
def test_workers_train_as_one_on_the_union_of_their_batches(
    tmp_path: Path, strategies: list[str], servers: int
) -> None:
    """In float64; all have the same weights bit for bit."""
    each = cases(strategies)
    first, *others = ranks(tmp_path, "tensorflow_bodies.train", WORKERS + servers, each, STEPS).found()[:WORKERS]
    for case, (weights, steps, wanted) in zip(each, first, strict=True):
        for one, other in zip(weights, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12, err_msg=" ".join(case))
        assert steps == STEPS
    for other in others:
        for one, mine in zip(other, first, strict=True):
            assert all(map(np.array_equal, one[0], mine[0]))
