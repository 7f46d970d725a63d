"""What schedules and sync modes may ask for that an adapter does not do."""

from __future__ import annotations

from ..errors import UsageError
from ..serving.shard import Groups
from ..serving.shares import PushGroups, check_kept
from ..strategy.strategy import Strategy
from ..sync import momentum_of


def check_schedule(strategy: Strategy, framework: str) -> None:
    """Raise UsageError for a schedule whose steps end behind the next one, or that goes by times of layers.

    Where layers may wait for their own weights (``apply="layer"``), all are waited for in the step: a framework without
    hooks shows nobody when a weight is read first.
    """
    if strategy.budget_s:
        raise UsageError(
            f"auto(budget=) tries schedules on the live run, which Syncline does not do with {framework} yet: leave the"
            f" budget out, or search beforehand with syncline tune --framework {framework.lower()}"
        )
    schedule, name = strategy.schedule_object(), strategy.schedule.name
    why = ""
    if schedule.apply == "next_step":
        why = "applies gradients a step later (apply='next_step')"
    if schedule.measures:
        why = f"makes its buckets anew from the times of layers (measures={schedule.measures})"
    if why:
        raise UsageError(
            f"schedule={name} {why}, which Syncline does not do with {framework} yet: use schedule=fixed, or another"
            " one of which all has been exchanged when the step is made"
        )


def check_mode(strategy: Strategy, values: Groups, optimizer: str, keeps: bool) -> None:
    """Raise UsageError for a sync mode that does not fit an optimizer of these values, which keeps something or not."""
    mode, sync = strategy.sync_mode(), strategy.sync.name
    check_kept(momentum_of(mode), sync, optimizer, keeps)
    PushGroups(mode, 1, sync)(values)
