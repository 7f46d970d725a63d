"""What a comparison will do, checked as a whole before any process starts.

Owns the ``Plan`` of a comparison and every refusal of bad input: numbers, strategies, workload, paths, packages that a
report needs. Starts nothing and writes nothing but the folders that the result files go to.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import UsageError
from ..report.rows import BASELINE
from ..strategy import Strategy
from ..types import Group
from ..workloads import Workload, load


@dataclass(frozen=True)
class Case:
    """One row to measure: a strategy on so many workers and servers, ``batch`` being the global one."""

    strategy: str
    workers: int
    servers: int
    batch: int
    iterations: int


@dataclass(frozen=True)
class Plan:
    """Everything a comparison will do, checked."""

    workload: str
    cases: tuple[Case, ...]
    seed: int
    epochs: int | None
    iterations: int | None
    json_path: Path | None
    report_path: Path | None


def plan_of(
    workload: str,
    workers: int,
    strategies: Sequence[str],
    epochs: int | None,
    iterations: int | None,
    batch: int | None,
    seed: int,
    json_path: str | Path | None,
    report_path: str | Path | None,
) -> Plan:
    """Check the whole comparison and say what it will do; raises UsageError or another error with the remedy."""
    if workers < 1:
        raise UsageError(f"--workers has to be 1 or more, got {workers}")
    if epochs is not None and iterations is not None:
        raise UsageError("--epochs and --iterations both set the length of training: give one of them")
    for name, value in (("--epochs", epochs), ("--iterations", iterations), ("--batch", batch)):
        if value is not None and value < 1:
            raise UsageError(f"{name} has to be 1 or more, got {value}")
    if seed < 0:
        raise UsageError(f"--seed has to be 0 or more, got {seed}")
    paths = _paths(json_path, report_path)
    servers = _contenders(strategies, workers)
    loaded = load(workload)
    if iterations is None and epochs is None:
        epochs = loaded.epochs
    cases = [_case(loaded, BASELINE, 1, 0, batch, epochs, iterations)]
    cases += [_case(loaded, text, workers, count, batch, epochs, iterations) for text, count in servers.items()]
    return Plan(workload, tuple(cases), seed, epochs, iterations, *paths)


def _contenders(strategies: Sequence[str], workers: int) -> dict[str, int]:
    """The canonical text of every strategy with its number of server processes, each built once for this group."""
    found: dict[str, int] = {}
    for text in strategies:
        if text.strip() == BASELINE:
            continue
        strategy = Strategy.parse(text)
        # Some combinations are impossible only for a certain number of workers.
        group = Group(workers, strategy.servers)
        strategy.resolve(group, one_host=True)
        if str(strategy) in found:
            raise UsageError(f"the strategy {strategy} is listed twice: leave one of them out")
        found[str(strategy)] = strategy.servers
    return found


def _case(
    workload: Workload,
    strategy: str,
    workers: int,
    servers: int,
    batch: int | None,
    epochs: int | None,
    iterations: int | None,
) -> Case:
    total = workload.total_batch(workers, batch)
    # Also refuses a batch that is too small to share.
    steps = workload.steps_per_epoch(total, workers)
    if iterations is None:
        iterations = steps * (workload.epochs if epochs is None else epochs)
    if steps < 1:
        raise UsageError(f"the workload {workload.name} is smaller than one batch of {total}: use a smaller --batch")
    return Case(strategy, workers, servers, total, iterations)


def _paths(json_path: str | Path | None, report_path: str | Path | None) -> tuple[Path | None, Path | None]:
    if report_path is not None:
        missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
        if missing:
            raise UsageError(f"--report needs {' and '.join(missing)}: pip install 'syncline[report]'")
    json_file, report_file = (None if path is None else Path(path).resolve() for path in (json_path, report_path))
    if json_file is not None and json_file == report_file:
        raise UsageError(f"--json and --report name the same file {json_file}: choose two")
    for path in (json_file, report_file):
        if path is not None:
            _check_writable(path)
    return json_file, report_file


def _check_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {path.parent}: {error.strerror}; choose another path") from None
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file in it")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write into {path.parent}: choose another path")
