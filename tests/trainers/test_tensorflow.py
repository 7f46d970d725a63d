"""TensorFlow: workers train as one does on the union of their batches, by ``fit`` and in loops."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_ranks import check_near, equal, ranks, resume, train_as_one

for package in ("tensorflow", "keras"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-all installs it", allow_module_level=True)

WORKERS, STEPS = 2, 5
WAYS = ["fit", "loop", "eager", "several"]
REDUCED = ["ring", "direct schedule=wait_free", "tree schedule=fifo", "ring schedule=fixed(bucket=64B)"]
REDUCED += ["ring schedule=priority(slice=64B)", "ring schedule=split(slice=64B)"]
SHARED = ["ps(servers=2, on=workers, update=worker)", "ps(servers=2, on=workers)", "ps(servers=1, on=workers)"]
SERVED = ["ps(servers=1)", "ps(servers=1, update=worker)", "ps(servers=1) schedule=wait_free"]


def cases(strategies: list[str]) -> list[tuple[str, str, str]]:
    """Every strategy with Adam, the first one with the other optimizers, and in all ways of training."""
    found = [(text, "adam", "fit") for text in strategies]
    found += [(strategies[0], name, "loop") for name in ("sgd", "momentum", "adamw")]
    return found + [(strategies[-1], "adam", way) for way in WAYS]


@pytest.mark.parametrize(("strategies", "servers"), [(REDUCED + SHARED, 0), (SERVED, 1)])
def test_workers_train_as_one_on_the_union_of_their_batches(
    tmp_path: Path, strategies: list[str], servers: int
) -> None:
    """In float64; all have the same weights bit for bit."""
    train_as_one(tmp_path, "tensorflow_bodies.train", WORKERS, servers, cases(strategies), STEPS)


def test_means_in_eager_mode_stay_as_they_were(tmp_path: Path) -> None:
    for found in ranks(tmp_path, "tensorflow_bodies.eager_means", WORKERS, STEPS).found():
        for step, means in enumerate(found):
            assert [one.size for one in means] == [3, 4096]
            assert all((one == 10.0 * step + (WORKERS - 1) / 2).all() for one in means)


def test_means_go_to_an_optimizer_of_the_script(tmp_path: Path) -> None:
    """That couples them: it sees what one worker would."""
    one, other = ranks(tmp_path, "tensorflow_bodies.averaged", WORKERS, STEPS).found()
    for tape, call, alone in (one, other):
        check_near(tape, alone, "tape")
        check_near(call, alone, "call")
    assert equal(one[0], other[0])


@pytest.mark.parametrize(
    ("strategies", "servers"),
    [
        (["ring codec=int8", "ring codec=topk(ratio=0.3)", "ring sync=local(steps=3)"], 0),
        (["ps(servers=1)", "ps(servers=1) codec=int8"], 1),
    ],
)
def test_a_run_that_is_resumed_goes_on_with_the_same_bits(tmp_path: Path, strategies: list[str], servers: int) -> None:
    """Also what codecs keep back, in the middle of a period; and it resumes under another number of workers."""
    resume(tmp_path, "tensorflow_bodies.resumed", WORKERS, strategies, servers)


@pytest.mark.parametrize(("strategy", "servers"), [("ring", 0), ("ps(servers=1)", 1), ("ps(servers=1, on=workers)", 0)])
def test_checkpoints_go_from_two_workers_to_three_and_to_one(tmp_path: Path, strategy: str, servers: int) -> None:
    """And from one to two, with Adam's moments and count."""
    name = "tensorflow_bodies.resumed"
    ((_, wanted),) = ranks(tmp_path / "all", name, 1, ["ring"], [], 0, 8).found()[0]
    state: list[Any] = []
    for first, workers in enumerate((2, 3, 1, 2)):
        found = ranks(tmp_path / str(first), name, workers + servers, [strategy], state, 2 * first, 2 * first + 2)
        state = [found.found()[0][0][0]]
    check_near(found.found()[0][0][1], wanted, strategy)


def test_workers_that_train_by_themselves_meet(tmp_path: Path) -> None:
    """After whole periods all have the same; in the end, bit for bit."""
    strategies = ["ring sync=local(steps=2)", "ring sync=post_local(after=2, steps=2)", "ring sync=diloco(steps=2)"]
    strategies += ["ring sync=easgd(steps=2)", "ring sync=local(steps=3) codec=int8", "ring sync=gossip(steps=2)"]
    one, other = ranks(tmp_path, "tensorflow_bodies.periodic", WORKERS, strategies, 4).found()
    for text, mine, theirs in zip(strategies, one, other, strict=True):
        assert equal(mine[2], theirs[2]), text
        assert equal(mine[0], mine[1]) or "codec" in text, text
        assert equal(mine[0], theirs[0]) == ("steps=2" in text and "easgd" not in text), text


@pytest.mark.parametrize(("owners", "servers"), [("servers=1", 1), ("servers=2, on=workers", 0)])
def test_pushes_are_updates_by_themselves(tmp_path: Path, owners: str, servers: int) -> None:
    """With a share of the learning rate, or all of it: nothing that was pushed is lost."""
    strategies = [f"ps({owners}) sync={text}" for text in ("asp", "ssp(staleness=2)", "asp(rate=own)")]
    for found in ranks(tmp_path, "tensorflow_bodies.by_themselves", WORKERS + servers, strategies, 4).found()[:WORKERS]:
        for text, weights in zip(strategies, found, strict=True):
            np.testing.assert_allclose(weights, 1 - 0.25 * 4 * (2 if "own" in text else 1), err_msg=text)
