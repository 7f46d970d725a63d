"""Predicted collectives as a table for the terminal, and in words what its numbers rest on.

Owns which columns fit: a narrow terminal loses the bandwidth, then the model, never the times or the interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import units
from .breaking import broken
from .columns import fitting
from .prediction_rows import CollectivePrediction, CollectiveRow

_GAP = 2
_NAME_MOST = 20

LEGEND = (
    "low, high: with every constant at the fast and at the slow end of its range. busbw: as in nccl-tests, for an"
    " allreduce. model: plan, every message of it on the clocks of all ranks; formula, where a plan would be too large."
)


@dataclass(frozen=True)
class _Column:
    title: str
    cell: Callable[[CollectiveRow], str]
    rank: int
    """The greatest goes first when there is no room; 0 stays."""

    def width(self, rows: Sequence[CollectiveRow]) -> int:
        return max(len(self.title), *(len(self.cell(row)) for row in rows))


_COLUMNS = (
    _Column("bytes", lambda row: units.decimal_size(row.bytes), 0),
    _Column("W", lambda row: f"{row.workers:,}", 0),
    _Column("time", lambda row: units.seconds(row.comm_s), 0),
    _Column("low", lambda row: units.seconds(row.low_s), 0),
    _Column("high", lambda row: units.seconds(row.high_s), 0),
    _Column("busbw GB/s", lambda row: _bandwidth(row), 2),
    _Column("model", lambda row: row.model, 1),
)


def render(result: CollectivePrediction, width: int) -> RenderableType:
    """The table, its legend, and what the network's numbers are."""
    return Group(_table(result, width), *(Text(line, style="dim") for line in (LEGEND, *remarks(result))))


def remarks(result: CollectivePrediction) -> tuple[str, ...]:
    """Where the constants are from, which of them nobody has measured, and what the answer cannot depend on."""
    where = f"Network {result.network}" + (f": {result.about}" if result.about else "")
    if result.source and result.source != "given":
        where += f" ({result.source}{', ' if result.date else ''}{result.date})"
    measured = [name for name in result.constants if name not in result.assumed]
    lines = [f"{where}."]
    if measured:
        lines.append(f"Measured: {', '.join(measured)}.")
    if result.assumed:
        lines.append(f"Assumed, not measured: {', '.join(result.assumed)}.")
    return (*lines, *result.notes)


def _table(result: CollectivePrediction, width: int) -> Table:
    rows = result.rows
    name = min(_NAME_MOST, max(len("algorithm"), *(len(row.algorithm) for row in rows)))

    def fit(columns: Sequence[_Column]) -> bool:
        return 2 + name + sum(column.width(rows) + _GAP for column in columns) <= width

    columns = fitting(_COLUMNS, fit)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    table.add_column("algorithm", overflow="fold", width=name)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    before = None
    for row in rows:
        if before is not None and (row.bytes, row.workers) != (before.bytes, before.workers):
            table.add_section()
        table.add_row(Text(broken(row.algorithm, name)), *(Text(column.cell(row)) for column in columns))
        before = row
    return table


def _bandwidth(row: CollectiveRow) -> str:
    found = row.busbw_bytes_per_s
    return units.MISSING if found is None else units.significant(found / 1e9)
