"""One rank's pass over a workload's training set."""

from collections.abc import Iterator

from syncline_bench.workloads import Workload


def batches(workload: Workload, rank: int, world: int, batch: int, seed: int, epoch: int) -> Iterator:
    passing = workload.epoch(world, batch, seed, epoch)
    return (passing.part(step, rank) for step in range(passing.steps))
