"""JAX: workers train as one does on the union of their batches, inside of ``jit``, whatever the strategy."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from array_ranks import check_near, equal, leaves, ranks, resume, train_as_one

for package in ("jax", "optax"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-all installs it", allow_module_level=True)

WORKERS, STEPS = 2, 5
REDUCED = ["ring", "direct schedule=wait_free", "tree schedule=fifo", "ring schedule=fixed(bucket=64B)"]
REDUCED += ["ring schedule=priority(slice=64B)", "ring schedule=split(slice=64B)"]
SERVED = ["ps(servers=1)", "ps(servers=1, update=worker)", "ps(servers=1) schedule=wait_free"]
SHARED = ["ps(servers=2, on=workers, update=worker)", "ps(servers=2, on=workers)"]
SHARED += ["ps(servers=1, on=workers) schedule=wait_free transport=tcp"]


def cases(strategies: list[str]) -> list[tuple[str, str]]:
    """Every strategy with Adam, the first one with the other optimizers too."""
    return [(text, "adam") for text in strategies] + [(strategies[0], name) for name in ("sgd", "momentum", "adamw")]


@pytest.mark.parametrize(("strategies", "servers"), [(REDUCED + SHARED, 0), (SERVED, 1)])
def test_workers_train_as_one_on_the_union_of_their_batches(
    tmp_path: Path, strategies: list[str], servers: int
) -> None:
    """In float64; all have the same weights bit for bit."""
    train_as_one(tmp_path, "jax_bodies.train", WORKERS, servers, cases(strategies), STEPS)


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


@pytest.mark.parametrize(
    ("strategies", "servers"),
    [
        (["ring codec=int8", "ring codec=topk(ratio=0.3)", "ring sync=local(steps=3)"], 0),
        (["ps(servers=1)", "ps(servers=1) codec=int8"], 1),
        (["ps(servers=2, on=workers)", "ps(servers=1, on=workers) codec=int8"], 0),
    ],
)
def test_a_run_that_is_resumed_goes_on_with_the_same_bits(tmp_path: Path, strategies: list[str], servers: int) -> None:
    """Also what codecs keep back, in the middle of a period; and it resumes under another number of workers."""
    resume(tmp_path, "jax_bodies.resumed", WORKERS, strategies, servers)


@pytest.mark.parametrize(("strategy", "servers"), [("ring", 0), ("ps(servers=1)", 1), ("ps(servers=1, on=workers)", 0)])
def test_a_checkpoint_of_one_worker_resumes_under_two(tmp_path: Path, strategy: str, servers: int) -> None:
    name = "jax_bodies.resumed"
    (saved, _) = ranks(tmp_path / "one", name, 1 + servers, [strategy], [], 0, 4).found()[0][0]
    (_, wanted) = ranks(tmp_path / "all", name, 1, ["ring"], [], 0, 7).found()[0][0]
    for ((_, found),) in ranks(tmp_path / "two", name, 2 + servers, [strategy], [saved], 4, 7).found()[:2]:
        check_near(found, wanted, strategy)


def test_workers_that_train_by_themselves_meet(tmp_path: Path) -> None:
    """After whole periods all have the same, but for the last bit; in the end, bit for bit."""
    strategies = ["ring sync=local(steps=2)", "ring sync=post_local(after=2, steps=2)", "ring sync=diloco(steps=2)"]
    strategies += ["ring sync=easgd(steps=2)", "ring sync=local(steps=3) codec=int8", "ring sync=gossip(steps=2)"]
    one, other = ranks(tmp_path, "jax_bodies.periodic", WORKERS, strategies, 4).found()
    for text, mine, theirs in zip(strategies, one, other, strict=True):
        assert equal(mine[1], theirs[1]), text
        near = all(np.allclose(a, b, rtol=1e-12) for a, b in zip(leaves(mine[0]), leaves(theirs[0]), strict=True))
        assert near == ("steps=2" in text and "easgd" not in text), text


@pytest.mark.parametrize(("owners", "servers"), [("servers=1", 1), ("servers=2, on=workers", 0)])
def test_pushes_are_updates_by_themselves(tmp_path: Path, owners: str, servers: int) -> None:
    """With a share of the learning rate, or all of it: nothing that was pushed is lost."""
    strategies = [f"ps({owners}) sync={text}" for text in ("asp", "ssp(staleness=2)", "asp(rate=own)")]
    for found in ranks(tmp_path, "jax_bodies.by_themselves", WORKERS + servers, strategies, 4).found()[:WORKERS]:
        for text, params in zip(strategies, found, strict=True):
            np.testing.assert_allclose(params["w"], 1 - 0.25 * 4 * (2 if "own" in text else 1), err_msg=text)


def test_a_model_of_jax_can_be_prepared(tmp_path: Path) -> None:
    for found in ranks(tmp_path, "jax_bodies.prepared", WORKERS).found():
        assert all(np.allclose(leaf, -0.05) for leaf in leaves(found["layer"]))


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


def test_steps_may_be_made_in_a_loop_of_known_length(tmp_path: Path) -> None:
    strategies = ["ring", "ps(servers=1, on=workers)", "ring sync=local(steps=2)"]
    for found in ranks(tmp_path, "jax_bodies.scanned", WORKERS, strategies).found():
        for strategy, (looped, single) in zip(strategies, found, strict=True):
            check_near(looped, single, strategy)


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1, on=workers)"])
def test_parameters_may_be_in_boxes_where_gradients_are_not(tmp_path: Path, strategy: str) -> None:
    for params, wanted in ranks(tmp_path, "jax_bodies.boxed", WORKERS, strategy).found():
        check_near(params, wanted, strategy)
