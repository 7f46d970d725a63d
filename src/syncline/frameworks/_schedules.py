"""What schedules may ask for that an adapter does not do."""

from __future__ import annotations

from ..errors import UsageError
from ..strategy.strategy import Strategy


def check_schedule(strategy: Strategy, framework: str) -> None:
    """Raise UsageError for gradients that would be used before, or without, being exchanged when they are handed over.

    So does a schedule that goes by measured times, which the framework does not show.
    """
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
