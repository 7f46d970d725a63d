"""The constants of a calibration as a table for the terminal.

Owns how constants are written, and which columns fit: a narrow terminal loses the number of samples, then outliers,
never the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import units
from .breaking import broken
from .columns import Column, fitting, width_of

_NAME_LEAST = 16
_PER_MESSAGE = ("alpha", "flight", "message", "bucket")


@dataclass(frozen=True)
class ConstantRow:
    """A constant by its name in the file, in seconds per message or byte, with the ends of its interval.

    ``samples`` is 0 for what was not measured; ``outliers`` were set aside.
    """

    name: str
    value: float
    low: float
    high: float
    samples: int
    outliers: int
    measured: bool


_COLUMNS: tuple[Column[ConstantRow], ...] = (
    Column("value", lambda row: amount(row.name, row.value), 0),
    Column("interval", lambda row: f"{amount(row.name, row.low)} to {amount(row.name, row.high)}", 0),
    Column("samples", lambda row: f"{row.samples:,}" if row.measured else "assumed", 2),
    Column("outliers", lambda row: str(row.outliers or ""), 1),
)

LEGEND = (
    "Seconds per message, or per byte moved, added, updated, copied, encoded or decoded. interval: 95 %, by bootstrap."
    " outliers: samples that were set aside."
)


def render(rows: Sequence[ConstantRow], title: str, remarks: Sequence[str], width: int) -> RenderableType:
    """The table, what its columns mean, and what to keep in mind."""
    longest = max(len(row.name) for row in rows)

    def left(columns: Sequence[Column[ConstantRow]]) -> int:
        return width - 2 - width_of(columns, rows)

    columns = fitting(_COLUMNS, lambda columns: left(columns) >= longest)
    name = max(_NAME_LEAST, min(longest, left(columns)))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("constant", overflow="fold", min_width=name)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for row in rows:
        style = "" if row.measured else "dim"
        table.add_row(Text(broken(row.name, name)), *(Text(column.cell(row)) for column in columns), style=style)
    return Group(table, *(Text(line, style="dim") for line in (LEGEND, *remarks)))


def amount(name: str, value: float) -> str:
    """A constant as people read it: seconds of a message, nanoseconds of a byte."""
    if name.rpartition(".")[2] in _PER_MESSAGE:
        return units.seconds(value)
    return f"{units.significant(1e9 * value)} ns"
