"""The batches that one process of a comparison trains on, and how far the run is with each.

Owns which part of the training set a worker gets. Where workers exchange in step they all do as many steps, and every
worker has its part of every global batch. Where each goes at its own pace the same parts lie in one pool, from which
each takes the next: a slow worker does fewer, and the run is over for all when the pool is empty. So every strategy
trains on the same batches, and the length of a run means the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ..report.rows import BASELINE
from ..strategy.strategy import Strategy
from ..sync import Mixes, SyncMode
from ..workloads import Workload
from .contenders import peer_of
from .messages import Job

if TYPE_CHECKING:
    from torch import Tensor


class Batch(NamedTuple):
    """What one worker computes a gradient of.

    ``position`` is how far the run is with it, in steps of all workers together, from 1.
    """

    inputs: Tensor
    target: Tensor
    position: int

    def moved(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with its tensors elsewhere."""
        return self._replace(inputs=move(self.inputs), target=move(self.target))


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


def batches(workload: Workload, rank: int, world: int, job: Job) -> Iterator[Batch]:
    """This worker's batches of the whole job, one epoch after the other; called on all workers."""
    if not pooled(job.strategy):
        return islice(_own(workload, rank, world, job), job.iterations)
    import syncline

    steps = workload.steps_per_epoch(job.batch, world)
    sampler = syncline.sampler(steps * world, batch_size=1, shuffle=False)
    numbers = ((epoch, number) for epoch in _epochs(job, steps) for (number,) in sampler)
    return _taken(workload, world, job, numbers)


def _epochs(job: Job, steps: int) -> range:
    return range(-(-job.iterations // steps))


def _own(workload: Workload, rank: int, world: int, job: Job) -> Iterator[Batch]:
    """A part of every global batch."""
    position = 0
    for epoch in _epochs(job, workload.steps_per_epoch(job.batch, world)):
        for inputs, target in workload.batches(rank, world, job.batch, job.seed, epoch):
            position += 1
            yield Batch(workload.computing.laid_out(inputs), target, position)


def _taken(workload: Workload, world: int, job: Job, numbers: Iterator[tuple[int, int]]) -> Iterator[Batch]:
    """The parts that these are, of epochs and numbered within each."""
    steps, known = workload.steps_per_epoch(job.batch, world), -1
    for epoch, number in numbers:
        step, rank = divmod(number, world)
        position = epoch * steps + step + 1
        if position > job.iterations:
            return
        if epoch != known:
            passing, known = workload.epoch(world, job.batch, job.seed, epoch), epoch
        inputs, target = passing.part(step, rank)
        yield Batch(workload.computing.laid_out(inputs), target, position)
