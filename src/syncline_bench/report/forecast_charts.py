"""A predicted workload as charts: curves over the number of workers with their intervals, and stages as bars.

Owns which charts there are; figures and colours are those of ``figures``, a strategy having one colour on all networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import matplotlib as mpl
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from . import svg, units
from .charts import STAGE_STYLES as EVERY_STAGE
from .figures import RC, Chart, Key, bars_figure, label_bar, name_bar, new_figure, strategy_styles
from .forecast_rows import Predicted, Prediction

Ends = Callable[[Predicted], tuple[float, float, float]]
"""The value of a row, and its interval."""

_BAND_ALPHA = 0.18


def all_charts(result: Prediction) -> tuple[Chart, ...]:
    """Those of every network, in reading order."""
    found = []
    with mpl.rc_context(RC):  # type: ignore[arg-type]
        for network in dict.fromkeys(row.network for row in result.rows):
            rows = [row for row in result.rows if row.network == network]
            if len({row.workers for row in rows}) > 1:
                found += _curves(rows, network)
            found.append(_stages(rows, network))
    return tuple(found)


def _curves(rows: Sequence[Predicted], network: str) -> list[Chart]:
    band = " The band around a line is where it is expected."

    def efficiency(row: Predicted) -> tuple[float, float, float]:
        scale = 100 * row.scaling_efficiency * row.iteration_s
        return scale / row.iteration_s, scale / row.high_s, scale / max(row.low_s, 1e-12)

    def exposed(row: Predicted) -> tuple[float, float, float]:
        return (1e3 * row.exposed_comm_s,) * 3

    return [
        _chart(
            rows,
            f"Iteration time, {network}",
            "Milliseconds of an iteration against the number of workers." + band,
            "milliseconds per iteration",
            lambda row: (1e3 * row.iteration_s, 1e3 * row.low_s, 1e3 * row.high_s),
        ),
        _chart(
            rows,
            f"Scaling efficiency, {network}",
            "Images per second against those of one worker times the number of workers." + band,
            "scaling efficiency, %",
            efficiency,
        ),
        _chart(
            rows,
            f"Exposed communication, {network}",
            "For how long the training thread waits in an iteration: what a strategy does not hide behind computing.",
            "milliseconds per iteration",
            exposed,
        ),
    ]


def _chart(rows: Sequence[Predicted], title: str, caption: str, ylabel: str, ends: Ends) -> Chart:
    figure, axes = new_figure(2.9)
    names, keys = list(dict.fromkeys(row.requested for row in rows)), []
    for name, style in zip(names, strategy_styles(names), strict=True):
        its = sorted((row for row in rows if row.requested == name), key=lambda row: row.workers)
        workers = [row.workers for row in its]
        middle, low, high = zip(*(ends(row) for row in its), strict=True)
        pattern = (0, tuple(float(part) for part in style.dash.split())) if style.dash else "-"
        axes.fill_between(workers, low, high, color=style.color, alpha=_BAND_ALPHA, linewidth=0)
        axes.plot(
            workers, middle, color=style.color, linewidth=style.width, linestyle=pattern, marker="o", markersize=3.5
        )
        keys.append(Key(name, svg.css(style.color), style.dash))
    axes.set_xscale("log", base=2)
    axes.set_xlabel("workers")
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(FixedLocator(sorted({row.workers for row in rows})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    return Chart(title, caption, svg.render(figure, title), tuple(keys), line_keys=True)


STAGE_STYLES = tuple(stage for stage in EVERY_STAGE if stage.field != "step_s")
"""A prediction tells all parts of a step apart."""


def _stages(rows: Sequence[Predicted], network: str) -> Chart:
    most = max(row.workers for row in rows)
    shown = [row for row in rows if row.workers == most]
    figure, axes = bars_figure(len(shown))
    for place, row in enumerate(shown):
        left = 0.0
        for stage in STAGE_STYLES:
            width = 1e3 * getattr(row, stage.field)
            hatch = "////" if stage.hatched else None
            axes.barh(place, width, left=left, color=stage.color, height=0.5, hatch=hatch, edgecolor=svg.PAPER, lw=0.4)
            left += width
        name_bar(axes, place, row.requested)
        label_bar(axes, left, place, f"{units.seconds(row.iteration_s)}, {row.bottleneck}")
    axes.set_xlabel("milliseconds per iteration")
    axes.margins(x=0.3)
    title = f"Stages on {most} workers, {network}"
    caption = "Each bar stacks an iteration's stages; beside it are the whole and the bottleneck, what would save most."
    used = [stage for stage in STAGE_STYLES if any(getattr(row, stage.field) for row in shown)]
    keys = tuple(Key(stage.label, stage.color, hatched=stage.hatched) for stage in used)
    return Chart(title, caption, svg.render(figure, title), keys)
