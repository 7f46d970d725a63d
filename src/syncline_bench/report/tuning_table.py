"""A tuning as a table for the terminal: what was measured, the fastest first, and why the best one is."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from . import units
from .columns import Column, grouped_table
from .tuning_rows import Tried, Tuned

_COLUMNS: tuple[Column[Tried], ...] = (
    Column("iter ms", lambda row: units.milliseconds(row.measured_s), 0),
    Column("predicted", lambda row: units.milliseconds(row.predicted_s), 2),
    Column("runs", lambda row: str(len(row.times_s)), 3),
    Column("step %", lambda row: units.percent(row.efficiency, 0, ""), 4, lambda row: row.efficiency is not None),
    Column("what became of it", lambda row: row.why, 1, text=True),
)
LEGEND = (
    "iter ms: median of an iteration. predicted: the same by simulation, before it was measured. runs: how often it was"
    " measured, in turn with the others."
)


def render(result: Tuned, width: int) -> RenderableType:
    """The table of what has run, and the result in words."""
    shown = [row for row in result.tried if row.times_s or row.why.startswith(("failed", "refused"))]
    if not shown:
        return Text("\n".join(["no rows", *summary(result)]))
    lines = [LEGEND, *summary(result)]
    table = grouped_table("strategy", lambda row: row.strategy, _COLUMNS, shown, width, lambda row: row.strategy)
    return Group(table, *(Text(line, style="dim" if line is LEGEND else "") for line in lines))


def summary(result: Tuned) -> list[str]:
    """What was found, and why; how much was looked at."""
    predicted = sum(row.predicted_s is not None for row in result.tried)
    ran = sum(bool(row.times_s) for row in result.tried)
    found = [f"{ran} of {len(result.tried)} candidates ran, {predicted} were predicted, in {result.spent_s:.0f} s."]
    if result.best and result.iteration_s is not None and result.default_iteration_s is not None:
        times = result.default_iteration_s / result.iteration_s
        found.append(
            f"best: {result.best}: {units.seconds(result.iteration_s)} an iteration, {units.significant(times)} times"
            f" as fast as {result.default} ({units.seconds(result.default_iteration_s)})"
        )
    return found + ([result.explanation] if result.explanation else [])
