"""The batches that one process of a comparison trains on, and how far the run is with each.

Owns which part of the training set a worker gets. Where workers exchange in step they all do as many steps, and every
worker has its part of every global batch. Where each goes at its own pace the same parts lie in one pool, from which
each takes the next: a slow worker does fewer, and the run is over for all when the pool is empty. So every strategy
trains on the same batches, and the length of a run means the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from syncline.strategy.strategy import Strategy
from syncline.sync import Averages, Mixes, SyncMode

from .contenders import peer_of
from .messages import Job
from .report.rows import BASELINE
from .workloads import Part, Workload


class Batch(NamedTuple):
    """What one worker computes a gradient of, images and labels as its framework takes them.

    ``position`` is how far the run is with it, in steps of all workers together, from 1. ``share`` is what its mean
    counts in the mean over all workers' where gradients are averaged in every step, 1 for an even part.
    """

    inputs: Any
    target: Any
    position: int
    share: float = 1.0


def pooled(contender: str) -> bool:
    """Whether workers go at their own pace under a strategy, so that they take their batches from a pool."""
    mode = _mode_of(contender)
    return mode is not None and not mode.merges


def weighed(contender: str) -> bool:
    """Whether a batch can count by its size: where all others' count too, and not only some neighbours'."""
    return not isinstance(_mode_of(contender), Mixes)


def in_step(contender: str, iterations: int) -> bool:
    """Whether all workers exchange in each of so many steps."""
    mode = _mode_of(contender)
    return mode is None or (mode.merges and all(mode.due(step) for step in range(iterations)))


def _mode_of(contender: str) -> SyncMode | None:
    """How a strategy coordinates workers; None of one that is none, which keeps them in step."""
    if contender == BASELINE or peer_of(contender) is not None:
        return None
    return Strategy.parse(contender).sync_mode()


Taken = Callable[[Part], tuple[Any, Any]]
"""Makes of images and labels what a framework takes."""


def batches(workload: Workload, rank: int, world: int, job: Job, taken: Taken) -> Iterator[Batch]:
    """This worker's batches of the whole job, one epoch after the other; called on all workers."""
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
    """A part of every global batch."""
    position, even = 0, isinstance(_mode_of(job.strategy), Averages)  # whose gradients are each worker's own
    for epoch in _epochs(job, workload.steps_per_epoch(job.batch, world)):
        passing = workload.epoch(world, job.batch, job.seed, epoch)
        for step in range(passing.steps):
            position += 1
            share = 1.0 if even else passing.share(step, rank)
            yield Batch(*taken(passing.part(step, rank)), position, share)


def _pool(
    workload: Workload, world: int, job: Job, numbers: Iterator[tuple[int, int]], taken: Taken
) -> Iterator[Batch]:
    """The parts that these are, of epochs and numbered within each."""
    steps, known = workload.steps_per_epoch(job.batch, world), -1
    for epoch, number in numbers:
        step, rank = divmod(number, world)
        position = epoch * steps + step + 1
        if position > job.iterations:
            return
        if epoch != known:
            passing, known = workload.epoch(world, job.batch, job.seed, epoch), epoch
        yield Batch(*taken(passing.part(step, rank)), position)
