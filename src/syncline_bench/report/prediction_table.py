"""Predicted collectives as a table for the terminal, and in words what its numbers rest on.

Owns which columns fit: a narrow terminal loses the bandwidth, then the model, never the times or the interval.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import units
from .columns import Column, grouped_table
from .prediction_rows import CollectivePrediction, CollectiveRow

LEGEND = (
    "low, high: with every constant at the fast and at the slow end of its range. busbw: as in nccl-tests, for an"
    " allreduce. model: plan, every message of it on the clocks of all ranks; formula, where a plan would be too large."
)


_COLUMNS: tuple[Column[CollectiveRow], ...] = (
    Column("bytes", lambda row: units.decimal_size(row.bytes), 0),
    Column("W", lambda row: f"{row.workers:,}", 0),
    Column("time", lambda row: units.seconds(row.comm_s), 0),
    Column("low", lambda row: units.seconds(row.low_s), 0),
    Column("high", lambda row: units.seconds(row.high_s), 0),
    Column("busbw GB/s", lambda row: _bandwidth(row), 2),
    Column("model", lambda row: row.model, 1),
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
    return grouped_table(
        "algorithm",
        lambda row: row.algorithm,
        _COLUMNS,
        result.rows,
        width,
        lambda row: (row.bytes, row.workers),
    )


def _bandwidth(row: CollectiveRow) -> str:
    found = row.busbw_bytes_per_s
    return units.MISSING if found is None else units.significant(found / 1e9)
