"""How much a push by itself counts: the share of its worker's weight among those of all workers.

Each push says its own weight, as a number of samples; nobody meets to compare them. An owner takes the latest that it
knows of every worker, and of who has not pushed yet that it weighs as much as the one that does. So N equal workers
count 1/N each from the first push on, and of unequal ones a round adds up to the mean over all samples that one worker
would take, as soon as the owner has heard of all.
"""

from __future__ import annotations

from ..errors import UsageError
from .shard import Groups


class Shares:
    """What one owner knows of the weights of so many workers."""

    def __init__(self, workers: int) -> None:
        self._weights: list[float | None] = [None] * workers

    def of(self, worker: int, weight: float) -> tuple[float, float]:
        """That worker's push counts ``weight``; its own and the sum over all workers, of which 1 stands for nothing."""
        self._weights[worker] = weight
        total = sum(weight if known is None else known for known in self._weights)
        return weight, total or 1.0


def shared_rate(groups: Groups, weight: float, total: float, sync: str) -> Groups:
    """The groups with ``weight / total`` of their learning rates, so that a push of each worker moves as far as one of
    all.

    Raises UsageError for a group that has none.
    """
    shared = []
    for number, group in enumerate(groups):
        rate = group.get("lr")
        if isinstance(rate, bool) or not isinstance(rate, (int, float)):
            raise UsageError(
                f"sync={sync} applies every worker's push with its share of the learning rate, and the optimizer's"
                f" group {number} has no number as 'lr': use {sync}(rate=own), and set what the optimizer goes by for"
                " as many times as many updates as there are workers"
            )
        shared.append({**group, "lr": rate * weight / total})
    return shared
