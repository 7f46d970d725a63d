"""Rows of ``syncline bench`` as tables for the terminal: one per number of ranks, sizes down, peers as ratios.

Owns which columns fit: a narrow terminal loses p99, then bandwidth, processor time and the limit, never the median, the
ratios or the verdict. A row that failed keeps its place, and its error stands below the table in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import units
from .bench_rows import BenchResult, Measured, places
from .breaking import broken
from .columns import fitting

PEERS = (
    "gloo:native",
    "torch:syncline",
    "mpi:native",
    "openmpi:native",
    "mpich:native",
    "mpi:ring",
    "openmpi:ring",
    "mpich:ring",
)
"""Contenders that all others are held against, in the order of the columns."""

LEGEND = (
    "median: of the slowest rank. busbw: as in nccl-tests. CPU: processor seconds of all ranks per 10^9 bytes. limit: "
    "share of what plain copies (or the link) allow, measured in the same run. x NAME: how many times faster than that "
    "peer. ok: every element right on every rank."
)


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    cell: Callable[[Measured], str]
    rank: int
    """The greatest goes first when there is no room; 0 stays."""


def render(result: BenchResult, width: int) -> RenderableType:
    """All tables, each with the errors of its rows, and one legend."""
    parts: list[RenderableType] = []
    for rows in places(result.rows):
        parts += [_table(rows, result.cores, width), *_errors(rows)]
    return Group(*parts, Text(LEGEND, style="dim")) if parts else Text("no rows")


def title(rows: Sequence[Measured], cores: int) -> str:
    """What the rows of one place have in common."""
    first = rows[0]
    where = (
        f"{cores} cores" if first.lab_bit_per_s is None else f"a lab of {units.link_rate(first.lab_bit_per_s)} links"
    )
    hosts = "" if first.per_host == 1 else f", {first.per_host} on each host,"
    return f"{first.collective} of float32, {first.ranks} ranks{hosts} on {where}"


def ratio(row: Measured, peer: Measured | None) -> float | None:
    """How many times faster ``row`` is than ``peer``."""
    if row.median_s is None or peer is None or peer.median_s is None or peer is row:
        return None
    return peer.median_s / row.median_s


def peers_of(rows: Sequence[Measured]) -> tuple[str, ...]:
    """The peers that have rows among these."""
    there = {row.contender for row in rows}
    return tuple(name for name in PEERS if name in there)


def at_size(rows: Sequence[Measured], name: str, nbytes: int) -> Measured | None:
    """The row of a contender at a size."""
    return next((row for row in rows if row.contender == name and row.bytes == nbytes), None)


def figures(row: Measured) -> tuple[str, str, str, str, str, str]:
    """Median, p99, bus bandwidth, processor time, share of the limit and verdict as text."""
    bandwidth = units.MISSING if row.busbw_bytes_per_s is None else f"{row.busbw_bytes_per_s / 1e9:.3g} GB/s"
    return (
        units.seconds(row.median_s),
        units.seconds(row.p99_s),
        bandwidth,
        units.rate(row.cpu_s_per_gb),
        units.percent(row.of_limit),
        {True: "yes", False: "NO", None: units.MISSING}[row.correct],
    )


def _table(rows: Sequence[Measured], cores: int, width: int) -> Table:
    columns = _columns(rows, width)
    table = Table(title=title(rows, cores), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        left = column.title == "contender"
        table.add_column(
            column.title,
            justify="left" if left else "right",
            no_wrap=not left,
            overflow="fold",
            min_width=column.width if left else None,
        )
    before = None
    for row in rows:
        if before is not None and row.bytes != before.bytes:
            table.add_section()
        same = before is not None and row.bytes == before.bytes
        cells = [Text("" if same and column.title == "bytes" else column.cell(row)) for column in columns]
        if row.error is not None or row.correct is False:
            cells = [Text(cell.plain, style="red") for cell in cells]
        table.add_row(*cells)
        before = row
    return table


def _columns(rows: Sequence[Measured], width: int) -> list[_Column]:
    def figure(index: int) -> Callable[[Measured], str]:
        return lambda row: figures(row)[index]

    def against(name: str) -> Callable[[Measured], str]:
        def cell(row: Measured) -> str:
            found = ratio(row, at_size(rows, name, row.bytes))
            return "" if found is None else units.significant(found, 3 if found >= 1 else 2)

        return cell

    name = max(10, *(min(16, len(row.contender)) for row in rows))
    found = [
        _Column("bytes", 8, lambda row: units.decimal_size(row.bytes), 0),
        _Column("contender", name, lambda row: broken(row.contender, name), 0),
        _Column("median", 7, lambda row: "failed" if row.error is not None else figures(row)[0], 0),
        _Column("p99", 7, figure(1), 5),
        _Column("busbw", 10, figure(2), 3),
        _Column("CPU", 6, figure(3), 4),
        _Column("limit", 5, figure(4), 2),
    ]
    found += [_Column(_ratio_title(name), 6, against(name), 0) for name in peers_of(rows)]
    found.append(_Column("ok", 3, figure(5), 0))

    def taken(column: _Column) -> int:
        return max(column.width, *map(len, column.title.splitlines())) + 2

    return fitting(found, lambda columns: sum(map(taken, columns)) <= width)


def _ratio_title(peer: str) -> str:
    """In two lines, so that the column stays narrow."""
    library, _, algorithm = peer.partition(":")
    return f"x {library}\n{algorithm}"


def _errors(rows: Sequence[Measured]) -> list[Text]:
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.error is not None:
            found.setdefault((row.contender, row.error), []).append(units.decimal_size(row.bytes))
    return [Text(f"{name}, {', '.join(sizes)}: {error}", style="red") for (name, error), sizes in found.items()]
