"""Rows of ``syncline bench gradients`` as tables for the terminal: one per model and number of ranks, forms down.

Owns the words and which columns fit: a narrow terminal loses p99, then the share and the limit, never what a form adds
or the verdict. A row that failed keeps its place, and its error stands below the table in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import units
from .columns import GAP, Column, fitting, width_of
from .gradient_rows import BARE, CONTIGUOUS, GradientResult, GradientRow, places

LEGEND = (
    "median: of an iteration that computes nothing, slowest rank. added: what the form takes beyond bare, in which no "
    "gradient is moved, in the same repetition; noise: nothing above bare, within the noise. share: of the median. "
    "limit: the form's passes over the gradients at the speed of plain copies, measured in the same run, and the share "
    "of it reached; no limit: faster than that, out of the cache. x: added, as a multiple of what contiguous adds. "
    "layerwise and copied:flatten: with the transport's staging of memory that is not its own. ok: every element right "
    "on every rank."
)

_NOISE = "noise"
_NO_LIMIT = "no limit"


def render(result: GradientResult, width: int) -> RenderableType:
    """All tables, each with the errors of its rows, and one legend."""
    parts: list[RenderableType] = []
    for rows in places(result.rows):
        parts += [_table(rows, result.cores, width), *_errors(rows)]
    return Group(*parts, Text(LEGEND, style="dim")) if parts else Text("no rows")


def title(rows: Sequence[GradientRow], cores: int) -> str:
    """What the rows of one place have in common."""
    first = rows[0]
    where = "1 process, no exchange" if first.ranks == 1 else f"{first.ranks} ranks on {cores} cores"
    return f"{first.workload}, {units.decimal_size(first.bytes)} in {first.tensors} tensors, {where}"


def figures(row: GradientRow, rows: Sequence[GradientRow]) -> dict[str, str]:
    """Every figure of a row as text, by the head of its column; ``rows`` are those of its place."""
    moved = row.form != BARE
    lost = row.added_s is not None and row.added_s <= 0
    limited = units.percent(row.of_limit) if row.of_limit is None or row.of_limit <= 1 else _NO_LIMIT
    return {
        "passes": str(row.passes),
        "median": units.seconds(row.median_s),
        "p99": units.seconds(row.p99_s),
        "added": (_NOISE if lost else units.seconds(row.added_s)) if moved else "",
        "share": (units.MISSING if lost else units.percent(row.share)) if moved else "",
        "limit": units.seconds(row.limit_s) if row.passes else "",
        "of limit": limited if row.passes else "",
        "x": _times(row, rows),
        "ok": {True: "yes", False: "NO", None: units.MISSING}[row.correct],
    }


def _times(row: GradientRow, rows: Sequence[GradientRow]) -> str:
    ours = next((other.added_s for other in rows if other.form == CONTIGUOUS), None)
    if row.form in (BARE, CONTIGUOUS) or row.added_s is None or ours is None:
        return ""
    if row.added_s <= 0 or ours <= 0:
        return units.MISSING
    return units.significant(row.added_s / ours, 2)


def _table(rows: Sequence[GradientRow], cores: int, width: int) -> Table:
    columns = _columns(rows, width)
    table = Table(title=title(rows, cores), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        left = column.title == "form"
        table.add_column(column.title, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        style = "red" if row.error is not None or row.correct is False else ""
        table.add_row(*(Text(column.cell(row), style=style) for column in columns))
    return table


def _columns(rows: Sequence[GradientRow], width: int) -> list[Column[GradientRow]]:
    def figure(head: str) -> Callable[[GradientRow], str]:
        return lambda row: figures(row, rows)[head]

    found = [
        Column("form", lambda row: row.form, 0),
        Column("median", lambda row: "failed" if row.error is not None else figures(row, rows)["median"], 0),
        Column("p99", figure("p99"), 4),
        Column("added", figure("added"), 0),
        Column("share", figure("share"), 3),
        Column("limit", figure("limit"), 1),
        Column("of limit", figure("of limit"), 2),
        Column("x", figure("x"), 0),
        Column("ok", figure("ok"), 0),
    ]
    return fitting(found, lambda columns: width_of(columns, rows) + GAP <= width)


def _errors(rows: Sequence[GradientRow]) -> list[Text]:
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.error is not None:
            found.setdefault(row.error, []).append(row.form)
    return [Text(f"{', '.join(forms)}: {error}", style="red") for error, forms in found.items()]
