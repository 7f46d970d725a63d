"""Rows of ``syncline accuracy`` as a table for the terminal and as one in Markdown.

Owns the columns, the same in both: what names a row (a codec and whether with feedback, or a strategy), then its
figures, which the page shows too. A narrow terminal loses "within", then the range, the share and the bytes, never the
name. A row that failed keeps its place, and its error stands below the table in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import units
from .accuracy_rows import DENSE, AccuracyResult, AccuracyRow
from .breaking import broken
from .columns import fitting

_RANKS = {"acc %": 0, "range": 3, "below": 0, "within": 4, "bytes": 1, "share": 2}
_NAME_LEAST = 8
_GAP = 2
_FEEDBACK_WIDTH = 3 + _GAP
_ONE_SEED = "one seed"


@dataclass(frozen=True)
class _Column:
    title: str
    cells: tuple[str, ...]
    rank: int
    """The greatest goes first when there is no room; 0 stays."""

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.cells)))


def render(result: AccuracyResult, width: int) -> RenderableType:
    """The table with its legend, then what failed."""
    if not result.runs:
        return Text("no rows")
    every = _columns(result.rows)
    first = "codec" if result.of_codecs else "strategy"

    def left(columns: Sequence[_Column]) -> int:
        return width - _GAP - _FEEDBACK_WIDTH * result.of_codecs - sum(column.width + _GAP for column in columns)

    columns = fitting(every, lambda columns: left(columns) >= _NAME_LEAST)
    name = max(_NAME_LEAST, min(left(columns), max(len(_name(result, row)) for row in result.rows)))
    table = Table(
        title=title_of(result), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column(first, overflow="fold", min_width=name)
    if result.of_codecs:
        table.add_column("fb", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for number, row in enumerate(result.rows):
        fed = [Text("yes" if row.feedback else "")] if result.of_codecs else []
        style = "red" if row.error is not None else ""
        figures = (Text(column.cells[number]) for column in columns)
        table.add_row(Text(broken(_name(result, row), name)), *fed, *figures, style=style)
    failed = [
        Text(f"{_name(result, row)}{_fb(result, row)}, {row.error}", style="red")
        for row in result.rows
        if row.error is not None
    ]
    left_out = ", ".join(column.title for column in every if column not in columns)
    more = f" No room for {left_out}: a wider terminal shows them, and --json has them." if left_out else ""
    return Group(table, Text(_legend(result) + more, style="dim"), *failed)


def markdown(result: AccuracyResult) -> str:
    """The table in Markdown under a line that says what was trained, where and with what."""
    lines = [f"{title_of(result)}; {length_of(result)}. {_origin(result)}.", ""]
    names = ("codec", "feedback") if result.of_codecs else ("strategy",)
    heads = (*names, *long_heads(*_compared_with(result)))
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in result.rows:
        fed = ("yes" if row.feedback else "no",) if result.of_codecs else ()
        lines.append(f"| {' | '.join((f'`{_name(result, row)}`', *fed, *cells(row)))} |")
    failed = [
        f"`{_name(result, row)}`{_fb(result, row)}: {_one_line(row.error)}"
        for row in result.rows
        if row.error is not None
    ]
    if failed:
        lines += ["", "Failed: " + "; ".join(failed) + "."]
    return "\n".join(lines) + "\n"


def title_of(result: AccuracyResult) -> str:
    """What was trained, by how many and from which seeds: ``digits, 4 workers, seeds 0, 1, 2``."""
    # The path of a data set on this machine is nobody's business.
    workload = result.workload.partition(":")[0]
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(run.seed for run in result.runs))
    return f"{workload}, {result.workers} workers, seed{'s' if ',' in seeds else ''} {seeds}"


def length_of(result: AccuracyResult) -> str:
    """How long every training was: ``12 epochs, 276 iterations of 64 images``."""
    epochs = "" if result.epochs is None else f"{result.epochs} epoch{'s' if result.epochs > 1 else ''}, "
    return f"{epochs}{result.iterations} iterations of {result.batch} images"


def long_heads(other: str, sender: str) -> tuple[str, ...]:
    """The heads of a row's figures where there is room to say beside which row they stand, and whose bytes are all."""
    return (
        "accuracy %",
        "lowest to highest",
        f"points below {other}",
        "within scatter",
        "bytes per step",
        f"of {sender}",
    )


def cells(row: AccuracyRow) -> tuple[str, ...]:
    """A row's figures, one for every head."""
    if row.median_accuracy is None or row.lowest is None or row.highest is None:
        return ("failed", *(units.MISSING for _ in list(_RANKS)[1:]))
    spread = f"{units.percent(row.lowest, 2, '')} - {units.percent(row.highest, 2, '')}"
    return (
        units.percent(row.median_accuracy, 2, ""),
        _ONE_SEED if row.scatter_points is None else spread,
        units.MISSING if row.points_below_dense is None else f"{round(row.points_below_dense, 2) + 0.0:.2f}",
        {True: "yes", False: "no", None: units.MISSING}[row.within_scatter],
        units.size(row.bytes_sent_per_step),
        units.MISSING if row.of_dense_bytes is None else f"{units.significant(100 * row.of_dense_bytes)} %",
    )


def _columns(rows: Sequence[AccuracyRow]) -> list[_Column]:
    figures = zip(*map(cells, rows), strict=True)
    return [_Column(title, found, rank) for (title, rank), found in zip(_RANKS.items(), figures, strict=True)]


def _legend(result: AccuracyResult) -> str:
    other, sender = _compared_with(result)
    return (
        f"{'fb: with error feedback. ' if result.of_codecs else ''}acc: test accuracy, median over the seeds; range: "
        f"lowest and highest. below: percentage points below {other}; within: no further from it than its seeds "
        f"scatter. bytes: sent per worker and iteration; share: of those of {sender}."
    )


def _compared_with(result: AccuracyResult) -> tuple[str, str]:
    if result.of_codecs and result.reference == DENSE:
        return "dense", "dense"
    return result.reference, result.sender or result.reference


def _name(result: AccuracyResult, row: AccuracyRow) -> str:
    return row.codec or row.strategy if result.of_codecs else row.strategy


def _fb(result: AccuracyResult, row: AccuracyRow) -> str:
    return " with feedback" if result.of_codecs and row.feedback else ""


def _origin(result: AccuracyResult) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    commit = (
        "" if result.commit is None else f", commit {result.commit[:10]}{' with changes' if result.modified else ''}"
    )
    return f"{result.machine}, {result.cores} cores; {versions}{commit}"


def _one_line(text: str | None) -> str:
    return (text or "").partition("\n")[0].rstrip(".")
