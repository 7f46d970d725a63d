"""A predicted workload as a table for the terminal, and in words what its numbers rest on.

Owns which columns fit: a narrow terminal loses the price, then what is sent, waited for and scaled, never a time, its
interval or the bottleneck.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import units
from .columns import Column, grouped_table
from .forecast_rows import Predicted, Prediction

LEGEND = (
    "iter ms: of an iteration; low, high: where it is expected. eff: scaling efficiency, against one worker there."
    " comm: exchanges on the busiest of what they use; exp: what the training thread waits for them. sent: by a worker"
    " in an iteration. price: of an epoch."
)


_COLUMNS: tuple[Column[Predicted], ...] = (
    Column("W", lambda row: f"{row.workers:,}", 0),
    Column("iter ms", lambda row: units.milliseconds(row.iteration_s), 0),
    Column("low", lambda row: units.milliseconds(row.low_s), 0),
    Column("high", lambda row: units.milliseconds(row.high_s), 0),
    Column("img/s", lambda row: units.rate(row.images_per_s), 5),
    Column("eff %", lambda row: units.percent(row.scaling_efficiency, 0, ""), 1),
    Column("comm ms", lambda row: units.milliseconds(row.comm_s), 4),
    Column("exp ms", lambda row: units.milliseconds(row.exposed_comm_s), 2),
    Column("sent", lambda row: units.size(row.bytes_sent_per_step), 6),
    Column("price", lambda row: _price(row), 7, lambda row: row.price is not None),
    Column("bottleneck", lambda row: row.bottleneck, 0, text=True),
)


def render(result: Prediction, width: int) -> RenderableType:
    """A table for each network, the legend, and then what is to be known of them."""
    parts: list[RenderableType] = []
    for network in dict.fromkeys(row.network for row in result.rows):
        rows = [row for row in result.rows if row.network == network]
        parts += [Text(f"{result.workload} on {network}"), _table(rows, width)]
    parts += [Text(line, style="dim") for line in (LEGEND, *findings(result), *result.warnings)]
    return Group(*parts)


def findings(result: Prediction) -> list[str]:
    """Bottlenecks of the most workers, knees, winners and where compression pays, in words."""
    lines = []
    most = max(row.workers for row in result.rows)
    networks = len({row.network for row in result.rows}) > 1

    def on(network: object) -> str:
        return f" on {network}" if networks else ""

    for row in result.rows:
        if row.workers == most:
            lines.append(f"{row.requested}{on(row.network)}, {most} workers: {row.bottleneck}. {_capital(row.remedy)}.")
    for row in result.rows:
        if row.workers == most and (row.chosen or row.note):
            said = "; ".join(text for text in (row.chosen, row.note) if text)
            lines.append(f"{row.requested}{on(row.network)}: {said}.")
    for knee in result.knees:
        at = knee["workers"]
        where = f"from {at} workers on a doubling brings less than 1.5 times" if at else "every doubling brings as much"
        lines.append(f"{knee['strategy']}{on(knee['network'])}: {where}.")
    for won in result.winners:
        clear = "" if won["clear"] else ", within the interval of others"
        lines.append(f"Fastest on {won['workers']} workers{on(won['network'])}: {won['strategy']}{clear}.")
    for even in result.break_even:
        where = even["where"]
        if even["below_bit_per_s"] is not None:
            where = f"below {units.link_rate(even['below_bit_per_s'])}"
        beats = f"{even['strategy']}{on(even['network'])} beats itself without the codec {where}"
        lines.append(f"{beats}, on {even['workers']} workers.")
    return lines


def _price(row: Predicted) -> str:
    return units.MISSING if row.price is None else units.significant(row.price)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _table(rows: Sequence[Predicted], width: int) -> Table:
    return grouped_table("strategy", lambda row: row.requested, _COLUMNS, rows, width, lambda row: row.workers)
