"""Result rows as charts: SVG text to be put into a page, one strategy one colour everywhere.

Owns what is drawn and how; knows neither the page nor how rows were measured. Colours are those of Okabe and Ito
("Color universal design", 2008), which readers with any common colour vision can tell apart, and a grey; lines differ
by dash pattern as well, since strategies that compute the same thing lie on top of each other. The single worker has
the colour of the text. Figures are matplotlib figure objects (no pyplot state), drawn narrow so that their text stays
readable on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import cycle
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator, NullFormatter, PercentFormatter

from . import svg, units
from .bench_rows import Measured
from .rows import BASELINE, Point, Result, Row

_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
_DASHES = ("6 2", "2 2", "8 2 2 2", "10 3", "4 1 1 1")
_WIDTH_IN = 4.6
_LEAST, _MOST = 1e-30, 1e30
"""Numbers that an axis can show, in whatever unit."""

Drawn = TypeVar("Drawn", Row, Point, Measured)

RC = {
    "axes.axisbelow": True,
    "axes.edgecolor": svg.INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": svg.INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 9.0,
    "grid.color": svg.INK,
    "grid.alpha": 0.15,
    "hatch.linewidth": 0.7,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "syncline",
    "text.color": svg.INK,
    # A strategy's text is shown as it is, not read as a formula.
    "text.parse_math": False,
    "xtick.color": svg.INK,
    "ytick.color": svg.INK,
}


@dataclass(frozen=True)
class Style:
    """How one strategy is drawn: a CSS colour, an SVG dash pattern (empty: solid) and a line width in points."""

    color: str
    dash: str
    width: float


@dataclass(frozen=True)
class Key:
    """One entry of a chart's legend."""

    label: str
    color: str
    dash: str = ""
    hatched: bool = False


@dataclass(frozen=True)
class Chart:
    """One drawn chart: its heading, one sentence on how to read it, its legend, and its SVG text."""

    title: str
    caption: str
    svg: str
    keys: tuple[Key, ...] = ()
    line_keys: bool = False


@dataclass(frozen=True)
class Stage:
    """A part of an iteration as the stacked bars show it."""

    field: str
    label: str
    color: str
    hatched: bool = False


STAGE_STYLES = (
    Stage("loading_s", "loading", "#E69F00"),
    Stage("h2d_s", "copy to device", "#CC79A7"),
    Stage("forward_s", "forward", "#56B4E9"),
    Stage("backward_s", "backward", "#0072B2"),
    Stage("update_s", "update", "#009E73"),
    Stage("exposed_comm_s", "exposed communication", "#D55E00", hatched=True),
)
_REST = Stage("", "rest", "#999999")


def styles(rows: Sequence[Row]) -> tuple[Style, ...]:
    """A style for every row, in order; later lines are thinner, so that they show on top of equal ones."""
    others = iter(line_styles(sum(row.strategy != BASELINE for row in rows)))
    drawn = (Style(svg.INK, "", 0.0) if row.strategy == BASELINE else next(others) for row in rows)
    return tuple(replace(style, width=max(1.0, 2.6 - 0.5 * index)) for index, style in enumerate(drawn))


def line_styles(count: int, width: float = 1.6) -> tuple[Style, ...]:
    """Styles for so many lines, told apart by colour and dash pattern together."""
    pairs = zip(cycle(_PALETTE), cycle(_DASHES), range(count), strict=False)
    return tuple(Style(color, dash, width) for color, dash, _ in pairs)


def drawable(row: Drawn) -> Drawn:
    """A row, or a point of a curve, without the numbers that no axis can show: None in their place.

    A training that diverges measures infinities and what is next to them; the table and the page's text have those.
    """
    return replace(row, **{item.name: _finite(getattr(row, item.name)) for item in fields(row)})


def _finite(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_finite(item) or 0.0 if isinstance(item, float) else _finite(item) for item in value)
    if isinstance(value, Point):
        return drawable(value)
    if isinstance(value, float) and value != 0 and not _LEAST < abs(value) < _MOST:  # false for not-a-number
        return None
    return value


def all_charts(result: Result) -> tuple[Chart, ...]:
    """Every chart that the rows have data for, in reading order."""
    result = replace(result, rows=tuple(drawable(row) for row in result.rows))
    makers: tuple[Callable[[Result], list[Chart]], ...] = (_curves, _stages, _wire, _traffic)
    with mpl.rc_context(RC):  # type: ignore[arg-type]
        return tuple(chart for make in makers for chart in make(result))


def _curves(result: Result) -> list[Chart]:
    if result.replayed:
        return []  # replayed layers learn nothing
    drawn = [
        _curve(
            result,
            "Training loss",
            "Each line is one strategy's mean loss over all workers, against the iteration; strategies that compute "
            "the same update lie on top of each other (the scale is logarithmic where the loss falls far).",
            "iteration",
            lambda point: (point.iteration, point.loss),
        ),
        _curve(
            result,
            "Test accuracy",
            "The share of test images that the model of rank 0 gets right, against the iteration; the lines should "
            "end at the same height.",
            "iteration",
            lambda point: (point.iteration, point.accuracy),
            share=True,
        ),
        _curve(
            result,
            "Test accuracy over time",
            "The same accuracy against the seconds spent in iterations: the strategy further to the left gets there "
            "sooner.",
            "training time (s)",
            lambda point: (point.seconds, point.accuracy),
            share=True,
        ),
    ]
    return [chart for chart in drawn if chart is not None]


def _curve(
    result: Result,
    title: str,
    caption: str,
    xlabel: str,
    values: Callable[[Point], tuple[float | None, float | None]],
    share: bool = False,
) -> Chart | None:
    figure, axes = new_figure(2.9)
    keys, lows, highs = [], [], []
    for row, style in zip(result.rows, styles(result.rows), strict=True):
        points = [(x, y) for x, y in map(values, row.curve) if x is not None and y is not None]
        if not points:
            continue
        pattern = (0, tuple(float(part) for part in style.dash.split())) if style.dash else "-"
        marker = "o" if len(points) < 30 else None
        xs, ys = zip(*points, strict=True)
        lows.append(min(ys))
        highs.append(max(ys))
        axes.plot(xs, ys, color=style.color, linewidth=style.width, linestyle=pattern, marker=marker, markersize=2.5)
        keys.append(Key(row.strategy, svg.css(style.color), style.dash))
    if not keys:
        return None
    axes.set_xlabel(xlabel)
    axes.set_xlim(left=0)
    if share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        axes.set_ylim(top=min(1.0, axes.get_ylim()[1]))
    elif min(lows) > 0 and max(highs) > 100 * min(lows):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    return Chart(title, caption, svg.render(figure, title), tuple(keys), line_keys=True)


def _stages(result: Result) -> list[Chart]:
    rows = [row for row in result.rows if row.iteration_s is not None]
    if not rows:
        return []
    figure, axes = _bars_figure(len(rows))
    for place, row in enumerate(rows):
        left = 0.0
        for stage in STAGE_STYLES:
            width = (getattr(row, stage.field) or 0.0) * 1e3
            hatch = "////" if stage.hatched else None
            axes.barh(place, width, left=left, color=stage.color, height=0.5, hatch=hatch, edgecolor=svg.PAPER, lw=0.4)
            left += width
        total = (row.iteration_s or 0.0) * 1e3
        if total > left:
            axes.barh(place, total - left, left=left, color=_REST.color, height=0.5, edgecolor=svg.PAPER, lw=0.4)
        _name_bar(axes, place, row.strategy)
        _label_bar(axes, max(left, total), place, units.seconds(row.iteration_s))
    axes.set_xlabel("milliseconds per iteration")
    axes.margins(x=0.2)
    title = "Time per iteration"
    caption = (
        "Each bar stacks the medians of an iteration's stages and ends, with its figure, at the median of whole "
        "iterations; the hatched part is the time for which the training thread was blocked in communication, and "
        "rest is what the medians of the stages, which need not add up, leave."
    )
    used = [stage for stage in STAGE_STYLES if any(getattr(row, stage.field) for row in rows)]
    used += [_REST] if any(_rest_s(row) > 0.005 * (row.iteration_s or 0.0) for row in rows) else []
    keys = tuple(Key(stage.label, stage.color, hatched=stage.hatched) for stage in used)
    return [Chart(title, caption, svg.render(figure, title), keys)]


def _rest_s(row: Row) -> float:
    return (row.iteration_s or 0.0) - sum(getattr(row, stage.field) or 0.0 for stage in STAGE_STYLES)


def _wire(result: Result) -> list[Chart]:
    pairs = list(zip(result.rows, styles(result.rows), strict=True))
    shown = [(row, style) for row, style in pairs if row.bytes_sent_per_step is not None and row.strategy != BASELINE]
    if not shown:
        return []
    scale, unit = units.size_unit(max(row.bytes_sent_per_step or 0.0 for row, _ in shown))
    figure, axes = _bars_figure(len(shown))
    for place, (row, style) in enumerate(shown):
        value = (row.bytes_sent_per_step or 0.0) / scale
        axes.barh(place, value, color=style.color, height=0.5)
        _name_bar(axes, place, row.strategy)
        _label_bar(axes, value, place, units.size(row.bytes_sent_per_step))
    axes.margins(x=0.22)
    axes.set_xlabel(f"{unit} sent per worker and iteration")
    title = "Bytes on the wire"
    caption = (
        "What one worker sends in one iteration, counted at the transport with all headers (median over workers); "
        "what servers send is in the traffic charts."
    )
    return [Chart(title, caption, svg.render(figure, title))]


def _traffic(result: Result) -> list[Chart]:
    rows = [row for row in result.rows if len(row.traffic) > 1]
    top = max((value for row in rows for line in row.traffic for value in line), default=0.0)
    if top <= 0:
        return []
    return [_heat_map(row, top) for row in rows]


def _heat_map(row: Row, top: float) -> Chart:
    count = len(row.traffic)
    labels = [str(rank) for rank in range(row.workers)] + [f"S{index}" for index in range(count - row.workers)]
    figure, axes = new_figure(3.9)
    axes.grid(visible=False)
    cells = [[value if value > 0 else float("nan") for value in line] for line in row.traffic]
    mesh = axes.pcolormesh(cells, cmap=_shades(), vmin=0, vmax=top)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    if count <= 8:
        for source, line in enumerate(row.traffic):
            for target, value in enumerate(line):
                _annotate(axes, source, target, value, top, count)
    every = max(1, count // 16)
    ticks = range(0, count, every)
    axes.set_xticks([tick + 0.5 for tick in ticks], [labels[tick] for tick in ticks])
    axes.set_yticks([tick + 0.5 for tick in ticks], [labels[tick] for tick in ticks])
    axes.tick_params(length=0)
    axes.set_xlabel("to")
    axes.set_ylabel("from")
    scale, unit = units.size_unit(top)
    bar = figure.colorbar(mesh, ax=axes, shrink=0.75, format=FuncFormatter(lambda value, _: f"{value / scale:g}"))
    bar.locator = MultipleLocator(scale * _tick_step(top / scale))
    bar.set_label(f"{unit} per iteration")
    bar.outline.set_visible(False)
    title = f"Who talked to whom: {row.strategy}"
    servers = ", S marks a server" if count > row.workers else ""
    caption = (
        f"Bytes per iteration from the process of each line to the process of each column (numbers are workers{servers}"
        "; an empty cell means no traffic); all these charts share one colour scale."
    )
    return Chart(title, caption, svg.render(figure, title))


def _shades() -> ListedColormap:
    """From the page's own background to blue, so that a little traffic looks like little in every colour scheme."""
    red, green, blue = to_rgb(_PALETTE[0])
    # A few levels only: a colour bar of many becomes an embedded bitmap.
    return ListedColormap([(red, green, blue, level / 23) for level in range(24)])


def _annotate(axes: Axes, source: int, target: int, value: float, top: float, count: int) -> None:
    if value <= 0:
        return
    color = "#ffffff" if value > 0.75 * top else svg.INK
    text = units.size(value).replace(" ", "\n")
    size = 8.0 if count <= 5 else 6.5
    axes.text(target + 0.5, source + 0.5, text, ha="center", va="center", color=color, fontsize=size)


def new_figure(height_in: float) -> tuple[Figure, Axes]:
    """An empty figure as wide as all charts; to be drawn inside ``rc_context(RC)``."""
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    return figure, figure.subplots()


def _bars_figure(count: int) -> tuple[Figure, Axes]:
    figure, axes = new_figure(0.75 + 0.55 * count)
    axes.set_ylim(count - 0.5, -0.65)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    return figure, axes


def _name_bar(axes: Axes, place: int, strategy: str) -> None:
    # Above its bar instead of beside it: a strategy's text may be longer than any margin.
    axes.text(0, place - 0.3, _cut(strategy, 60), va="bottom", ha="left")


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _label_bar(axes: Axes, end: float, place: int, text: str) -> None:
    axes.annotate(text, (end, place), xytext=(3, 0), textcoords="offset points", va="center")


def _tick_step(top: float) -> float:
    """A round step that divides 0 to ``top`` into at most five parts."""
    power = 10.0 ** math.floor(math.log10(top / 5))
    return next(step * power for step in (1, 2, 5, 10) if step * power * 5 >= top)
