"""A matrix between processes as a chart: who did how much to whom.

Knows neither what is counted nor its unit: the caller says both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.ticker import FuncFormatter, MultipleLocator

from . import svg
from .figures import PALETTE, Chart, new_figure

Matrix = Sequence[Sequence[float]]

_WRITTEN = 8
"""Cells of matrices of up to so many processes have their figures in them."""


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
    """The chart, to be made inside ``rc_context(RC)``; ``lines`` and ``columns`` say what these are.

    ``top`` is the value with the darkest cell, above 0. The bar beside it counts ``measure`` in units of ``scale``;
    ``write`` gives a cell's text. Cells that are 0 stay empty.
    """
    count = len(matrix)
    figure, axes = new_figure(3.9)
    axes.grid(visible=False)
    cells = [[value if value > 0 else float("nan") for value in line] for line in matrix]
    mesh = axes.pcolormesh(cells, cmap=_shades(), vmin=0, vmax=top)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    if count <= _WRITTEN:
        for source, line in enumerate(matrix):
            for target, value in enumerate(line):
                _annotate(axes, source, target, value, top, count, write)
    every = max(1, count // 16)
    ticks = range(0, count, every)
    axes.set_xticks([tick + 0.5 for tick in ticks], [names[tick] for tick in ticks])
    axes.set_yticks([tick + 0.5 for tick in ticks], [names[tick] for tick in ticks])
    axes.tick_params(length=0)
    axes.set_xlabel(columns)
    axes.set_ylabel(lines)
    bar = figure.colorbar(mesh, ax=axes, shrink=0.75, format=FuncFormatter(lambda value, _: f"{value / scale:g}"))
    bar.locator = MultipleLocator(scale * _tick_step(top / scale))
    bar.set_label(measure)
    bar.outline.set_visible(False)
    return Chart(title, caption, svg.render(figure, title))


def _shades() -> ListedColormap:
    """From the page's own background to blue, so that a little looks like little in every colour scheme."""
    red, green, blue = to_rgb(PALETTE[0])
    # A few levels only: a colour bar of many becomes an embedded bitmap.
    return ListedColormap([(red, green, blue, level / 23) for level in range(24)])


def _annotate(
    axes: Axes, source: int, target: int, value: float, top: float, count: int, write: Callable[[float], str]
) -> None:
    if value <= 0:
        return
    color = "#ffffff" if value > 0.75 * top else svg.INK
    size = 8.0 if count <= 5 else 6.5
    text = write(value).replace(" ", "\n")
    axes.text(target + 0.5, source + 0.5, text, ha="center", va="center", color=color, fontsize=size)


def _tick_step(top: float) -> float:
    """A round step that divides 0 to ``top`` into at most five parts."""
    power = 10.0 ** math.floor(math.log10(top / 5))
    return next(step * power for step in (1, 2, 5, 10) if step * power * 5 >= top)
