"""Rows of ``syncline accuracy`` as a table for the terminal and as one in Markdown.

Owns the columns, the same in both. A row that failed keeps its place, and its error stands below the table in full.
"""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import units
from .accuracy_rows import AccuracyResult, AccuracyRow
from .breaking import broken

_HEADS = ("acc %", "range", "below", "bytes", "of dense")
_NAME_LEAST = 10
_FEEDBACK_WIDTH = 5
_LEGEND = (
    "fb: with error feedback. acc: test accuracy, median over the seeds; range: lowest and highest. below: percentage "
    "points below dense. bytes: sent per worker and iteration."
)
_MARKDOWN_HEAD = (
    "| codec | feedback | accuracy % | lowest to highest | points below dense | bytes per step | of dense |",
    "|---|---|---|---|---|---|---|",
)


def render(result: AccuracyResult, width: int) -> RenderableType:
    """The table with its legend, then what failed."""
    if not result.runs:
        return Text("no rows")
    figures = [_cells(row) for row in result.rows]
    taken = sum(
        max(len(head), *map(len, column)) + 1 for head, column in zip(_HEADS, zip(*figures, strict=True), strict=True)
    )
    name = max(_NAME_LEAST, min(width - taken - 5, max(len(row.codec) for row in result.rows)))
    table = Table(
        title=title_of(result), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("codec", overflow="fold", min_width=name)
    table.add_column("fb", no_wrap=True)
    for head in _HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    for row in result.rows:
        style = "red" if row.error is not None else ""
        table.add_row(
            Text(broken(row.codec, name)),
            "yes" if row.feedback else "",
            *(Text(cell) for cell in _cells(row)),
            style=style,
        )
    failed = [Text(f"{row.codec}{_fb(row)}, {row.error}", style="red") for row in result.rows if row.error is not None]
    return Group(table, Text(_LEGEND, style="dim"), *failed)


def markdown(result: AccuracyResult) -> str:
    """The table in Markdown under a line that says what was trained, where and with what."""
    length = f"{_epochs(result)}, {result.iterations} iterations of {result.batch} images"
    lines = [f"{title_of(result)}; {length}. {_origin(result)}.", "", *_MARKDOWN_HEAD]
    for row in result.rows:
        cells = (f"`{row.codec}`", "yes" if row.feedback else "no", *_cells(row))
        lines.append(f"| {' | '.join(cells)} |")
    failed = [f"`{row.codec}`{_fb(row)}: {_one_line(row.error)}" for row in result.rows if row.error is not None]
    if failed:
        lines += ["", "Failed: " + "; ".join(failed) + "."]
    return "\n".join(lines) + "\n"


def title_of(result: AccuracyResult) -> str:
    """What was trained, by how many and from which seeds: ``digits, 4 workers, seeds 0, 1, 2``."""
    # The path of a data set on this machine is nobody's business.
    workload = result.workload.partition(":")[0]
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(run.seed for run in result.runs))
    return f"{workload}, {result.workers} workers, seed{'s' if ',' in seeds else ''} {seeds}"


def _cells(row: AccuracyRow) -> tuple[str, ...]:
    if row.median_accuracy is None or row.lowest is None or row.highest is None:
        return ("failed", *(units.MISSING for _ in _HEADS[1:]))
    spread = f"{units.percent(row.lowest, 2, '')} - {units.percent(row.highest, 2, '')}"
    below = units.MISSING if row.points_below_dense is None else f"{round(row.points_below_dense, 2) + 0.0:.2f}"
    share = units.MISSING if row.of_dense_bytes is None else f"{units.significant(100 * row.of_dense_bytes)} %"
    return units.percent(row.median_accuracy, 2, ""), spread, below, units.size(row.bytes_sent_per_step), share


def _fb(row: AccuracyRow) -> str:
    return " with feedback" if row.feedback else ""


def _epochs(result: AccuracyResult) -> str:
    return f"{result.epochs} epoch{'s' if result.epochs > 1 else ''}"


def _origin(result: AccuracyResult) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    commit = (
        "" if result.commit is None else f", commit {result.commit[:10]}{' with changes' if result.modified else ''}"
    )
    return f"{result.machine}, {result.cores} cores; {versions}{commit}"


def _one_line(text: str | None) -> str:
    return (text or "").partition("\n")[0].rstrip(".")
