"""What all charts are drawn with: figures, colours and dash patterns, legends, and numbers that an axis can show.

Owns how a line is told from another: one strategy has one colour everywhere. Colours are those of Okabe and Ito ("Color
universal design", 2008), which readers with any common colour vision can tell apart, and a grey; lines differ by dash
pattern as well, since strategies that compute the same thing lie on top of each other. The single worker has the
colour of the text. Figures are matplotlib figure objects (no pyplot state), drawn narrow so that their text stays
readable on a phone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import cycle
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import svg
from .bench_rows import Measured
from .gradient_rows import GradientRow
from .rows import BASELINE, Point, Row

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
_DASHES = ("6 2", "2 2", "8 2 2 2", "10 3", "4 1 1 1")
_WIDTH_IN = 4.6
_LEAST, _MOST = 1e-30, 1e30
"""Numbers that an axis can show, in whatever unit."""

Drawn = TypeVar("Drawn", Row, Point, Measured, GradientRow)

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


def strategy_styles(strategies: Sequence[str]) -> tuple[Style, ...]:
    """A style for every strategy, in order, the same one for the same strategy.

    Later lines are thinner, so that they show on top of equal ones.
    """
    distinct = dict.fromkeys(strategies)
    others = iter(line_styles(sum(strategy != BASELINE for strategy in distinct)))
    drawn = {text: Style(svg.INK, "", 0.0) if text == BASELINE else next(others) for text in distinct}
    styles = {
        text: replace(style, width=max(1.0, 2.6 - 0.5 * index)) for index, (text, style) in enumerate(drawn.items())
    }
    return tuple(styles[text] for text in strategies)


def line_styles(count: int, width: float = 1.6) -> tuple[Style, ...]:
    """Styles for so many lines, told apart by colour and dash pattern together."""
    pairs = zip(cycle(PALETTE), cycle(_DASHES), range(count), strict=False)
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


def new_figure(height_in: float) -> tuple[Figure, Axes]:
    """An empty figure as wide as all charts; to be drawn inside ``rc_context(RC)``."""
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    return figure, figure.subplots()


def bars_figure(count: int) -> tuple[Figure, Axes]:
    """An empty figure for so many horizontal bars, one below the other."""
    figure, axes = new_figure(0.75 + 0.55 * count)
    axes.set_ylim(count - 0.5, -0.65)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    return figure, axes


def name_bar(axes: Axes, place: int, name: str) -> None:
    """Write what a bar is of."""
    # Above its bar instead of beside it: a strategy's text may be longer than any margin.
    axes.text(0, place - 0.3, _cut(name, 60), va="bottom", ha="left")


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def label_bar(axes: Axes, end: float, place: int, text: str) -> None:
    """Write a bar's figure behind its end."""
    axes.annotate(text, (end, place), xytext=(3, 0), textcoords="offset points", va="center")
