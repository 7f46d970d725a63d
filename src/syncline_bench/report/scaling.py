"""What a comparison on several numbers of workers shows against that number: communication time, and how it scales.

Owns the two charts. The figures of merit are those of Zhu, Liu and Fang (2020), communication time per iteration
against the number of nodes, and of Zhang, Ran, Lai and Liu (2021), scaling efficiency; both set parameter servers
against ring allreduce.
"""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from . import svg
from .figures import Chart, Key, Style, new_figure, strategy_styles
from .rows import BASELINE, Result, Row

Value = Callable[[Row], float | None]


def scaling(result: Result) -> list[Chart]:
    """Both charts, of strategies that were measured on two numbers of workers or more; none where there is none.

    To be called inside ``rc_context(RC)``. A peer that counts no waiting has no line in the first one.
    """
    if len(result.counts) < 2:
        return []
    drawn = [
        _chart(
            result,
            "Communication time against workers",
            "The time per iteration for which the training thread was blocked in communication, against the number of "
            "workers: what the strategy does not hide behind computation.",
            "milliseconds per iteration",
            lambda row: None if row.exposed_comm_s is None else row.exposed_comm_s * 1e3,
        ),
        _chart(
            result,
            "Scaling efficiency against workers",
            "Images per second against those of one worker times the number of workers: a strategy that costs nothing "
            "stays at 100 %.",
            "scaling efficiency",
            lambda row: row.scaling_efficiency,
            share=True,
        ),
    ]
    return [chart for chart in drawn if chart is not None]


def _chart(result: Result, title: str, caption: str, ylabel: str, value: Value, share: bool = False) -> Chart | None:
    figure, axes = new_figure(2.9)
    keys: list[Key] = []
    names = list(dict.fromkeys(result.titled(row) for row in result.rows if row.strategy != BASELINE))
    for name, style in zip(names, strategy_styles(names), strict=True):
        found = ((row.workers, value(row)) for row in result.rows if result.titled(row) == name)
        points = sorted((workers, height) for workers, height in found if height is not None)
        if points:
            _draw(axes, points, style)
            keys.append(Key(name, svg.css(style.color), style.dash))
    if not keys:
        return None
    axes.set_xlabel("workers")
    axes.set_ylabel(ylabel)
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]) if share else None)
    axes.xaxis.set_major_locator(FixedLocator(list(result.counts)))
    axes.xaxis.set_minor_locator(NullLocator())
    if share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    return Chart(title, caption, svg.render(figure, title), tuple(keys), line_keys=True)


def _draw(axes: Axes, points: list[tuple[int, float]], style: Style) -> None:
    pattern = (0, tuple(float(part) for part in style.dash.split())) if style.dash else "-"
    workers, heights = zip(*points, strict=True)
    axes.plot(workers, heights, color=style.color, linewidth=style.width, linestyle=pattern, marker="o", markersize=3.5)
