"""The cells of the matrix of frameworks and strategies: which runs a law looks at, and what comes of them.

NumPy and PyTorch train on threads of this process. JAX and TensorFlow train in processes, which take long to begin:
when the first result is wanted, all runs that any law looks at are made in one start per number of processes.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from matrix import Result, Run, trained

import array_ranks
from threads import run_group

WORKERS = {"numpy": 3, "torch": 3, "staged": 3, "jax": 2, "tensorflow": 2}
_asked: dict[str, list[Run]] = {"jax": [], "tensorflow": []}
"""The runs of frameworks that train in processes of their own."""


@dataclass(frozen=True)
class Cell:
    """Some runs of a framework, and the case that they are made for."""

    framework: str
    case: tuple[Any, ...]
    runs: Sequence[Run]

    def results(self) -> list[list[Result]]:
        """Of every run, of every worker."""
        return [results_of(self.framework, run) for run in self.runs]


def over(make: Callable[..., Sequence[Run]], **cases: Iterable[Any]) -> pytest.MarkDecorator:
    """A law's cases, by framework. ``make`` gives the runs for a number of workers and a case's values."""
    cells = []
    for framework, of in cases.items():
        for case in of:
            values = case if isinstance(case, tuple) else (case,)
            cell = Cell(framework, values, tuple(make(WORKERS[framework], *values)))
            marks = []
            if framework in _asked:
                _asked[framework] += cell.runs
                absent = importlib.util.find_spec(framework) is None
                marks = [pytest.mark.slow, pytest.mark.skipif(absent, reason="make test-all installs it")]
            cells.append(pytest.param(cell, id="-".join(map(str, (framework, *values))), marks=marks))
    return pytest.mark.parametrize("cell", cells)


def states_of(results: Sequence[Result]) -> list[Any]:
    return [one.saved[1] for one in results if one.saved is not None]


@cache
def results_of(framework: str, run: Run) -> list[Result]:
    """What every worker has."""
    if framework in _asked:
        found = in_processes(framework)
        if isinstance(found, BaseException):
            raise found
        return found[run]
    states = states_of([] if run.after is None else results_of(framework, run.after))
    return run_group(run.strategy, run.workers, lambda session: trained(framework, session, run, states))[: run.workers]


@cache
def in_processes(framework: str) -> dict[Run, list[Result]] | BaseException:
    """The results of all runs of a framework, or why there are none."""
    runs: dict[Run, None] = {}
    for asked in _asked[framework]:
        run: Run | None = asked
        while run is not None:
            runs[run], run = None, run.after
    found: dict[Run, list[Result]] = {}

    def place(run: Run) -> tuple[int, int]:
        return run.depth, run.processes

    try:
        for (_, processes), some in groupby(sorted(runs, key=place), place):
            work = [(run, states_of([] if run.after is None else found[run.after])) for run in some]
            with tempfile.TemporaryDirectory() as folder:
                name, limit_s = f"{framework}_bodies.train_matrix", 120.0 + 10 * len(work)
                each = array_ranks.ranks(Path(folder), name, processes, work, limit_s=limit_s).found()
            for number, (run, _) in enumerate(work):
                found[run] = [one[number] for one in each[: run.workers]]
    except BaseException as error:  # every law says it, and none waits for it again
        return error
    return found
