"""The columns of a table, and which of them there is room for: every table loses its own by rank.

What names a row is never lost. Does not know what the rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from .breaking import broken

GAP = 2
"""What stands between two columns."""

_NAME_MOST = 20


class Ranked(Protocol):
    """A column that can be given up."""

    @property
    def rank(self) -> int:
        """The greatest goes first when there is no room; 0 stays."""
        ...


Some = TypeVar("Some", bound=Ranked)
Row = TypeVar("Row")


def fitting(columns: Sequence[Some], fit: Callable[[Sequence[Some]], bool]) -> list[Some]:
    """The columns that are left when those of the greatest rank went one by one, until the others ``fit``."""
    found = list(columns)
    while not fit(found):
        last = max(found, key=lambda column: column.rank, default=None)
        if last is None or last.rank == 0:
            break
        found.remove(last)
    return found


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A figure of every row, under its title."""

    title: str
    cell: Callable[[Row], str]
    rank: int
    """The greatest goes first when there is no room; 0 stays."""
    when: Callable[[Row], object] = lambda _: True
    """Of a table in which this holds for no row the column is left out."""
    text: bool = False
    """Words, which begin at the left and may be broken into lines."""

    def width(self, rows: Sequence[Row]) -> int:
        """How wide it is, at the least as its title."""
        return max(len(self.title), *(len(self.cell(row)) for row in rows))


def width_of(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> int:
    """How wide these are side by side, with what stands between them."""
    return sum(column.width(rows) + GAP for column in columns)


def grouped_table(
    head: str,
    name: Callable[[Row], str],
    columns: Sequence[Column[Row]],
    rows: Sequence[Row],
    width: int,
    section: Callable[[Row], Hashable],
) -> Table:
    """A table of rows by their names, which ``head`` is above, with a gap where the ``section`` is another one."""
    least = min(_NAME_MOST, max(len(head), *(len(name(row)) for row in rows)))
    there = [column for column in columns if any(column.when(row) for row in rows)]
    found = fitting(there, lambda left: 2 + least + width_of(left, rows) <= width)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    table.add_column(head, overflow="fold", width=least)
    for column in found:
        table.add_column(column.title, justify="left" if column.text else "right", no_wrap=not column.text)
    before = None
    for row in rows:
        if before is not None and section(row) != section(before):
            table.add_section()
        table.add_row(Text(broken(name(row), least)), *(Text(column.cell(row)) for column in found))
        before = row
    return table
