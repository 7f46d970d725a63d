"""What schedules and sync modes may ask for that an adapter does not do."""

from __future__ import annotations

from ..errors import UsageError
from ..serving.shard import Groups
from ..serving.shares import PushGroups, check_kept
from ..strategy.strategy import Strategy
from ..sync import Mixes, momentum_of


def check_schedule(strategy: Strategy, framework: str) -> None:
    """Raise UsageError for gradients that would be used before, or without, being exchanged when they are handed over.

    So does a schedule that goes by measured times, which the framework does not show.
    """
    if strategy.budget_s:
        raise UsageError(
            f"auto(budget=) tries schedules on the live run, which Syncline does not do with {framework} yet: leave the"
            f" budget out, or search beforehand with syncline tune --framework {framework.lower()}"
        )
    schedule, name = strategy.schedule_object(), strategy.schedule.name
    why = ""
    if schedule.phases == "split":
        why = "exchanges in two phases (phases='split')"
    if schedule.apply == "layer":
        why = "lets every layer wait for its own weights in the next forward pass (apply='layer')"
    if schedule.apply == "next_step":
        why = "applies gradients a step later (apply='next_step')"
    if schedule.measures:
        why = f"makes its buckets anew from the times of layers (measures={schedule.measures})"
    if why:
        raise UsageError(
            f"schedule={name} {why}, which Syncline does not do with {framework} yet: use schedule=fixed, or another"
            " one of which all has been exchanged when the step is made"
        )


def check_mode(strategy: Strategy, framework: str, values: Groups, optimizer: str, keeps: bool) -> None:
    """Raise UsageError for a sync mode that an optimizer of that name and values, which ``keeps`` or not, does not fit.

    So does one that the framework's adapter does not do.
    """
    mode, sync = strategy.sync_mode(), strategy.sync.name
    check_kept(momentum_of(mode), sync, optimizer, keeps)
    PushGroups(mode, 1, sync)(values)
    if isinstance(mode, Mixes):
        raise UsageError(
            f"sync={sync} averages weights with those of some workers, which Syncline does not do"
            f" with {framework} yet: use local, diloco or easgd"
        )
