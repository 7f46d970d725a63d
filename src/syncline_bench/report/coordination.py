"""How workers were coordinated, as charts: how stale their steps and pushes were, and who waited for whom.

Owns these charts and how a histogram is cut into bins. Rows whose workers keep in step have none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.ticker import PercentFormatter

from . import svg, units
from .figures import Chart, Key, new_figure, strategy_styles
from .heat_map import heat_map
from .rows import Result, Row

SINGLE, SMALL = 12, 4
"""Up to the first all numbers have a bin of their own, beyond it those up to the second."""

_GROUP = 0.8
"""What the bars of a bin take of its width."""


def coordination(result: Result) -> list[Chart]:
    """The charts that the rows have data for; to be called inside ``rc_context(RC)``."""
    stale = _histogram(
        result,
        [row.staleness for row in result.rows],
        "Staleness",
        "The share of steps, of all workers, that began so many steps ahead of the slowest worker.",
        "steps ahead of the slowest worker",
        "of all steps",
    )
    lag = _histogram(
        result,
        [row.version_lag for row in result.rows],
        "Version lag",
        "The share of pushes, of all workers, before which the weights had been updated so many times since those that "
        "the gradient was computed on.",
        "updates behind the weights",
        "of all pushes",
    )
    return [*stale, *lag, *_waits(result)]


def bins(counts: Sequence[Mapping[int, int]]) -> list[range]:
    """The numbers from 0 to the greatest: one by one, or where they are many, from ``SMALL`` on ever wider.

    So a bound is seen beside what has none.
    """
    most = max(max(found, default=0) for found in counts)
    parts = [range(number, number + 1) for number in range(min(most, SMALL if most > SINGLE else most) + 1)]
    while parts[-1].stop <= most:
        parts.append(range(parts[-1].stop, 2 * parts[-1].stop - 1))
    return parts


def shares(counts: Mapping[int, int], parts: Sequence[range]) -> list[float]:
    """What part of all lies in each of the bins."""
    total = sum(counts.values())
    return [sum(count for number, count in counts.items() if number in part) / total for part in parts]


def _histogram(
    result: Result, counts: Sequence[Mapping[int, int]], title: str, caption: str, across: str, up: str
) -> list[Chart]:
    styles = strategy_styles([result.titled(row) for row in result.rows])
    shown = [(row, style, found) for row, style, found in zip(result.rows, styles, counts, strict=True) if found]
    if not any(number for _, _, found in shown for number in found):
        return []  # all in step
    parts = bins([found for _, _, found in shown])
    figure, axes = new_figure(2.9)
    width = _GROUP / len(shown)
    keys = []
    for place, (row, style, found) in enumerate(shown):
        left = [number - _GROUP / 2 + (place + 0.5) * width for number in range(len(parts))]
        axes.bar(left, shares(found, parts), width=width, color=style.color)
        keys.append(Key(result.label(row), svg.css(style.color)))
    names = [str(part.start) if len(part) == 1 else f"{part.start}\N{EN DASH}{part[-1]}" for part in parts]
    every = 1 if len(parts) <= SINGLE + 1 else 2
    axes.set_xticks(range(0, len(parts), every), names[::every])
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return [Chart(title, caption, svg.render(figure, title), tuple(keys))]


def _waits(result: Result) -> list[Chart]:
    rows = [row for row in result.rows if any(value > 0 for line in row.waits for value in line)]
    top = max((value for row in rows for line in row.waits for value in line), default=0.0)
    return [_who_waited(row, result.label(row), top) for row in rows]


def _who_waited(row: Row, label: str, top: float) -> Chart:
    scale, unit = (1.0, "seconds") if top >= 1 else (1e-3, "milliseconds")
    return heat_map(
        row.waits,
        [str(rank) for rank in range(row.workers)],
        top,
        title=f"Who waited for whom: {label}",
        caption=(
            "For how long of the whole run the worker of each line was held up before its steps by the worker of each "
            "column; all these charts share one colour scale."
        ),
        lines="waited",
        columns="for",
        measure=f"{unit} of the run",
        scale=scale,
        write=units.seconds,
    )
