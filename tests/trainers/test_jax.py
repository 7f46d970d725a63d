"""JAX: workers train as one does on the union of their batches, inside of ``jit``, whatever the strategy."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax_ranks import ranks

for package in ("jax", "optax"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-all installs it", allow_module_level=True)

WORKERS, STEPS = 2, 5
REDUCED = ["ring", "direct schedule=wait_free", "tree schedule=fifo", "ring schedule=fixed(bucket=64B)"]
SERVED = ["ps(servers=1)", "ps(servers=1, update=worker)", "ps(servers=1) schedule=wait_free"]
SHARED = ["ps(servers=2, on=workers)", "ps(servers=1, on=workers) schedule=wait_free"]


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    return [tree]


def check_near(found: Any, wanted: Any, what: str) -> None:
    for one, other in zip(leaves(found), leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12, err_msg=what)


def equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(leaves(one), leaves(other), strict=True))


@pytest.mark.parametrize(("strategies", "servers"), [(REDUCED + SHARED, 0), (SERVED, 1)])
def test_workers_train_as_one_on_the_union_of_their_batches(tmp_path: Path, strategies: list[str], servers: int) -> None:
    """In float64; all have the same weights bit for bit."""
    first, *others = ranks(tmp_path, "jax_bodies.train", WORKERS + servers, strategies, STEPS).found()[:WORKERS]
    assert len(first) == 4 * len(strategies)
    for strategy, optimizer, params, steps, wanted in first:
        check_near(params, wanted, f"{strategy} {optimizer}")
        assert steps == STEPS
    for other in others:
        assert all(equal(one[2], mine[2]) for one, mine in zip(other, first, strict=True))
