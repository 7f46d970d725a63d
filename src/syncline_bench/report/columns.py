"""A table of results: its columns, declared once, and its rendering on a terminal, on a page and in Markdown.

Selects the columns that fit. A table drops columns by their rank, never the name of a row, and lists the dropped ones.
Does not know the meaning of rows. Rich is imported only for printing, because processes that measure import this file
with the rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from .files import fields_of

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

Row = TypeVar("Row")

_GAP = 2
"""The characters between two columns."""
_UNSAID = 8
"""Columns of this rank are shown if they fit, and not mentioned otherwise."""
_STYLES = {"failed": "red", "NO": "bold red"}
_PIECE = re.compile(r"[^\s(,]*[(,]?\s?")
_SMALL = re.compile(r"[^=_]*[=_]?\s?")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column: its title, the field or property ``of`` a row with its format, or the function ``by`` of a row.

    The ``unit`` follows the title, on a page below it. On a page the title is ``head``, or ``title`` if ``head`` is
    None; an empty title or head leaves the column out there. ``means`` explains the column, by default its field's
    meaning does. Columns of the greatest rank are dropped first, of rank 0 never. A table has the column only if
    ``when`` holds for a row. A ``name`` gets the remaining width and is broken into lines; a ``text`` is left-aligned.
    """

    title: str
    of: str = ""
    write: Callable[[Any], str] = str
    rank: int = 0
    by: Callable[[Row], str] | None = None
    unit: str = ""
    head: str | None = None
    means: str | None = None
    when: Callable[[Row], object] = lambda _: True
    kind: Literal["name", "text", "figure"] = "figure"
    fails: bool = False
    """The mark of a failed row, which has no figures."""
    once: bool = False
    """Only in the first row of a section."""

    def cell(self, row: Row) -> str:
        """A row's text in this column."""
        return self.by(row) if self.by is not None else self.write(getattr(row, self.of))

    @property
    def titled(self) -> str:
        """The title with its unit, for a terminal."""
        return f"{self.title} {self.unit}".rstrip()

    @property
    def headed(self) -> str:
        """The title on a page, without its unit."""
        return self.title if self.head is None else self.head


@dataclass(frozen=True)
class Table(Generic[Row]):
    """Rows under columns, in sections that begin where ``section`` changes.

    ``measured`` tells whether a row has figures. ``errors`` are the lines about failed rows. ``spare`` is the width of
    unbreakable parts of names that the columns must leave.
    """

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    title: str = ""
    section: Callable[[Row], Hashable] = lambda _: None
    measured: Callable[[Row], bool] = lambda _: True
    style: Callable[[Row], str] | None = None
    errors: Sequence[str] = ()
    spare: int = 17

    @property
    def wanted(self) -> list[Column[Row]]:
        """The columns of a sufficiently wide terminal."""
        return [column for column in self.columns if column.title and self._has(column)]

    @property
    def on_page(self) -> list[Column[Row]]:
        """The columns of a page, without the name."""
        return [one for one in self.columns if one.headed and one.kind != "name" and self._has(one)]

    def fitting(self, width: int) -> tuple[list[Column[Row]], int]:
        """The columns that fit into ``width``, and the width left for the name."""
        found = self.wanted
        names = [text for column in found if column.kind == "name" for text in (column.title, *self._cells(column))]
        least = max(min(self.spare, widest_piece(name)) for name in names)
        while (left := self._left(found, width)) < least and (rank := max(column.rank for column in found)) > 0:
            found.remove(next(column for column in reversed(found) if column.rank == rank))
        return found, max(1, least, min(left, max(map(len, names))))

    def meaning(self, column: Column[Row]) -> str:
        """The meaning of a column, in plain text."""
        if column.means is None and self.rows:
            return dict(fields_of(type(self.rows[0]))).get(column.of, "").replace("`", "")
        return column.means or ""

    def cell(self, column: Column[Row], row: Row) -> str:
        """A row's text in a column."""
        return "failed" if column.fails and not self.measured(row) else column.cell(row)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """As a terminal shows it."""
        from rich import box
        from rich.table import Table as Drawn
        from rich.text import Text

        columns, name = self.fitting(options.max_width)
        drawn = Drawn(title=self.title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        drawn.collapse_padding = True
        for column in columns:
            if column.kind == "name":
                drawn.add_column(column.titled, overflow="fold", width=name)
            else:
                text = column.kind == "text"
                drawn.add_column(column.titled, justify="left" if text else "right", no_wrap=not text)
        before: list[Hashable] = []
        for row in self.rows:
            section, style = self.section(row), "" if self.style is None else self.style(row)
            fresh = [section] != before
            if before and fresh:
                drawn.add_section()
            cells = ("" if column.once and not fresh else self.cell(column, row) for column in columns)
            shown = (
                broken(cell, name) if column.kind == "name" else cell
                for column, cell in zip(columns, cells, strict=True)
            )
            drawn.add_row(*(Text(cell, style=_STYLES.get(cell, style)) for cell in shown))
            before = [section]
        yield drawn
        yield from (Text(error, style="red") for error in self.errors)

    def markdown(self) -> str:
        """The table in Markdown, under the heads of a page."""
        columns = [*(one for one in self.columns if one.kind == "name"), *self.on_page]
        lines = [[f"{one.headed} {one.unit}".rstrip() for one in columns]]
        for row in self.rows:
            cells = [self.cell(one, row) for one in columns]
            lines.append(
                [f"`{cell}`" if one.kind == "name" else cell for one, cell in zip(columns, cells, strict=True)]
            )
        head, *others = (f"| {' | '.join(line)} |" for line in lines)
        return "\n".join((head, "|---" * len(columns) + "|", *others)) + "\n"

    def _has(self, column: Column[Row]) -> bool:
        return not self.rows or any(column.when(row) for row in self.rows)

    def _cells(self, column: Column[Row]) -> list[str]:
        return [self.cell(column, row) for row in self.rows]

    def _left(self, columns: Sequence[Column[Row]], width: int) -> int:
        taken = (
            max(map(len, (*column.titled.splitlines(), *self._cells(column)))) + _GAP
            for column in columns
            if column.kind != "name"
        )
        return width - 2 - sum(taken)


@dataclass(frozen=True)
class Sheet:
    """The printed results of a command: tables, what their columns mean, remarks, and findings.

    ``words`` extend the legend beyond the meanings of columns. ``kept`` is the option that writes all figures.
    """

    tables: Sequence[Table[Any]]
    words: str = ""
    remarks: Sequence[str] = ()
    findings: Sequence[str] = ()
    kept: str = "--json"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """As a terminal shows it."""
        from rich.text import Text

        yield from self.tables
        if not self.tables:
            yield Text("no rows")
        fitted, missed = [], dict[str, None]()
        for table in self.tables:
            columns = table.fitting(options.max_width)[0]
            fitted += [(table, column) for column in columns]
            titles = {column.titled for column in columns}
            missed |= {one.titled: None for one in table.wanted if one.rank < _UNSAID and one.titled not in titles}
        lines = (
            [f"{legend((column.title, table.meaning(column)) for table, column in fitted)} {self.words}".strip()]
            if self.tables
            else []
        )
        if missed:
            names = ", ".join(" ".join(name.split()) for name in missed)
            lines.append(f"No room for {names}: a wider terminal shows them, and {self.kept} has them.")
        yield from (Text(line, style="dim") for line in (*lines, *self.remarks) if line)
        yield from map(Text, self.findings)


def legend(said: Iterable[tuple[str, str]]) -> str:
    """The meanings of columns by their titles, each once; columns with the same meaning share an entry."""
    found: dict[str, dict[str, None]] = {}
    for title, means in said:
        if title and means:
            found.setdefault(means, {})[" ".join(title.split())] = None
    return " ".join(f"{', '.join(titles)}: {means}." for means, titles in found.items())


def pieces(text: str) -> list[str]:
    """The unbreakable parts of a text: lines end between words, after a comma or after a parenthesis."""
    return [piece for piece in _PIECE.findall(text) if piece]


def widest_piece(text: str) -> int:
    """The least width of a column that breaks ``text`` only between its parts."""
    return max((len(piece.rstrip()) for piece in pieces(text)), default=0)


def broken(text: str, width: int) -> str:
    """The text in lines of at most ``width``; only a part that is longer than a line is broken inside."""
    lines = [""]
    for word in re.findall(r"\S+\s?", text):  # parts that fit a line stay whole, from the coarsest parts down
        for piece in [word] if len(word.rstrip()) <= width else pieces(word):
            for part in [piece] if len(piece.rstrip()) <= width else _SMALL.findall(piece):
                for start in range(0, max(1, len(part.rstrip())), width):
                    some = part[start : start + width] if len(part.rstrip()) > width else part
                    if len(lines[-1]) + len(some.rstrip()) > width:
                        lines.append("")
                    lines[-1] += some
    return "\n".join(line.rstrip() for line in lines)
