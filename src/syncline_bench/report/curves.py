"""Curves of learning as charts: one line per strategy, of one training or over the trainings from several seeds.

Owns how points of trainings become lines: several trainings of one strategy are their median at every iteration, on a
band from the lowest to the highest. Does not know pages, nor what was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from . import svg
from .figures import Chart, Key, Style, new_figure
from .rows import Point

_BAND = " A line is the median over the seeds, its band reaches from the lowest to the highest."
_BAND_ALPHA = 0.18

Value = Callable[[Point], float | None]


@dataclass(frozen=True)
class Learner:
    """One line of the charts: a strategy, how it is drawn, and the curve of each of its trainings."""

    strategy: str
    style: Style
    trainings: tuple[tuple[Point, ...], ...]


@dataclass(frozen=True)
class Spot:
    """All trainings of a strategy at one iteration."""

    x: float
    middle: float
    lowest: float
    highest: float


def learning(learners: Sequence[Learner], *, timed: bool) -> list[Chart]:
    """Training loss and test accuracy over iterations, and with ``timed`` over the time that they took.

    To be called inside ``rc_context(RC)``; a chart that no training has points for is left out.
    """
    drawn = [
        _chart(
            learners,
            "Training loss",
            "Each line is one strategy's mean loss over all workers, against the iteration; strategies that compute "
            "the same update lie on top of each other (the scale is logarithmic where the loss falls far).",
            "iteration",
            _iteration,
            lambda point: point.loss,
        ),
        _chart(
            learners,
            "Test accuracy",
            "The share of test images that the model of rank 0 gets right, against the iteration; the lines should "
            "end at the same height.",
            "iteration",
            _iteration,
            _accuracy,
            share=True,
        ),
    ]
    if timed:
        chart = _chart(
            learners,
            "Test accuracy over time",
            "The same accuracy against the seconds spent in iterations: the strategy further to the left gets there "
            "sooner.",
            "training time (s)",
            lambda point: point.seconds,
            _accuracy,
            share=True,
        )
        drawn.append(chart)
    return [chart for chart in drawn if chart is not None]


def _iteration(point: Point) -> float:
    return point.iteration


def _accuracy(point: Point) -> float | None:
    return point.accuracy


def _chart(
    learners: Sequence[Learner],
    title: str,
    caption: str,
    xlabel: str,
    across: Value,
    upwards: Value,
    share: bool = False,
) -> Chart | None:
    figure, axes = new_figure(2.9)
    keys: list[Key] = []
    ends: list[float] = []
    for learner in learners:
        spots = spots_of(learner.trainings, across, upwards)
        if not spots:
            continue
        _draw(axes, spots, learner.style)
        ends += [end for spot in spots for end in (spot.lowest, spot.highest)]
        keys.append(Key(learner.strategy, svg.css(learner.style.color), learner.style.dash))
    if not keys:
        return None
    axes.set_xlabel(xlabel)
    axes.set_xlim(left=0)
    if share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        axes.set_ylim(top=min(1.0, axes.get_ylim()[1]))
    elif min(ends) > 0 and max(ends) > 100 * min(ends):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    several = any(len(learner.trainings) > 1 for learner in learners)
    return Chart(title, caption + _BAND * several, svg.render(figure, title), tuple(keys), line_keys=True)


def spots_of(trainings: Sequence[Sequence[Point]], across: Value, upwards: Value) -> list[Spot]:
    """What all trainings together say, iteration by iteration: of those that have both values there."""
    found: dict[int, list[tuple[float, float]]] = {}
    for point in (point for training in trainings for point in training):
        x, y = across(point), upwards(point)
        if x is not None and y is not None:
            found.setdefault(point.iteration, []).append((x, y))
    spots = []
    for _, pairs in sorted(found.items()):
        xs, ys = zip(*pairs, strict=True)
        spots.append(Spot(median(xs), median(ys), min(ys), max(ys)))
    return spots


def _draw(axes: Axes, spots: Sequence[Spot], style: Style) -> None:
    pattern = (0, tuple(float(part) for part in style.dash.split())) if style.dash else "-"
    marker = "o" if len(spots) < 30 else None
    xs, middles = [spot.x for spot in spots], [spot.middle for spot in spots]
    lows, highs = [spot.lowest for spot in spots], [spot.highest for spot in spots]
    axes.plot(xs, middles, color=style.color, linewidth=style.width, linestyle=pattern, marker=marker, markersize=2.5)
    if lows != highs:
        axes.fill_between(xs, lows, highs, color=style.color, alpha=_BAND_ALPHA, linewidth=0)
