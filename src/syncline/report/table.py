"""Result rows as one table for the terminal, in 80 columns.

Owns which columns matter at a glance: the single worker stands in the first row, every strategy beside it on the same
work. Replayed layers learn nothing: where other rows have their accuracy, theirs have the share of the bound. The whole
split of an iteration into stages is in the JSON and on the page. A row that failed keeps its place, and its error
stands below the table in full.
"""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import units
from .rows import Result, Row

_COLUMNS = ("W", "{score}", "img/s", "eff %", "iter ms", "comm ms", "sent", "equal")
_ACCURACY, _BOUND = "acc %", "bnd %"
LEGEND = (
    "W: workers. {score} eff: scaling efficiency, img/s against W times the single worker's. comm: time "
    "per iteration that the training thread was blocked in communication. sent: bytes on the wire per worker and "
    "iteration. equal: replicas agree bit for bit."
)
_MEANS = {
    _ACCURACY: "acc: test accuracy.",
    _BOUND: "bnd: the bound, what no iteration can be shorter than without compression, against the iteration.",
}


def render(result: Result) -> RenderableType:
    """The table of all rows with its legend, then what failed and what to keep in mind."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    table.add_column("strategy", overflow="fold", ratio=1, min_width=8)
    score = _BOUND if result.replayed else _ACCURACY
    for title in _COLUMNS:
        table.add_column(title.format(score=score), justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(Text(row.strategy), *_cells(row, row.of_bound if score == _BOUND else row.accuracy))
    parts: list[RenderableType] = [table, Text(LEGEND.format(score=_MEANS[score]), style="dim")]
    parts += [Text(f"{row.strategy}: {row.error}", style="red") for row in result.rows if row.error is not None]
    parts += [Text(line, style="dim") for line in remarks(result)]
    return Group(*parts)


def remarks(result: Result) -> tuple[str, ...]:
    """What a reader has to know to judge the numbers of this machine."""
    lines = []
    if result.lab is not None:
        goodput = result.goodput_bytes_per_s
        got = "" if goodput is None else f", of which one stream gets {goodput * 8 / 1e6:,.0f} Mbit/s"
        lines.append(f"Every process had a host of its own behind links of {result.lab}{got}.")
    elif result.replayed:
        lines.append(
            "The bound is the trace's compute, and the link where a strategy limits its rate: nothing else does."
        )
    uncounted = [row.strategy for row in result.rows if row.iteration_s is not None and row.exposed_comm_s is None]
    if uncounted:
        lines.append(f"{', '.join(uncounted)}: nobody counts waiting and bytes there; backward includes communication.")
    processes = max((row.workers + row.servers for row in result.rows if row.iteration_s is not None), default=0)
    if processes > result.cores:
        lines.append(
            f"Up to {processes} processes shared {result.cores} cores: the stages of the larger rows, and so their "
            "scaling, include waiting for a core."
        )
    if any(row.replicas_equal is False for row in result.rows):
        lines.append("Replicas that differ at the end are a fault, unless the strategy lets them drift on purpose.")
    return tuple(lines)


def _cells(row: Row, score: float | None) -> tuple[Text, ...]:
    if row.error is not None and row.iteration_s is None:
        return (Text(str(row.workers)), Text("failed", style="red"), *(Text(units.MISSING) for _ in _COLUMNS[2:]))
    return (
        Text(str(row.workers)),
        Text(units.percent(score, 2, "")),
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
