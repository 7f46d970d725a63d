"""Result rows as one table for the terminal.

Owns which columns matter at a glance, and which go first where there is no room for all: the single worker stands in
the first row, every strategy beside it on the same work. Replayed layers learn nothing: where other rows have their
accuracy, theirs have the share of the bound. The whole split of an iteration into stages is in the JSON and on the
page. A row that failed keeps its place, and its error stands below the table in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from . import units
from .breaking import broken, widest_piece
from .columns import fitting
from .rows import Result, Row

_GAP = 2
_NAME_MOST = 17
"""For wider parts of a strategy's text no column is given up."""
_EXTRA = 8
"""The rank of what is shown where there is room, and of which nothing is said where there is none."""


@dataclass(frozen=True)
class _Column:
    title: str
    cell: Callable[[Row], Text]
    means: str
    rank: int
    """The greatest goes first when there is no room; 0 stays."""
    when: Callable[[Row], object] = lambda _: True
    """Of a table in which this holds for no row the column is left out."""

    def width(self, rows: Sequence[Row]) -> int:
        return max(len(self.title), *(len(_cell(self, row)) for row in rows)) if rows else len(self.title)


_ACCURACY = _Column("acc %", lambda row: Text(units.percent(row.accuracy, 2, "")), "acc: test accuracy.", 0)
_BOUND = _Column(
    "bnd %",
    lambda row: Text(units.percent(row.of_bound, 2, "")),
    "bnd: the bound, what no iteration can be shorter than without compression, against the iteration.",
    0,
)
_COLUMNS = (
    _Column("framework", lambda row: Text(row.framework), "", 0, lambda row: row.framework != "torch"),
    _Column("W", lambda row: Text(str(row.workers)), "W: workers.", 1),
    _ACCURACY,
    _Column("img/s", lambda row: Text(units.rate(row.images_per_s)), "", 0),
    _Column(
        "eff %",
        lambda row: Text(units.percent(row.scaling_efficiency, 0, "")),
        "eff: scaling efficiency, img/s against W times the single worker's.",
        5,
    ),
    _Column("iter ms", lambda row: Text(units.milliseconds(row.iteration_s)), "", 4),
    _Column(
        "comm ms",
        lambda row: Text(units.milliseconds(row.exposed_comm_s)),
        "comm: time per iteration that the training thread was blocked in communication.",
        2,
    ),
    _Column(
        "sent",
        lambda row: Text(units.size(row.bytes_sent_per_step)),
        "sent: bytes on the wire per worker and iteration.",
        3,
    ),
    _Column(
        "cpu ms",
        lambda row: Text(units.milliseconds(row.cpu_s_per_step)),
        "cpu: processor time of all processes per iteration.",
        _EXTRA,
    ),
    _Column(
        "stale",
        lambda row: Text(staleness(row)),
        "stale: steps ahead of the slowest worker, mean (most).",
        6,
        lambda row: max(row.staleness, default=0),
    ),
    _Column(
        "wait ms",
        lambda row: Text(units.milliseconds(row.wait_s_per_step)),
        "wait: time per step that a worker was held up by others.",
        7,
        lambda row: row.wait_s_per_step,
    ),
    _Column("to acc s", lambda row: Text(_reached(row)), "", 0, lambda row: row.time_to_accuracy_s),
    _Column("equal", lambda row: _verdict(row.replicas_equal), "equal: replicas agree bit for bit.", 0),
)


def render(result: Result) -> RenderableType:
    """The table of all rows with its legend, then what failed and what to keep in mind."""
    parts: list[RenderableType] = [_Fitted(result)]
    parts += [Text(f"{result.label(row)}: {row.error}", style="red") for row in result.rows if row.error is not None]
    parts += [Text(line, style="dim") for line in remarks(result)]
    return Group(*parts)


@dataclass(frozen=True)
class _Fitted:
    """The table and its legend, as wide as the console that prints them."""

    result: Result

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = self.result.rows
        every = [_BOUND if column is _ACCURACY and self.result.replayed else column for column in _COLUMNS]
        every = [column for column in every if any(column.when(row) for row in rows) or not rows]
        columns, name = _fitting(every, rows, options.max_width)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
        table.add_column("strategy", overflow="fold", width=name)
        for column in columns:
            table.add_column(column.title, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(Text(broken(row.name, name)), *(_cell(column, row) for column in columns))
        yield table
        yield Text(" ".join(column.means for column in columns if column.means), style="dim")
        left_out = ", ".join(column.title for column in every if column not in columns and column.rank < _EXTRA)
        if left_out:
            yield Text(f"No room for {left_out}: a wider terminal shows them, and --json has them.", style="dim")


def _fitting(columns: Sequence[_Column], rows: Sequence[Row], width: int) -> tuple[list[_Column], int]:
    """The columns that fit, and the width that is left for the strategy."""
    texts = ["strategy", *(row.name for row in rows)]
    least, most = max(min(_NAME_MOST, widest_piece(text)) for text in texts), max(map(len, texts))

    def left(columns: Sequence[_Column]) -> int:
        return width - 2 - sum(column.width(rows) + _GAP for column in columns)

    found = fitting(columns, lambda columns: left(columns) >= least)
    return found, max(1, min(left(found), most))


def remarks(result: Result) -> tuple[str, ...]:
    """What a reader has to know to judge the numbers of this machine."""
    lines = []
    if result.lab is not None:
        goodput = result.goodput_bytes_per_s
        got = "" if goodput is None else f", of which one stream gets {goodput * 8 / 1e6:,.0f} Mbit/s"
        lines.append(f"Every process had a host of its own behind links of {result.lab}{got}.")
    elif result.replayed:
        lines.append(
            "The bound is loading and the trace's compute, and the link where a strategy limits its rate: nothing else"
            " does."
        )
    if result.target is not None and any(row.iteration_s is not None for row in result.rows):
        accuracy = units.percent(result.target, 0 if round(100 * result.target, 9).is_integer() else 2)
        never = [result.label(row) for row in result.rows if row.time_to_accuracy_s is None and row.error is None]
        lines.append(
            f"To acc is the training time after which the model was first seen to be {accuracy} accurate"
            + (f"; {', '.join(never)} never was." if never else ".")
        )
    lines += _launched(result)
    lines += _slowest(result)
    lines += [f"{preset}: {note}." for preset, note in _noted(result).items()]
    found = [row for row in result.rows if row.iteration_s is not None and row.exposed_comm_s is None]
    if found:
        uncounted, fused = dict.fromkeys(map(result.titled, found)), {row.step_s is not None for row in found}
        stage = " or ".join("step" if one else "backward" for one in sorted(fused))
        lines.append(f"{', '.join(uncounted)}: nobody counts waiting and bytes there; {stage} includes communication.")
    processes = max((row.workers + row.servers for row in result.rows if row.iteration_s is not None), default=0)
    if processes > result.cores:
        lines.append(
            f"Up to {processes} processes shared {result.cores} cores: the stages of the larger rows, and so their "
            "scaling, include waiting for a core."
        )
    if any(row.replicas_equal is False for row in result.rows):
        lines.append("Replicas that differ at the end are a fault, unless the strategy lets them drift on purpose.")
    return tuple(lines)


def _launched(result: Result) -> list[str]:
    """Which rows had processes that a launcher has started."""
    found: dict[str, list[str]] = {}
    for row in result.rows:
        if row.launcher != "local":
            found.setdefault(row.launcher, []).append(result.label(row))
    whole = len(result.rows)
    return [
        f"{launcher} started the processes of {'all rows' if len(rows) == whole else ', '.join(rows)}."
        for launcher, rows in found.items()
    ]


def _slowest(result: Result) -> list[str]:
    """The slowest workers, and under which strategies they were, unless they were under all."""
    measured = [row for row in result.rows if row.compute_by_rank_s]
    lines = []
    for rank in sorted({row.slowest_rank for row in measured if row.slowest_rank is not None}):
        rows = [row for row in measured if row.slowest_rank == rank]
        ends = sorted({f"{row.slower or 0.0:.1f}" for row in rows}, key=float)
        where = "" if rows == measured else f" under {', '.join(map(result.label, rows))}"
        times = " to ".join(dict.fromkeys((ends[0], ends[-1])))
        lines.append(f"Rank {rank} computes {times} times as long as the median worker{where}.")
    return lines


def _noted(result: Result) -> dict[str, str]:
    """What is not as in the original, by preset."""
    return {row.preset: row.note for row in result.rows if row.preset is not None and row.note is not None}


def _cell(column: _Column, row: Row) -> Text:
    if row.error is not None and row.iteration_s is None and column.title not in ("W", "framework"):
        return Text("failed", style="red") if column in (_ACCURACY, _BOUND) else Text(units.MISSING)
    return column.cell(row)


def staleness(row: Row) -> str:
    """By how many steps workers were ahead of the slowest: the mean, and the most."""
    mean = row.mean_staleness
    return units.MISSING if mean is None else f"{units.significant(mean, 2)} ({max(row.staleness)})"


def _reached(row: Row) -> str:
    return units.MISSING if row.time_to_accuracy_s is None else units.significant(row.time_to_accuracy_s)


def _verdict(equal: bool | None) -> Text:
    if equal is None:
        return Text(units.MISSING)
    return Text("yes", style="green") if equal else Text("NO", style="bold red")
