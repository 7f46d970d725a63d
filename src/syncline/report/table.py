"""Result rows as one table for the terminal, in 80 columns.

Owns which columns matter at a glance: the single worker stands in the first row, every strategy beside it on the same
work. The whole split of an iteration into stages is in the JSON and on the page. A row that failed keeps its place, and
its error stands below the table in full.
"""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import units
from .rows import Result, Row

_COLUMNS = ("W", "acc %", "img/s", "eff %", "iter ms", "comm ms", "sent", "equal")
LEGEND = (
    "W: workers. acc: test accuracy. eff: scaling efficiency, img/s against W times the single worker's. comm: time "
    "per iteration that the training thread was blocked in communication. sent: bytes on the wire per worker and "
    "iteration. equal: replicas agree bit for bit."
)


def render(result: Result) -> RenderableType:
    """The table of all rows with its legend, then what failed and what to keep in mind."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    table.add_column("strategy", overflow="fold", ratio=1, min_width=8)
    for title in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(Text(row.strategy), *_cells(row))
    parts: list[RenderableType] = [table, Text(LEGEND, style="dim")]
    parts += [Text(f"{row.strategy}: {row.error}", style="red") for row in result.rows if row.error is not None]
    parts += [Text(line, style="dim") for line in remarks(result)]
    return Group(*parts)


def remarks(result: Result) -> tuple[str, ...]:
    """What a reader has to know to judge the numbers of this machine."""
    lines = []
    processes = max((row.workers + row.servers for row in result.rows if row.iteration_s is not None), default=0)
    if processes > result.cores:
        lines.append(
            f"Up to {processes} processes shared {result.cores} cores: the stages of the larger rows, and so their "
            "scaling, include waiting for a core."
        )
    if any(row.replicas_equal is False for row in result.rows):
        lines.append("Replicas that differ at the end are a fault, unless the strategy lets them drift on purpose.")
    return tuple(lines)


def _cells(row: Row) -> tuple[Text, ...]:
    if row.error is not None and row.iteration_s is None:
        return (Text(str(row.workers)), Text("failed", style="red"), *(Text(units.MISSING) for _ in _COLUMNS[2:]))
    return (
        Text(str(row.workers)),
        Text(units.percent(row.accuracy, 2, "")),
        Text(units.rate(row.images_per_s)),
        Text(units.percent(row.scaling_efficiency, 0, "")),
        Text(units.milliseconds(row.iteration_s)),
        Text(units.milliseconds(row.exposed_comm_s)),
        Text(units.size(row.bytes_sent_per_step)),
        _verdict(row.replicas_equal),
    )


def _verdict(equal: bool | None) -> Text:
    if equal is None:
        return Text(units.MISSING)
    return Text("yes", style="green") if equal else Text("NO", style="bold red")
