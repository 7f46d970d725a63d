"""The batches of one worker of a comparison, each with its position in the run.

Owns the assignment of the training set to workers. Under a synchronous strategy, every worker trains on its part of
each global batch. Under an asynchronous one, the same parts form a pool from which each worker takes the next: a slow
worker takes fewer, and the run ends when the pool is empty. All strategies therefore train on the same batches, and a
number of iterations means the same amount of data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from syncline.strategy.strategy import Strategy
from syncline.sync import Averages, Mixes, SyncMode

from .contenders import peer_of
from .messages import Job
from .report.comparison import BASELINE
from .workloads import Part, Workload


class Batch(NamedTuple):
    """The part of a global batch that one worker computes a gradient from, as arrays of its framework.

    ``position`` is the step of the run, from 1, counted over all workers. ``share`` is the weight of this part in the
    average over all workers if every step averages gradients; 1 stands for an equal part.
    """

    inputs: Any
    target: Any
    position: int
    share: float = 1.0


def pooled(contender: str) -> bool:
    """Whether workers are asynchronous under this strategy, so that they take batches from a pool."""
    mode = _mode_of(contender)
    return mode is not None and not mode.merges


def weighed(contender: str) -> bool:
    """Whether batches are weighted by their size. Gossip averages with neighbours only and cannot do so."""
    return not isinstance(_mode_of(contender), Mixes)


def in_step(contender: str, iterations: int) -> bool:
    """Whether all workers exchange in every one of the first ``iterations`` steps."""
    mode = _mode_of(contender)
    return mode is None or (mode.merges and all(mode.due(step) for step in range(iterations)))


def _mode_of(contender: str) -> SyncMode | None:
    """The sync mode of a strategy; None for the single worker and for peers, which are synchronous."""
    if contender == BASELINE or peer_of(contender) is not None:
        return None
    return Strategy.parse(contender).sync_mode()


Taken = Callable[[Part], tuple[Any, Any]]
"""Converts samples and labels to arrays of a framework."""


def batches(workload: Workload, rank: int, world: int, job: Job, taken: Taken) -> Iterator[Batch]:
    """This worker's batches of the whole job, epoch after epoch. All workers call this."""
    if not pooled(job.strategy):
        return islice(_own(workload, rank, world, job, taken), job.iterations)
    import syncline

    steps = workload.steps_per_epoch(job.batch, world)
    sampler = syncline.sampler(steps * world, batch_size=1, shuffle=False)
    numbers = ((epoch, number) for epoch in _epochs(job, steps) for (number,) in sampler)
    return _pool(workload, world, job, numbers, taken)


def _epochs(job: Job, steps: int) -> range:
    return range(-(-job.iterations // steps))


def _own(workload: Workload, rank: int, world: int, job: Job, taken: Taken) -> Iterator[Batch]:
    """This worker's part of every global batch."""
    # A mode that averages weights applies each worker's own gradient, so there is no mean to weight the part in.
    position, even = 0, isinstance(_mode_of(job.strategy), Averages)
    for epoch in _epochs(job, workload.steps_per_epoch(job.batch, world)):
        passing = workload.epoch(world, job.batch, job.seed, epoch)
        for step in range(passing.steps):
            position += 1
            share = 1.0 if even else passing.share(step, rank)
            yield Batch(*taken(passing.part(step, rank)), position, share)


def _pool(
    workload: Workload, world: int, job: Job, numbers: Iterator[tuple[int, int]], taken: Taken
) -> Iterator[Batch]:
    """The parts with these (epoch, number within the epoch) from the pool, up to the job's last iteration."""
    steps, known = workload.steps_per_epoch(job.batch, world), -1
    for epoch, number in numbers:
        step, rank = divmod(number, world)
        position = epoch * steps + step + 1
        if position > job.iterations:
            return
        if epoch != known:
            passing, known = workload.epoch(world, job.batch, job.seed, epoch), epoch
        yield Batch(*taken(passing.part(step, rank)), position)
