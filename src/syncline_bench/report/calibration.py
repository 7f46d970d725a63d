"""The constants of a calibration as a table: what they are, and how they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import units
from .columns import Column, Sheet, Table

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
    Column("constant", "name", kind="name"),
    Column("value", by=lambda row: amount(row.name, row.value)),
    Column(
        "interval",
        by=lambda row: f"{amount(row.name, row.low)} to {amount(row.name, row.high)}",
        means="95 %, by bootstrap",
    ),
    Column("samples", rank=2, by=lambda row: f"{row.samples:,}" if row.measured else "assumed"),
    Column("outliers", "outliers", lambda value: str(value or ""), 1, means="samples that were set aside"),
)


def render(rows: Sequence[ConstantRow], title: str, remarks: Sequence[str]) -> Sheet:
    """The table, what its columns mean, and what to keep in mind."""
    table = Table(_COLUMNS, rows, title, style=lambda row: "" if row.measured else "dim", spare=64)
    words = "Values are seconds per message, or per byte moved, added, updated, copied, encoded or decoded."
    return Sheet([table], words, remarks, kept="-o")


def amount(name: str, value: float) -> str:
    """A constant as people read it: seconds of a message, nanoseconds of a byte."""
    if name.rpartition(".")[2] in _PER_MESSAGE:
        return units.seconds(value)
    return f"{units.significant(1e9 * value)} ns"
