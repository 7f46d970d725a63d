"""How much a push by itself counts: the share of its worker's weight among those of all workers.

Each push says its own weight, as a number of samples; nobody meets to compare them. An owner takes the latest that it
knows of every worker, and of who has not pushed yet that it weighs as much as the one that does. So equal workers count
alike from the first push on, and of unequal ones a round adds up to the mean over all samples that one worker would
take, as soon as the owner has heard of all. A share multiplies the gradient, not the rate: what an optimizer keeps
(momentum, moments) is of gradients.
"""

from __future__ import annotations

from ..errors import UsageError
from .shard import Groups

MOST_WEIGHT = 1e18
"""Of a push; what is more makes sums overflow."""


class Shares:
    """What one owner knows of the weights of so many workers."""

    def __init__(self, workers: int) -> None:
        self._weights: list[float | None] = [None] * workers

    def of(self, worker: int, weight: float) -> float:
        """What to multiply that worker's gradient by, of ``weight``: 1 where all weigh alike, 0 for nothing."""
        self._weights[worker] = weight
        total = sum(weight if known is None else known for known in self._weights)
        return weight * len(self._weights) / total if total else 0.0


def shared_rate(groups: Groups, workers: int, sync: str) -> Groups:
    """The groups with a share of their learning rates, so that a push of each worker moves as far as one of all.

    Raises UsageError for a group that has none.
    """
    shared = []
    for number, group in enumerate(groups):
        rate = group.get("lr")
        if isinstance(rate, bool) or not isinstance(rate, (int, float)):
            raise UsageError(
                f"sync={sync} applies every worker's push with the learning rate divided by the number of workers, and"
                f" the optimizer's group {number} has no number as 'lr': use {sync}(rate=own), and set what the"
                " optimizer goes by for so many times as many updates"
            )
        shared.append({**group, "lr": rate / workers})
    return shared
