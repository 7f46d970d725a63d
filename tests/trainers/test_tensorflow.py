"""TensorFlow beyond the laws of all frameworks: ways of training by ``fit`` and in loops, and means of gradients."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from array_ranks import check_near, equal, ranks, train_as_one

for package in ("tensorflow", "keras"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-all installs it", allow_module_level=True)

WORKERS, STEPS = 2, 5
WAYS = ["fit", "loop", "eager", "several"]


def test_all_ways_of_training_train_as_one_does_on_the_union_of_the_batches(tmp_path: Path) -> None:
    """By ``fit`` and in loops, with rates by schedules, Nesterov's momentum and decay of weights; bit for bit."""
    cases = [("ring schedule=fixed(bucket=64B)", name, "loop") for name in ("sgd", "momentum", "adamw")]
    cases += [(text, "adam", way) for text in ("ring", "ps(servers=1, on=workers)") for way in WAYS]
    train_as_one(tmp_path, "tensorflow_bodies.train", WORKERS, 0, cases, STEPS)


def test_workers_that_train_by_themselves_do_so_in_all_ways(tmp_path: Path) -> None:
    strategies = ["ring sync=local(steps=2)", "ring sync=local(steps=3) codec=int8"]
    one, other = ranks(tmp_path, "tensorflow_bodies.periodic", WORKERS, strategies, 4).found()
    for text, mine, theirs in zip(strategies, one, other, strict=True):
        assert equal(mine[2], theirs[2]), text
        assert equal(mine[0], mine[1]) or "codec" in text, text


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
