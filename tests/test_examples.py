"""Every example runs as its head says and ends well; ``spawn.py`` does so among the tests of launchers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
QUICKLY = str(Path(__file__).parent / "parallel" / "quick_torch.py")
"""Runs a script without torch's compiler, which takes two seconds of every process."""

LIMIT_S = 120.0


def output_of(*command: str) -> str:
    """What Python prints on standard output; a status other than 0 fails with all that it printed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    environment.pop("SYNCLINE_STRATEGY", None)
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def launched(script: str, *options: str, arguments: Sequence[str] = ()) -> str:
    return output_of("-m", "syncline", "run", "-n", "2", *options, QUICKLY, str(EXAMPLES / script), *arguments)


def test_training_script() -> None:
    """Without a strategy it runs in the tests of launchers, under torchrun."""
    strategy, _, right = launched("train.py", "--strategy", "ps(servers=1) transport=tcp").strip().partition(": ")
    assert strategy.startswith("ps(servers=1)")
    assert float(right.partition("%")[0]) > 80


def test_own_strategy() -> None:
    printed = launched("own_strategy.py")
    assert "trained with ring schedule=even(count=3) transport=shm, 2 workers" in printed
    assert "the nearest that works is 'ps(servers=1)'" in printed


def test_own_algorithm() -> None:
    printed = output_of(str(EXAMPLES / "own_algorithm.py"))
    assert "the contributions of ranks 0-2 missing" in printed
    assert float(printed.split()[-1]) < 1e-12


def test_own_codec() -> None:
    strategy, _, right = launched("own_codec.py").strip().partition(": ")
    assert "codec=feedback(upper)" in strategy
    assert float(right.partition("%")[0]) > 80


def test_checkpoint(tmp_path: Path) -> None:
    """A run that is resumed ends with the weights of one that was not interrupted."""
    whole = launched("checkpoint.py", arguments=[str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {f"epoch-{number}.pt" for number in range(4)}
    for number in (2, 3):
        (tmp_path / f"epoch-{number}.pt").unlink()
    resumed = launched("checkpoint.py", arguments=[str(tmp_path)])
    assert whole.startswith("from epoch 0 to 4: ")
    assert resumed.startswith("from epoch 2 to 4: ")
    assert whole.partition(": ")[2] == resumed.partition(": ")[2]


def test_no_example_is_forgotten() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "train.py",
        "own_strategy.py",
        "own_algorithm.py",
        "own_codec.py",
        "checkpoint.py",
        "spawn.py",
    }
