"""What ranks of JAX and of TensorFlow have in common: the run that they are in, their batches, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from matrix import Result, Run, trained

import syncline
import syncline.errors

Place = tuple[int, int, str]
BATCH = 12


@contextmanager
def joined(place: Place, strategy: str) -> Iterator[None]:
    """A run inside; a server serves until it is over."""
    index, processes, address = place
    syncline.init(strategy, rank=index, world_size=processes, address=address)
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise
    finally:
        syncline.shutdown()


def batch(step: int, rank: int, workers: int) -> tuple[Any, Any]:
    """A worker's share of the batch of a step, which is the same whatever their number."""
    draw = np.random.default_rng(step)
    x = draw.normal(size=(BATCH, 5))
    mine = slice(rank * BATCH // workers, (rank + 1) * BATCH // workers)
    return x[mine], np.sin(x.sum(1, keepdims=True))[mine]


def said(place: Place, cases: list[tuple[str, str]], calls: Mapping[str, Callable[[], Any]]) -> list[str]:
    """What each call says, in a run of a strategy; nothing where it is not refused."""
    found = []
    for strategy, name in cases:
        with joined(place, strategy):
            try:
                calls[name]()
                found.append("")
            except syncline.errors.SynclineError as error:
                found.append(str(error))
            syncline.shutdown()
    return found


def train_all(framework: str, place: Place, work: Sequence[tuple[Run, Sequence[Any]]]) -> list[Result | None]:
    """Be a process of one run after the other, each with the states that it begins from."""
    found: list[Result | None] = [None] * len(work)
    for number, (run, states) in enumerate(work):
        with joined(place, run.strategy):
            found[number] = trained(framework, place, run, states)
    return found
