"""Rows of ``syncline bench`` as curves: time and bus bandwidth against size, for every number of ranks.

Owns what is drawn; colours and figures are those of ``figures``. A contender has one colour and dash pattern on the
whole page. Both axes are logarithmic: a slope of 1 in the times is a bandwidth, a level part a latency.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from . import svg, units
from .bench_rows import BenchResult, Measured, places
from .bench_table import title
from .figures import RC, Chart, Key, Style, drawable, line_styles, new_figure

_TIME = (
    "Median seconds of one collective, of its slowest rank, against the size of the array. Lower is faster; the "
    "dotted line is the limit that plain copies by all ranks at once (or the link) set."
)
_BANDWIDTH = (
    "Bus bandwidth as nccl-tests count it, from the median: what every rank's link has to carry at least, per second. "
    "Higher is faster."
)
_TICKS_BYTES = tuple(10**power for power in range(1, 12))


def contender_styles(result: BenchResult) -> Mapping[str, Style]:
    """One style for every contender, in the order of the rows."""
    names = tuple(dict.fromkeys(row.contender for row in result.rows))
    return dict(zip(names, line_styles(len(names)), strict=True))


def all_charts(result: BenchResult) -> tuple[Chart, ...]:
    """Two charts for each place that has figures."""
    styles = contender_styles(result)
    found: list[Chart | None] = []
    with mpl.rc_context(RC):  # type: ignore[arg-type]
        for rows in places(tuple(drawable(row) for row in result.rows)):
            name = title(rows, result.cores)
            found.append(_curves(rows, styles, f"Time: {name}", _TIME, _milliseconds, "milliseconds", limits=True))
            found.append(_curves(rows, styles, f"Bus bandwidth: {name}", _BANDWIDTH, _gigabytes, "GB/s", limits=False))
    return tuple(chart for chart in found if chart is not None)


def _milliseconds(row: Measured) -> float | None:
    return None if row.median_s is None else row.median_s * 1e3


def _gigabytes(row: Measured) -> float | None:
    return None if row.busbw_bytes_per_s is None else row.busbw_bytes_per_s / 1e9


def _curves(
    rows: Sequence[Measured],
    styles: Mapping[str, Style],
    heading: str,
    caption: str,
    value: Callable[[Measured], float | None],
    unit: str,
    *,
    limits: bool,
) -> Chart | None:
    figure, axes = new_figure(3.4)
    keys: list[Key] = []
    for name, style in styles.items():
        points = [(row.bytes, value(row)) for row in rows if row.contender == name]
        shown = [(x, y) for x, y in points if y is not None]
        if not shown:
            continue
        xs, ys = zip(*shown, strict=True)
        pattern = (0, tuple(float(part) for part in style.dash.split()))
        axes.plot(xs, ys, color=style.color, linewidth=style.width, linestyle=pattern, marker="o", markersize=2.5)
        keys.append(Key(name, svg.css(style.color), style.dash))
    if not keys:
        return None
    if limits:
        keys += _draw_limits(axes, rows)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel(unit)
    least, most = min(row.bytes for row in rows), max(row.bytes for row in rows)
    ticks = [tick for tick in _TICKS_BYTES if least / 10 < tick < most * 10]
    axes.set_xticks(ticks, [units.decimal_size(tick) for tick in ticks])
    axes.set_xlim(least / 1.6, most * 1.6)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    if high < 100 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # powers of ten alone would be one line or two
    return Chart(heading, caption, svg.render(figure, heading), tuple(keys), line_keys=True)


def _draw_limits(axes: Axes, rows: Sequence[Measured]) -> list[Key]:
    """The limits of memory and link, each measured once per size for all rows that it holds for."""
    keys = []
    for kind, dash in (("memory", "1 2"), ("link", "1 4")):
        points = {row.bytes: row.limit_s * 1e3 for row in rows if row.limit == kind and row.limit_s is not None}
        if points:
            pattern = (0, tuple(float(part) for part in dash.split()))
            axes.plot(list(points), list(points.values()), color=svg.INK, linewidth=1.0, linestyle=pattern)
            keys.append(Key(f"limit: {kind}", svg.css(svg.INK), dash))
    return keys
