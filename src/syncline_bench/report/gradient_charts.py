"""Rows of ``syncline bench gradients`` as bars: an iteration's time, the bare exchange apart from what a form adds.

Owns what is drawn; figures and colours are those of ``figures``.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl

from . import svg, units
from .figures import PALETTE, RC, Chart, Key, bars_figure, drawable, label_bar, name_bar
from .gradient_rows import GradientResult, GradientRow, places
from .gradient_table import title

BARE_COLOR, ADDED_COLOR = PALETTE[0], PALETTE[4]

_CAPTION = (
    "Each bar is the median of an iteration that computes nothing, split into what it takes when no gradient is moved "
    "and what the form adds; the tick in it is where the form's limit, its passes over memory at the speed of plain "
    "copies, would end it. Shorter is faster."
)
_KEYS = (Key("autograd and the exchange", BARE_COLOR), Key("added by the form", ADDED_COLOR))


def all_charts(result: GradientResult) -> tuple[Chart, ...]:
    """A chart for each place that has figures."""
    with mpl.rc_context(RC):  # type: ignore[arg-type]
        found = [_bars(tuple(drawable(row) for row in rows), title(rows, result.cores)) for rows in places(result.rows)]
    return tuple(chart for chart in found if chart is not None)


def _bars(rows: Sequence[GradientRow], heading: str) -> Chart | None:
    shown = [row for row in rows if row.median_s is not None]
    if not shown:
        return None
    figure, axes = bars_figure(len(shown))
    for place, row in enumerate(shown):
        total = (row.median_s or 0.0) * 1e3
        added = min(total, max(0.0, (row.added_s or 0.0) * 1e3))
        for left, width, color in ((0.0, total - added, BARE_COLOR), (total - added, added, ADDED_COLOR)):
            axes.barh(place, width, left=left, color=color, height=0.5, edgecolor=svg.PAPER, lw=0.4)
        if row.limit_s:
            end = total - added + row.limit_s * 1e3
            axes.plot([end, end], [place - 0.25, place + 0.25], color=svg.INK, linewidth=1.0)
        name_bar(axes, place, row.form)
        label_bar(axes, total, place, units.seconds(row.median_s))
    axes.set_xlabel("milliseconds per iteration")
    axes.margins(x=0.2)
    return Chart(heading, _CAPTION, svg.render(figure, heading), _KEYS)
