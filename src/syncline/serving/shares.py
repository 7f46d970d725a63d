"""How much a push by itself counts: the share of its worker's weight among those of all workers.

Each push says its own weight, as a number of samples; nobody meets to compare them. An owner takes the latest that it
knows of every worker, and of who has not pushed yet that it weighs as much as the one that does. So equal workers count
alike from the first push on, and of unequal ones a round adds up to the mean over all samples that one worker would
take, as soon as the owner has heard of all. A share multiplies the gradient, not the rate: what an optimizer keeps
(momentum, moments) is of gradients.

With which values of the optimizer's groups a push by itself is applied is said here too (``PushGroups``).
"""

from __future__ import annotations

from ..errors import UsageError
from ..sync import Momentum, SyncMode, alone, application_of, momentum_of
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


class PushGroups:
    """With which values one of so many workers' pushes is applied, under a mode of that name."""

    def __init__(self, mode: SyncMode, workers: int, sync: str) -> None:
        self._workers, self._sync = workers, sync
        self._shares = alone(mode) and application_of(mode).rate == "shared"
        self._looks_ahead = momentum_of(mode) == "dana"

    def __call__(self, groups: Groups) -> Groups:
        """The groups as they are then; raises UsageError for those with which that cannot be."""
        if self._shares:
            groups = shared_rate(groups, self._workers, self._sync)
        return looking_ahead(groups, self._sync) if self._looks_ahead else groups


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


def looking_ahead(groups: Groups, sync: str) -> Groups:
    """The groups with Nesterov's momentum; raises UsageError for a group that has no such thing."""
    for number, group in enumerate(groups):
        if "nesterov" not in group or not group.get("momentum") or group.get("dampening"):
            raise UsageError(
                f"sync={sync}(momentum=dana) looks ahead by Nesterov's momentum, for which the optimizer's group"
                f" {number} has to have 'nesterov', 'momentum' above 0 and no 'dampening', as those of torch.optim.SGD:"
                f" use {sync}(momentum=own), which keeps whatever an optimizer keeps for every worker"
            )
    return [{**group, "nesterov": True} for group in groups]


def check_kept(momentum: Momentum, sync: str, optimizer: str, keeps: bool) -> None:
    """Raise UsageError where an optimizer of that name, which ``keeps`` something or not, has nothing of the kind."""
    if momentum != "shared" and not keeps:
        raise UsageError(
            f"sync={sync}(momentum={momentum}) keeps for every worker what the optimizer learns, and {optimizer}, as it"
            " is set, learns nothing from one step for the next: give it momentum, or leave momentum= out"
        )
