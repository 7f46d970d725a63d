"""Every example runs as its head says and ends well; ``spawn.py`` does so among the tests of launchers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_bodies as bodies

from pool import Pool

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """One that has loaded what the examples take their data from, which takes a second."""
    found = Pool(Path(__file__).parent, "rank_bodies", "sklearn.datasets")
    yield found
    found.close()


@pytest.mark.slow
def test_training_script() -> None:
    """By the launcher, with all of torch; without a strategy it runs in the tests of launchers, under torchrun."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    environment.pop("SYNCLINE_STRATEGY", None)
    options = ["-n", "2", "--strategy", "ps(servers=1, on=workers) transport=tcp"]
    done = subprocess.run(
        [sys.executable, "-m", "syncline", "run", *options, str(EXAMPLES / "train.py")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    strategy, _, right = done.stdout.strip().partition(": ")
    assert strategy.startswith("ps(servers=1, on=workers)")
    assert float(right.partition("%")[0]) > 80


def printed(pool: Pool, address: str, processes: int, script: str, *arguments: str) -> str:
    """What rank 0 prints of a script that all run, as processes of a launcher."""
    case = [[[index, processes, address], str(EXAMPLES / script), *arguments] for index in range(processes)]
    with pool.start(bodies.runs_script, case) as group:
        group.results(LIMIT_S)
        assert not any("Traceback" in rank.printed() for rank in group.ranks)
        return group.ranks[0].printed()


def test_own_strategy(pool: Pool, address: str) -> None:
    found = printed(pool, address, 2, "own_strategy.py")
    assert "trained with ring schedule=even(count=3) transport=shm, 2 workers" in found
    assert "the nearest that works is 'ps(servers=1)'" in found


def test_own_algorithm(pool: Pool, address: str) -> None:
    found = printed(pool, address, 1, "own_algorithm.py")
    assert "the contributions of ranks 0-2 missing" in found
    assert float(found.split()[-1]) < 1e-12


def test_own_codec(pool: Pool, address: str) -> None:
    strategy, _, right = printed(pool, address, 2, "own_codec.py").strip().partition(": ")
    assert "codec=feedback(upper)" in strategy
    assert float(right.partition("%")[0]) > 80


def test_checkpoint(pool: Pool, address: str, tmp_path: Path) -> None:
    """A run that is resumed ends with the weights of one that was not interrupted."""
    whole = printed(pool, address, 2, "checkpoint.py", str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {f"epoch-{number}.pt" for number in range(4)}
    for number in (2, 3):
        (tmp_path / f"epoch-{number}.pt").unlink()
    resumed = printed(pool, address, 2, "checkpoint.py", str(tmp_path))
    assert whole.startswith("from epoch 0 to 4: ")
    assert resumed.startswith("from epoch 2 to 4: ")
    assert whole.partition(": ")[2] == resumed.partition(": ")[2]


def test_asynchronous(pool: Pool, address: str) -> None:
    """Which worker trains on which image is a matter of time; each is trained on once in every epoch."""
    found = printed(pool, address, 2, "asynchronous.py").strip()
    assert "all together 17280: " in found
    assert float(found.rpartition(": ")[2].partition("%")[0]) > 80


def test_large_batch(pool: Pool, address: str) -> None:
    batch, _, right = printed(pool, address, 2, "large_batch.py").strip().partition(": ")
    assert batch == "batches of 120"
    assert float(right.partition("%")[0]) > 80


@pytest.mark.parametrize(
    ("script", "what"),
    [("pipeline_by_data.py", "2 stages x 2 replicas"), ("tensor_by_data.py", "2 halves x 2 replicas")],
)
def test_data_parallelism_beside_another_one(pool: Pool, address: str, script: str, what: str) -> None:
    """The weights are those of one process."""
    strategy, largest = printed(pool, address, 4, script).strip().splitlines()
    assert strategy.endswith(f": {what}")
    assert float(largest.removeprefix("largest difference from one process: ")) < 1e-9


@pytest.mark.parametrize(
    ("options", "strategy"),
    [(["-n", "2"], "ring codec=topk(ratio=0.1)"), (["-n", "2", "--servers", "1"], "ps(servers=1) codec=int8")],
)
def test_numpy_loop_without_torch(tmp_path: Path, options: list[str], strategy: str) -> None:
    """Where a framework that is not there would be imported, the script ends with that error."""
    for name in ("torch", "numba", "jax", "tensorflow"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    script = [str(EXAMPLES / "numpy_loop.py"), strategy]
    done = subprocess.run(
        [sys.executable, "-m", "syncline", "run", *options, *script],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran, _, loss = done.stdout.strip().partition(": loss ")
    assert "codec=feedback" in ran
    assert float(loss) < 0.4


def test_no_example_is_forgotten() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "train.py",
        "own_strategy.py",
        "own_algorithm.py",
        "own_codec.py",
        "checkpoint.py",
        "numpy_loop.py",
        "spawn.py",
        "asynchronous.py",
        "caffe_way.py",
        "large_batch.py",
        "pipeline_by_data.py",
        "tensor_by_data.py",
        "jax_digits.py",  # among the tests of trainers
        "tensorflow_digits.py",
    }
