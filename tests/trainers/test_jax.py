"""JAX beyond the laws of all frameworks: transformations of optax, steps that nobody waits for, devices and loops."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from array_ranks import check_near, equal, leaves, ranks, train_as_one

for package in ("jax", "optax"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-all installs it", allow_module_level=True)

WORKERS, STEPS = 2, 5


def test_optimizers_of_optax_train_as_one_does_on_the_union_of_the_batches(tmp_path: Path) -> None:
    """Rates by schedules, momentum of Nesterov, decay of weights; all have the same weights bit for bit."""
    cases = [("ring schedule=fixed(bucket=64B)", name) for name in ("sgd", "momentum", "adamw")]
    train_as_one(tmp_path, "jax_bodies.train", WORKERS, 0, [*cases, ("ps(servers=2, on=workers)", "adamw")], STEPS)


def test_steps_that_no_rank_waits_for_are_made_before_the_end(tmp_path: Path) -> None:
    made = ranks(tmp_path, "jax_bodies.unwaited", WORKERS, STEPS)
    assert any(under_way for under_way, _, _ in made.found())
    for _, params, wanted in made.results:
        check_near(params, wanted, "after the end")
    assert made.printed == [f"steps {STEPS}\n"] * WORKERS


@pytest.mark.parametrize("where", ["first", "last", "all"])
def test_steps_whose_results_nobody_has_are_made_on_any_device(tmp_path: Path, where: str) -> None:
    made = ranks(tmp_path, "jax_bodies.unread", 2, [4, 4], where, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    made.found()
    assert made.printed == ["steps 4\n"] * 2


def test_the_mean_goes_to_an_optimizer_of_the_script_in_one_computation(tmp_path: Path) -> None:
    for params, wanted in ranks(tmp_path, "jax_bodies.chained", WORKERS, STEPS).found():
        check_near(params, wanted, "chained")


def test_a_model_of_jax_can_be_prepared(tmp_path: Path) -> None:
    for found in ranks(tmp_path, "jax_bodies.prepared", WORKERS).found():
        assert all(np.allclose(leaf, -0.05) for leaf in leaves(found["layer"]))


@pytest.mark.deep
def test_devices_of_a_host_share_a_worker(tmp_path: Path) -> None:
    strategies = ["ring", "ps(servers=1, on=workers, update=worker)", "ring sync=local(steps=5)"]
    strategies += ["ps(servers=2, on=workers)"]
    flags = "--xla_force_host_platform_device_count=2"
    one, other = ranks(tmp_path, "jax_bodies.sharded", WORKERS, strategies, STEPS, XLA_FLAGS=flags).found()
    ((wanted, _, _),) = ranks(tmp_path, "jax_bodies.train", 1, [("ring", "adam")], STEPS).found()[0]
    for text, mine, theirs in zip(strategies, one, other, strict=True):
        if "local" in text:
            check_near(mine, theirs, text)
        else:
            assert equal(mine, theirs), text
            check_near(mine, wanted, text)


@pytest.mark.deep
def test_steps_may_be_made_in_a_loop_of_known_length(tmp_path: Path) -> None:
    strategies = ["ring", "ps(servers=1, on=workers)", "ring sync=local(steps=2)"]
    for found in ranks(tmp_path, "jax_bodies.scanned", WORKERS, strategies).found():
        for strategy, (looped, single) in zip(strategies, found, strict=True):
            check_near(looped, single, strategy)


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1, on=workers)"])
def test_parameters_may_be_in_boxes_where_gradients_are_not(tmp_path: Path, strategy: str) -> None:
    for params, wanted in ranks(tmp_path, "jax_bodies.boxed", WORKERS, strategy).found():
        check_near(params, wanted, strategy)
