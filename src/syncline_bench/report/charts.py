"""A comparison's rows as charts: SVG text to be put into a page, one strategy one colour everywhere.

Owns which charts a comparison has, and its bars; knows neither the page nor how rows were measured. Figures and colours
are those of ``figures``, curves of learning those of ``curves``, curves over the number of workers those of
``scaling``, staleness and waits those of ``coordination``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import matplotlib as mpl

from . import svg, units
from .coordination import coordination
from .curves import Learner, learning
from .figures import RC, Chart, Key, bars_figure, drawable, label_bar, name_bar, strategy_styles
from .heat_map import heat_map
from .rows import BASELINE, Result, Row
from .scaling import scaling


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
    Stage("step_s", "step as one computation", "#8C6BB1"),
    Stage("exposed_comm_s", "exposed communication", "#D55E00", hatched=True),
)
_REST = Stage("", "rest", "#999999")


def all_charts(result: Result) -> tuple[Chart, ...]:
    """Every chart that the rows have data for, in reading order."""
    result = replace(result, rows=tuple(drawable(row) for row in result.rows))
    makers: tuple[Callable[[Result], list[Chart]], ...] = (_curves, _stages, scaling, coordination, _wire, _traffic)
    with mpl.rc_context(RC):  # type: ignore[arg-type]
        return tuple(chart for make in makers for chart in make(result))


def _curves(result: Result) -> list[Chart]:
    if result.replayed:
        return []  # replayed layers learn nothing
    pairs = zip(result.rows, strategy_styles([result.titled(row) for row in result.rows]), strict=True)
    return learning([Learner(result.label(row), style, (row.curve,)) for row, style in pairs], timed=True)


def _stages(result: Result) -> list[Chart]:
    rows = [row for row in result.rows if row.iteration_s is not None]
    if not rows:
        return []
    figure, axes = bars_figure(len(rows))
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
        name_bar(axes, place, result.label(row))
        label_bar(axes, max(left, total), place, units.seconds(row.iteration_s))
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
    pairs = zip(result.rows, strategy_styles([result.titled(row) for row in result.rows]), strict=True)
    shown = [(row, style) for row, style in pairs if row.bytes_sent_per_step is not None and row.strategy != BASELINE]
    if not shown:
        return []
    scale, unit = units.size_unit(max(row.bytes_sent_per_step or 0.0 for row, _ in shown))
    figure, axes = bars_figure(len(shown))
    for place, (row, style) in enumerate(shown):
        value = (row.bytes_sent_per_step or 0.0) / scale
        axes.barh(place, value, color=style.color, height=0.5)
        name_bar(axes, place, result.label(row))
        label_bar(axes, value, place, units.size(row.bytes_sent_per_step))
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
    return [_heat_map(row, result.label(row), top) for row in rows]


def _heat_map(row: Row, label: str, top: float) -> Chart:
    servers = ", S marks a server" if len(row.traffic) > row.workers else ""
    scale, unit = units.size_unit(top)
    return heat_map(
        row.traffic,
        [str(rank) for rank in range(row.workers)] + [f"S{index}" for index in range(len(row.traffic) - row.workers)],
        top,
        title=f"Who talked to whom: {label}",
        caption=(
            "Bytes per iteration from the process of each line to the process of each column (numbers are "
            f"workers{servers}; an empty cell means no traffic); all these charts share one colour scale."
        ),
        lines="from",
        columns="to",
        measure=f"{unit} per iteration",
        scale=scale,
        write=units.size,
    )
