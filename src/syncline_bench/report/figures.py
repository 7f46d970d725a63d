"""The parts of all charts: styles, lines, stacked bars, matrices, and the inline SVG.

Distinguishes lines: one strategy has one colour everywhere. Colours are from Okabe and Ito ("Color universal design",
2008), which readers with any common colour vision can tell apart, and a grey; lines differ by dash pattern as well,
because the lines of strategies that compute the same coincide. The single worker has the colour of the text. Figures
are matplotlib figure objects (no pyplot state), drawn narrow so that their text stays readable on a phone.

Also turns a figure into inline SVG: no namespaces, scripts, comments, dates or document-wide styles; ids made unique
with a prefix, since ids are per page and matplotlib numbers them per figure; the page's own text and background colours
in place of two fixed ones, so that a chart follows the light or dark scheme of the page around it.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import dataclass, fields, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from .comparison import BASELINE, Point

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

INK = "#010203"
"""Stands for the page's text colour."""
PAPER = "#fdfcfb"
"""Stands for the page's background colour."""
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
BAND_ALPHA = 0.18
_CSS = {INK: "currentColor", PAPER: "var(--paper)"}
_DASHES = ("6 2", "2 2", "8 2 2 2", "10 3", "4 1 1 1")
_WIDTH_IN = 4.6
_LEAST, _MOST = 1e-30, 1e30
"""Numbers that an axis can show, in whatever unit."""
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_WRITTEN = 8
"""Cells of matrices of up to this many processes contain their figures."""

Drawn = TypeVar("Drawn", bound="DataclassInstance")
Matrix = Sequence[Sequence[float]]

RC = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 9.0,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "hatch.linewidth": 0.7,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "syncline",
    "text.color": INK,
    # A strategy's text is shown as it is, not read as a formula.
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True)
class Style:
    """The style of one strategy: a CSS colour, an SVG dash pattern (empty: solid) and a line width in points."""

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
class Curve:
    """One line: its heights and the band around it, if any, at every place."""

    label: str
    style: Style
    xs: Sequence[float]
    ys: Sequence[float]
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()

    @property
    def key(self) -> Key:
        """Its entry in the legend."""
        return Key(self.label, css(self.style.color), self.style.dash)


@dataclass(frozen=True)
class Bar:
    """One bar of parts, each with its width, with a figure behind its end; ``tick`` marks a place in it."""

    name: str
    parts: Sequence[tuple[Key, float]]
    figure: str
    tick: float | None = None


@dataclass(frozen=True)
class Chart:
    """One drawn chart: its heading, one sentence on how to read it, its legend, and its SVG text."""

    title: str
    caption: str
    svg: str
    keys: tuple[Key, ...] = ()
    line_keys: bool = False


def styled() -> ContextDecorator:
    """The decorator of functions that draw."""
    context: AbstractContextManager[None] = mpl.rc_context(RC)  # type: ignore[arg-type]
    assert isinstance(context, ContextDecorator)
    return context


def strategy_styles(strategies: Sequence[str]) -> tuple[Style, ...]:
    """A style for every strategy, in order, the same one for the same strategy.

    Later lines are thinner, so that they show on top of equal ones.
    """
    distinct = dict.fromkeys(strategies)
    others = iter(line_styles(sum(strategy != BASELINE for strategy in distinct)))
    drawn = {text: Style(INK, "", 0.0) if text == BASELINE else next(others) for text in distinct}
    styles = {
        text: replace(style, width=max(1.0, 2.6 - 0.5 * index)) for index, (text, style) in enumerate(drawn.items())
    }
    return tuple(styles[text] for text in strategies)


def line_styles(count: int) -> tuple[Style, ...]:
    """Styles for ``count`` lines, distinguished by colour and dash pattern together."""
    pairs = zip(cycle(PALETTE), cycle(_DASHES), range(count), strict=False)
    return tuple(Style(color, dash, 1.6) for color, dash, _ in pairs)


def drawable(row: Drawn) -> Drawn:
    """A row, or a point of a curve, with None for numbers that no axis can show.

    A diverging training measures infinities and huge numbers; the table and the page's text contain these.
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


def new_figure(height_in: float) -> tuple[Figure, Axes]:
    """An empty figure as wide as all charts; to be drawn inside ``rc_context(RC)``."""
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    return figure, figure.subplots()


def line_chart(
    title: str,
    caption: str,
    curves: Sequence[Curve],
    finish: Callable[[Axes], object],
    *,
    height_in: float = 2.9,
    marker: float = 2.5,
    keys: Sequence[Key] = (),
) -> list[Chart]:
    """A chart of the curves that have points; None if none has. ``finish`` sets up the axes, and ``keys`` explain its
    additions."""
    curves = [curve for curve in curves if len(curve.xs)]
    if not curves:
        return []
    figure, axes = new_figure(height_in)
    for curve in curves:
        color = curve.style.color
        if curve.lows != curve.highs:
            axes.fill_between(curve.xs, curve.lows, curve.highs, color=color, alpha=BAND_ALPHA, linewidth=0)
        axes.plot(
            curve.xs,
            curve.ys,
            color=color,
            linewidth=curve.style.width,
            linestyle=pattern(curve.style.dash),
            marker="o" if len(curve.xs) < 30 else None,
            markersize=marker,
        )
    finish(axes)
    legend = (*(curve.key for curve in curves), *keys)
    return [Chart(title, caption, svg(figure, title), legend, line_keys=True)]


def pattern(dash: str) -> str | tuple[float, tuple[float, ...]]:
    """An SVG dash pattern as matplotlib has it."""
    return (0, tuple(map(float, dash.split()))) if dash else "-"


def bar_chart(
    title: str, caption: str, bars: Sequence[Bar], across: str, *, keys: Sequence[Key] = (), margin: float = 0.2
) -> list[Chart]:
    """Horizontal bars of stacked parts, one below the other; none without any."""
    if not bars:
        return []
    figure, axes = new_figure(0.75 + 0.55 * len(bars))
    axes.set_ylim(len(bars) - 0.5, -0.65)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    for place, bar in enumerate(bars):
        left = 0.0
        for part, width in bar.parts:
            if not width:
                continue  # an empty part at the end would leave no margin for the figure
            hatch = "////" if part.hatched else None
            axes.barh(place, width, left=left, color=part.color, height=0.5, hatch=hatch, edgecolor=PAPER, lw=0.4)
            left += width
        if bar.tick is not None:
            axes.plot([bar.tick] * 2, [place - 0.25, place + 0.25], color=INK, linewidth=1.0)
        # Above its bar instead of beside it: a strategy's text may be longer than any margin.
        name = bar.name if len(bar.name) <= 60 else f"{bar.name[:57]}..."
        axes.text(0, place - 0.3, name, va="bottom", ha="left")
        axes.annotate(bar.figure, (left, place), xytext=(3, 0), textcoords="offset points", va="center")
    axes.set_xlabel(across)
    axes.margins(x=margin)
    return [Chart(title, caption, svg(figure, title), tuple(keys))]


def heat_map(
    matrix: Matrix,
    names: Sequence[str],
    top: float,
    *,
    title: str,
    caption: str,
    lines: str,
    columns: str,
    measure: str,
    scale: float,
    write: Callable[[float], str],
) -> Chart:
    """The chart, to be made inside ``rc_context(RC)``; ``lines`` and ``columns`` are the axes' labels.

    ``top`` is the value with the darkest cell, above 0. The bar next to it shows ``measure`` in units of ``scale``;
    ``write`` returns a cell's text. Cells that are 0 stay empty.
    """
    count = len(matrix)
    figure, axes = new_figure(3.9)
    axes.grid(visible=False)
    cells = [[value if value > 0 else float("nan") for value in line] for line in matrix]
    mesh = axes.pcolormesh(cells, cmap=_shades(), vmin=0, vmax=top)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    written = [(x, y, value) for y, line in enumerate(matrix) for x, value in enumerate(line) if value > 0]
    for x, y, value in written if count <= _WRITTEN else ():
        look: dict[str, Any] = {
            "color": "#ffffff" if value > 0.75 * top else INK,
            "fontsize": 8.0 if count <= 5 else 6.5,
        }
        axes.text(x + 0.5, y + 0.5, write(value).replace(" ", "\n"), ha="center", va="center", **look)
    every = max(1, count // 16)
    ticks = range(0, count, every)
    axes.set_xticks([tick + 0.5 for tick in ticks], [names[tick] for tick in ticks])
    axes.set_yticks([tick + 0.5 for tick in ticks], [names[tick] for tick in ticks])
    axes.tick_params(length=0)
    axes.set_xlabel(columns)
    axes.set_ylabel(lines)
    bar = figure.colorbar(mesh, ax=axes, shrink=0.75, format=FuncFormatter(lambda value, _: f"{value / scale:g}"))
    most, power = top / scale, 10.0 ** math.floor(math.log10(top / scale / 5))
    # A round step that divides 0 to ``top`` into at most five parts.
    bar.locator = MultipleLocator(scale * next(step * power for step in (1, 2, 5, 10) if step * power * 5 >= most))
    bar.set_label(measure)
    bar.outline.set_visible(False)
    return Chart(title, caption, svg(figure, title))


def _shades() -> ListedColormap:
    """From the page's background to blue, so that small values look small in every colour scheme."""
    red, green, blue = to_rgb(PALETTE[0])
    # A few levels only: a colour bar of many becomes an embedded bitmap.
    return ListedColormap([(red, green, blue, level / 23) for level in range(24)])


def css(color: str) -> str:
    """The CSS form of a colour used in a chart."""
    return _CSS.get(color, color)


def svg(figure: Figure, title: str) -> str:
    """The figure as an ``<svg>`` element that fills the available width; ``title`` is for screen readers."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ET.fromstring(buffer.getvalue())
    prefix = "c" + hashlib.sha256(title.encode()).hexdigest()[:8]
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {
            name.rpartition("}")[2]: _value(name.rpartition("}")[2], value, prefix)
            for name, value in element.attrib.items()
        }
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.set("role", "img")
    # The declarations of matplotlib's removed style sheet, which applied to every element.
    root.set("style", "stroke-linejoin:round;stroke-linecap:butt")
    label = ET.Element("title")
    label.text = title
    root.insert(0, label)
    return ET.tostring(root, encoding="unicode")


def _value(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href" and value.startswith("#"):
        return f"#{prefix}-{value[1:]}"
    value = _REFERENCE.sub(rf"url(#{prefix}-\1)", value)
    for color, replacement in _CSS.items():
        value = value.replace(color, replacement)
    return value
