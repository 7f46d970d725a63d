"""A predicted workload as one HTML page that needs nothing else, in the style of a bench's page.

Owns the words and the order of the page; ``bench.html.j2`` puts its tables into ``page.html.j2``.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import svg, units
from .figures import Key, strategy_styles
from .forecast_charts import all_charts
from .forecast_rows import Predicted, Prediction
from .forecast_table import LEGEND, findings
from .frame import Line, Section, fill, origin_facts

_HEADS = ("iteration", "low", "high", "img/s", "efficiency", "comm", "exposed", "sent", "bottleneck")
_CONSTANTS = ("value", "low", "high", "measured", "source")


def render(result: Prediction) -> str:
    """The page as HTML text."""
    networks = list(dict.fromkeys(row.network for row in result.rows))
    return fill(
        "bench.html.j2",
        title=f"Syncline: predicted {result.workload}",
        heading=f"{result.workload}, predicted on {', '.join(networks)}",
        summary="Simulated iterations, not measurements: what they rest on stands below the charts.",
        origin="What this rests on",
        facts=(
            ("workload", result.workload),
            ("to be known", " ".join(result.warnings)),
            ("computed", result.started),
            *origin_facts(result),
        ),
        reading=" ".join((LEGEND, *findings(result))),
        columns=("", "workers"),
        verdicts=(),
        sections=(*(_rows(result, network) for network in networks), *(_stated(result, one) for one in networks)),
        charts=all_charts(result),
    )


def _rows(result: Prediction, network: str) -> Section:
    rows = [row for row in result.rows if row.network == network]
    names = [row.requested for row in rows]
    lines = tuple(
        Line(Key(row.requested, svg.css(style.color), style.dash), f"{row.workers:,}", _cells(row), None, row.chosen)
        for row, style in zip(rows, strategy_styles(names), strict=True)
    )
    return Section(f"Iterations, {network}", _HEADS, lines)


def _cells(row: Predicted) -> tuple[str, ...]:
    return (
        *map(units.seconds, (row.iteration_s, row.low_s, row.high_s)),
        units.rate(row.images_per_s),
        units.percent(row.scaling_efficiency),
        *map(units.seconds, (row.comm_s, row.exposed_comm_s)),
        units.size(row.bytes_sent_per_step),
        row.bottleneck,
    )


def _stated(result: Prediction, network: str) -> Section:
    found: Sequence[Line] = [
        Line(
            Key(one.name, "currentColor"),
            "",
            (
                f"{one.value:.4g} s",
                f"{one.low:.4g} s",
                f"{one.high:.4g} s",
                "yes" if one.measured else "no",
                one.source,
            ),
            None,
            None,
        )
        for one in result.constants
        if one.network == network
    ]
    return Section(f"Constants, {network}", _CONSTANTS, tuple(found))
