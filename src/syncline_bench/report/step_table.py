"""Rows of ``syncline bench steps`` as a table for the terminal, and what went wrong below it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from . import units
from .columns import Column, grouped_table
from .step_rows import StepResult, StepRow

LEGEND = (
    "Medians of the slowest rank. bare: a step of the framework alone. exchange: what it hands to the engine, called "
    "from Python. step: with Syncline. beyond: what that takes beyond both, in the same repetition. quiet: the same of "
    "the fifth percentiles of the three. cpu: the same of processor time. each: quiet, for every bucket more than in "
    "the row above. goal: 1 ms, and 20 microseconds a bucket. ok: the weights are right."
)


def render(result: StepResult, width: int) -> RenderableType:
    """The table, errors and a legend."""
    rows = result.rows
    columns = [
        Column[StepRow]("buckets", lambda row: str(row.tensors), 0),
        Column[StepRow]("bare", lambda row: units.seconds(row.bare_s), 3),
        Column[StepRow]("exchange", lambda row: units.seconds(row.exchange_s), 2),
        Column[StepRow]("step", lambda row: "failed" if row.error else units.seconds(row.step_s), 0),
        Column[StepRow]("beyond", lambda row: units.seconds(row.beyond_s), 0),
        Column[StepRow]("quiet", lambda row: units.seconds(row.quiet_beyond_s), 0),
        Column[StepRow]("cpu", lambda row: units.seconds(row.cpu_beyond_s), 0),
        Column[StepRow]("each", lambda row: units.seconds(each(row, rows)), 1),
        Column[StepRow]("goal", lambda row: units.seconds(row.goal_s), 0),
        Column[StepRow]("ok", lambda row: {True: "yes", False: "NO", None: units.MISSING}[row.correct], 0),
    ]
    table = grouped_table("framework", lambda row: row.framework, columns, rows, width, lambda row: row.framework)
    head = f"{result.strategy}, {result.ranks} ranks on {result.cores} cores, {result.repetitions} repetitions"
    errors = {row.error: row for row in rows if row.error}
    failed = [Text(f"{row.framework}: {error}", style="red") for error, row in errors.items()]
    return Group(Text(head), table, *failed, Text(LEGEND, style="dim"))


def each(row: StepRow, rows: tuple[StepRow, ...]) -> float | None:
    """What a bucket more takes, from the row before of the same framework on."""
    less = [one for one in rows if one.framework == row.framework and one.tensors < row.tensors]
    if not less or row.quiet_beyond_s is None:
        return None
    before = max(less, key=lambda one: one.tensors)
    if before.quiet_beyond_s is None:
        return None
    return (row.quiet_beyond_s - before.quiet_beyond_s) / (row.tensors - before.tensors)
