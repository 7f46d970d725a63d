"""The charts of each kind of result, in reading order, and their content.

Turns points of trainings into lines, counts into bins, and stages into bars. A chart without data is left out.
``figures`` has figures, colours and SVG. Does not know pages.

The charts over the number of workers follow Zhu, Liu and Fang (2020), communication time per iteration against the
number of nodes, and Zhang, Ran, Lai and Liu (2021), scaling efficiency; both compare parameter servers with ring
allreduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
)

from . import bench, units
from .accuracy import AccuracyResult
from .bench import BenchResult, GradientResult, GradientRow, Measured
from .comparison import BASELINE, Point, Result, Row
from .explanation import Cause, Explanation, Leg
from .figures import (
    INK,
    PALETTE,
    Bar,
    Chart,
    Curve,
    Key,
    Matrix,
    Style,
    bar_chart,
    css,
    drawable,
    heat_map,
    line_chart,
    line_styles,
    new_figure,
    pattern,
    strategy_styles,
    styled,
    svg,
)
from .files import grouped
from .predictions import Predicted, Prediction

STAGES: Mapping[str, Key] = {
    "loading_s": Key("loading", "#E69F00"),
    "h2d_s": Key("copy to device", "#CC79A7"),
    "forward_s": Key("forward", "#56B4E9"),
    "backward_s": Key("backward", "#0072B2"),
    "update_s": Key("update", "#009E73"),
    "step_s": Key("step as one computation", "#8C6BB1"),
    "exposed_comm_s": Key("exposed communication", "#D55E00", hatched=True),
}
"""The parts of an iteration in the stacked bars, by their fields."""
_REST = Key("rest", "#999999")
_COST, _LEG, _AFTER = Key("", PALETTE[1]), Key("", PALETTE[0]), Key("after the change", PALETTE[3])
_SAME_STAGES = {"wait": "exposed_comm", "optimizer": "update"}
_MOST_LEGS = 8
BARE_COLOR, ADDED_COLOR = PALETTE[0], PALETTE[4]
SINGLE, SMALL = 12, 4
"""Up to the first, every number has a bin; in small results, up to the second."""
_GROUP = 0.8
"""The share of a bin's width that its bars take."""
_TICKS_BYTES = tuple(10**power for power in range(1, 12))
_OVER_SEEDS = " A line is the median over the seeds, its band reaches from the lowest to the highest."

_Timed = TypeVar("_Timed", Cause, Leg)
Value = Callable[[Point], float | None]
Learner = tuple[str, Style, Sequence[Sequence[Point]]]
"""One line of the charts: a strategy, its style, and the curve of each of its trainings."""


@styled()
def comparison_charts(result: Result) -> tuple[Chart, ...]:
    """The charts of a comparison."""
    result = replace(result, rows=tuple(drawable(row) for row in result.rows))
    styles = strategy_styles([result.titled(row) for row in result.rows])
    learners = [(result.label(row), style, (row.curve,)) for row, style in zip(result.rows, styles, strict=True)]
    return (
        *([] if result.replayed else learning(learners, timed=True)),  # replayed layers learn nothing
        *_stages(result),
        *_scaling(result),
        *_coordination(result, styles),
        *_wire(result, styles),
        *_traffic(result),
    )


@styled()
def accuracy_charts(result: AccuracyResult, styles: Sequence[Style]) -> list[Chart]:
    """Curves of learning, a line per strategy over its seeds."""
    trainings = (
        tuple(tuple(drawable(point) for point in run.curve) for run in runs if run.finished)
        for runs in result.grouped.values()
    )
    return learning(list(zip(result.grouped, styles, trainings, strict=True)), timed=False)


@styled()
def bench_charts(result: BenchResult) -> list[Chart]:
    """Times and bus bandwidth against size, for each place that has figures."""
    styles = contender_styles(result)
    return [
        chart
        for rows in bench.places([drawable(row) for row in result.rows])
        for chart in _over_sizes(rows, styles, bench.title(rows, result.cores))
    ]


@styled()
def gradient_charts(result: GradientResult) -> list[Chart]:
    """An iteration's time, split into the bare exchange and the form's addition, for each place that has figures."""
    return [
        chart for one in bench.gradients(result) for chart in _forms([drawable(row) for row in one.rows], one.title)
    ]


@styled()
def prediction_charts(result: Prediction) -> list[Chart]:
    """Curves over the number of workers, and stages, for every network."""
    found = []
    for network, rows in grouped(result.rows, lambda row: row.network).items():
        if len({row.workers for row in rows}) > 1:
            found += _predicted(rows, network)
        found += _predicted_stages(rows, network)
    return found


@styled()
def explanation_charts(found: Explanation) -> list[Chart]:
    """The costs of the causes, the iteration beside those after changes, and the critical path, as bars."""
    found = drawable(found)
    causes = [Bar(one.cause, [(_COST, 1e3 * one.seconds)], units.seconds(one.seconds)) for one in _drawn(found.causes)]
    legs = [Bar(one.text, [(_LEG, 1e3 * one.seconds)], units.seconds(one.seconds)) for one in _drawn(found.path)]
    return [
        *bar_chart(
            "What the causes cost",
            "An iteration would be shorter by this time at most. Causes overlap, so their times do not add up.",
            causes,
            "milliseconds per iteration",
        ),
        *_after_changes(found),
        *bar_chart(
            "Critical path",
            "The chain of work and messages that an iteration could not be shorter than, its longest parts.",
            legs[:_MOST_LEGS],
            "milliseconds per iteration",
        ),
    ]


def _drawn(items: Sequence[_Timed]) -> list[_Timed]:
    """Causes or parts of a path whose time an axis can show."""
    return [one for one in map(drawable, items) if (one.seconds or 0.0) > 0.0]


def _after_changes(found: Explanation) -> list[Chart]:
    if not found.iteration_s:
        return []
    parts = [(_stage(name), 1e3 * seconds) for name, seconds in (found.stages_s or {}).items() if 0 < seconds < 1e30]
    left = 1e3 * found.iteration_s - sum(width for _, width in parts)
    parts += [(_REST, max(0.0, left))]
    changes = [one for one in map(drawable, found.changes) if one.iteration_s]
    after = [Bar(one.change, [(_AFTER, 1e3 * one.iteration_s)], units.seconds(one.iteration_s)) for one in changes]
    return bar_chart(
        "An iteration, and what changes would make of it",
        "The first bar stacks the medians of the stages on the median worker. In the hatched part the training thread"
        " waited for communication.",
        [Bar("as it is", parts, units.seconds(found.iteration_s)), *after],
        "milliseconds per iteration",
        keys=[*(key for key, width in parts if width > 0.005e3 * found.iteration_s), *([_AFTER] if after else [])],
    )


def _stage(name: str) -> Key:
    """The key of a stage of an explanation, which a timeline and a result name differently."""
    return STAGES.get(f"{_SAME_STAGES.get(name, name)}_s") or Key(name, _REST.color)


def learning(learners: Sequence[Learner], *, timed: bool) -> list[Chart]:
    """Training loss and test accuracy over iterations, and with ``timed`` also over time."""

    def iteration(point: Point) -> float:
        return point.iteration

    found = _learned(
        learners,
        "Training loss",
        "Each line is one strategy's mean loss over all workers, against the iteration; strategies that compute the"
        " same update coincide (the scale is logarithmic if the loss falls far).",
        "iteration",
        iteration,
        lambda point: point.loss,
    )
    found += _learned(
        learners,
        "Test accuracy",
        "The share of the test set that the model of rank 0 gets right, against the iteration; the lines should end at"
        " the same height.",
        "iteration",
        iteration,
        lambda point: point.accuracy,
    )
    if timed:
        found += _learned(
            learners,
            "Test accuracy over time",
            "The same accuracy against the seconds spent in iterations: a line further to the left is a strategy that"
            " gets there sooner.",
            "training time (s)",
            lambda point: point.seconds,
            lambda point: point.accuracy,
        )
    return found


def _learned(
    learners: Sequence[Learner], title: str, caption: str, xlabel: str, across: Value, upwards: Value
) -> list[Chart]:
    curves = []
    for strategy, style, trainings in learners:
        if spots := spots_of(trainings, across, upwards):
            curves.append(Curve(strategy, style, *zip(*spots, strict=True)))
    heights = [height for curve in curves for height in (*curve.lows, *curve.highs)]

    def finish(axes: Axes) -> None:
        axes.set_xlabel(xlabel)
        axes.set_xlim(left=0)
        if "accuracy" in title:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
            axes.set_ylim(top=min(1.0, axes.get_ylim()[1]))
        elif min(heights) > 0 and max(heights) > 100 * min(heights):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(bottom=0)

    several = any(len(trainings) > 1 for *_, trainings in learners)
    return line_chart(title, caption + _OVER_SEEDS * several, curves, finish)


def spots_of(
    trainings: Sequence[Sequence[Point]], across: Value, upwards: Value
) -> list[tuple[float, float, float, float]]:
    """For each iteration: the median place, and the median, lowest and highest value of the trainings."""
    found: dict[int, list[tuple[float, float]]] = {}
    for point in (point for training in trainings for point in training):
        x, y = across(point), upwards(point)
        if x is not None and y is not None:
            found.setdefault(point.iteration, []).append((x, y))
    spots = []
    for _, pairs in sorted(found.items()):
        xs, ys = zip(*pairs, strict=True)
        spots.append((median(xs), median(ys), min(ys), max(ys)))
    return spots


def _stages(result: Result) -> list[Chart]:
    rows = [row for row in result.rows if row.iteration_s is not None]
    bars, rest = [], False
    for row in rows:
        parts, total = _parts(row), (row.iteration_s or 0.0) * 1e3
        left = total - sum(width for _, width in parts)
        rest |= left > 0.005 * total
        bars.append(Bar(result.label(row), [*parts, (_REST, max(0.0, left))], units.seconds(row.iteration_s)))
    return bar_chart(
        "Time per iteration",
        "Each bar stacks the medians of an iteration's stages and ends, with its figure, at the median of whole"
        " iterations. In the hatched part the training thread was blocked in communication. The rest is the difference"
        " to the sum of the stages' medians.",
        bars,
        "milliseconds per iteration",
        keys=[*_used(rows), *([_REST] if rest else [])],
    )


def _parts(row: Row | Predicted) -> list[tuple[Key, float]]:
    """The stages of an iteration, in milliseconds; a prediction has no step in one piece."""
    return [(key, (getattr(row, field, None) or 0.0) * 1e3) for field, key in STAGES.items()]


def _used(rows: Sequence[Row | Predicted]) -> list[Key]:
    return [key for field, key in STAGES.items() if any(getattr(row, field, None) for row in rows)]


def _scaling(result: Result) -> list[Chart]:
    """Lines for strategies measured on two or more numbers of workers; rows without counted waits have none."""
    if len(result.counts) < 2:
        return []
    names = list(dict.fromkeys(result.titled(row) for row in result.rows if row.strategy != BASELINE))

    def curves(value: Callable[[Row], float | None]) -> list[Curve]:
        found = []
        for name, style in zip(names, strategy_styles(names), strict=True):
            pairs = ((row.workers, value(row)) for row in result.rows if result.titled(row) == name)
            points = sorted((workers, height) for workers, height in pairs if height is not None)
            found.append(Curve(name, style, [x for x, _ in points], [y for _, y in points]))
        return found

    def over_workers(axes: Axes, ylabel: str) -> None:
        _by_workers(axes, result.counts, ylabel)
        if ylabel == "scaling efficiency":
            axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))

    return [
        *line_chart(
            "Communication time against workers",
            "The time per iteration for which the training thread was blocked in communication, against the number of"
            " workers: the communication that the strategy does not hide behind computation.",
            curves(lambda row: None if row.exposed_comm_s is None else row.exposed_comm_s * 1e3),
            lambda axes: over_workers(axes, "milliseconds per iteration"),
            marker=3.5,
        ),
        *line_chart(
            "Scaling efficiency against workers",
            "Images per second against those of one worker times the number of workers: a strategy that costs nothing "
            "stays at 100 %.",
            curves(lambda row: row.scaling_efficiency),
            lambda axes: over_workers(axes, "scaling efficiency"),
            marker=3.5,
        ),
    ]


def _by_workers(axes: Axes, counts: Sequence[int], ylabel: str) -> None:
    axes.set_xlabel("workers")
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(FixedLocator(list(counts)))
    axes.xaxis.set_minor_locator(NullLocator())


def _coordination(result: Result, styles: Sequence[Style]) -> list[Chart]:
    """The staleness of steps and pushes, and the waits between workers; rows of workers in lockstep have none."""

    def counted(count: Callable[[Row], Mapping[int, int]]) -> list[tuple[str, Style, Mapping[int, int]]]:
        return [(result.label(row), style, count(row)) for row, style in zip(result.rows, styles, strict=True)]

    return [
        *_histogram(
            counted(lambda row: row.staleness),
            "Staleness",
            "The share of all workers' steps by their lead over the slowest worker at their start.",
            "steps ahead of the slowest worker",
            "of all steps",
        ),
        *_histogram(
            counted(lambda row: row.version_lag),
            "Version lag",
            "The share of all workers' pushes by their version lag: the updates since the weights that the gradient"
            " was computed on.",
            "updates behind the weights",
            "of all pushes",
        ),
        *_waits(result),
    ]


def bins(counts: Sequence[Mapping[int, int]]) -> list[range]:
    """The numbers from 0 to the greatest: one by one or, if there are many, in ever wider bins from ``SMALL`` on.

    This shows a bounded distribution next to an unbounded one.
    """
    most = max(max(found, default=0) for found in counts)
    parts = [range(number, number + 1) for number in range(min(most, SMALL if most > SINGLE else most) + 1)]
    while parts[-1].stop <= most:
        parts.append(range(parts[-1].stop, 2 * parts[-1].stop - 1))
    return parts


def shares(counts: Mapping[int, int], parts: Sequence[range]) -> list[float]:
    """The share of all values in each bin."""
    total = sum(counts.values())
    return [sum(count for number, count in counts.items() if number in part) / total for part in parts]


def _histogram(
    counted: Sequence[tuple[str, Style, Mapping[int, int]]], title: str, caption: str, across: str, up: str
) -> list[Chart]:
    shown = [one for one in counted if one[2]]
    if not any(number for _, _, found in shown for number in found):
        return []  # all in step
    parts = bins([found for _, _, found in shown])
    figure, axes = new_figure(2.9)
    width = _GROUP / len(shown)
    for place, (_, style, found) in enumerate(shown):
        left = [number - _GROUP / 2 + (place + 0.5) * width for number in range(len(parts))]
        axes.bar(left, shares(found, parts), width=width, color=style.color)
    names = [str(part.start) if len(part) == 1 else f"{part.start}\N{EN DASH}{part[-1]}" for part in parts]
    every = 1 if len(parts) <= SINGLE + 1 else 2
    axes.set_xticks(range(0, len(parts), every), names[::every])
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    keys = tuple(Key(label, css(style.color)) for label, style, _ in shown)
    return [Chart(title, caption, svg(figure, title), keys)]


def _top(matrices: Iterable[Matrix]) -> float:
    return max((value for matrix in matrices for line in matrix for value in line), default=0.0)


def _waits(result: Result) -> list[Chart]:
    rows = [row for row in result.rows if _top([row.waits]) > 0]
    top = _top(row.waits for row in rows)
    scale, unit = (1.0, "seconds") if top >= 1 else (1e-3, "milliseconds")
    return [
        heat_map(
            row.waits,
            [str(rank) for rank in range(row.workers)],
            top,
            title=f"Who waited for whom: {result.label(row)}",
            caption="The time in the whole run for which the worker of each line waited, before its steps, for the"
            " worker of each column; all these charts share one colour scale.",
            lines="waited",
            columns="for",
            measure=f"{unit} of the run",
            scale=scale,
            write=units.seconds,
        )
        for row in rows
    ]


def _wire(result: Result, styles: Sequence[Style]) -> list[Chart]:
    pairs = zip(result.rows, styles, strict=True)
    shown = [(row, style) for row, style in pairs if row.bytes_sent_per_step is not None and row.strategy != BASELINE]
    scale, unit = units.size_unit(max((row.bytes_sent_per_step or 0.0 for row, _ in shown), default=0.0))
    bars = []
    for row, style in shown:
        part = Key("", style.color), (row.bytes_sent_per_step or 0.0) / scale
        bars.append(Bar(result.label(row), [part], units.size(row.bytes_sent_per_step)))
    return bar_chart(
        "Bytes on the wire",
        "The bytes that one worker sends in one iteration, counted at the transport with all headers (median over"
        " workers); the traffic charts include the servers' bytes.",
        bars,
        f"{unit} sent per worker and iteration",
        margin=0.22,
    )


def _traffic(result: Result) -> list[Chart]:
    rows = [row for row in result.rows if len(row.traffic) > 1]
    if (top := _top(row.traffic for row in rows)) <= 0:
        return []
    scale, unit = units.size_unit(top)
    found = []
    for row in rows:
        servers = len(row.traffic) - row.workers
        names = [str(rank) for rank in range(row.workers)] + [f"S{index}" for index in range(servers)]
        chart = heat_map(
            row.traffic,
            names,
            top,
            title=f"Who talked to whom: {result.label(row)}",
            caption="Bytes per iteration from the process of each line to the process of each column (numbers are "
            f"workers{', S marks a server' if servers > 0 else ''}; an empty cell means no traffic); all these charts "
            "share one colour scale.",
            lines="from",
            columns="to",
            measure=f"{unit} per iteration",
            scale=scale,
            write=units.size,
        )
        found.append(chart)
    return found


def contender_styles(result: BenchResult) -> Mapping[str, Style]:
    """One style for every contender, in the order of the rows."""
    names = tuple(dict.fromkeys(row.contender for row in result.rows))
    return dict(zip(names, line_styles(len(names)), strict=True))


def _over_sizes(rows: Sequence[Measured], styles: Mapping[str, Style], name: str) -> list[Chart]:
    """Both axes are logarithmic: in the times, a slope of 1 shows a bandwidth, a level part a latency."""

    def curves(field: str, scale: float) -> list[Curve]:
        found = []
        for contender, style in styles.items():
            values = ((row.bytes, getattr(row, field)) for row in rows if row.contender == contender)
            points = [(x, y * scale) for x, y in values if y is not None]
            found.append(Curve(contender, style, [x for x, _ in points], [y for _, y in points]))
        return found

    limits = {
        (kind, dash): {row.bytes: row.limit_s * 1e3 for row in rows if row.limit == kind and row.limit_s is not None}
        for kind, dash in (("memory", "1 2"), ("link", "1 4"))
    }

    def times(axes: Axes) -> None:
        for (_, dash), points in limits.items():
            if points:
                axes.plot(list(points), list(points.values()), color=INK, linewidth=1.0, linestyle=pattern(dash))
        _logarithmic(axes, rows, "milliseconds")

    return [
        *line_chart(
            f"Time: {name}",
            "Median seconds of one collective on its slowest rank, against the size of the array. Lower is faster; the"
            " dotted line is the limit set by plain copies of all ranks at once (or by the link).",
            curves("median_s", 1e3),
            times,
            height_in=3.4,
            keys=[Key(f"limit: {kind}", css(INK), dash) for (kind, dash), points in limits.items() if points],
        ),
        *line_chart(
            f"Bus bandwidth: {name}",
            "Bus bandwidth as in nccl-tests, from the median: the least rate that every rank's link has to carry."
            " Higher is faster.",
            curves("busbw_bytes_per_s", 1e-9),
            lambda axes: _logarithmic(axes, rows, "GB/s"),
            height_in=3.4,
        ),
    ]


def _logarithmic(axes: Axes, rows: Sequence[Measured], unit: str) -> None:
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


def _forms(rows: Sequence[GradientRow], title: str) -> list[Chart]:
    keys = Key("autograd and the exchange", BARE_COLOR), Key("added by the form", ADDED_COLOR)
    bars = []
    for row in rows:
        if row.median_s is not None:
            total = row.median_s * 1e3
            added = min(total, max(0.0, (row.added_s or 0.0) * 1e3))
            parts = list(zip(keys, (total - added, added), strict=True))
            tick = total - added + row.limit_s * 1e3 if row.limit_s else None
            bars.append(Bar(row.form, parts, units.seconds(row.median_s), tick))
    return bar_chart(
        title,
        "Each bar is the median of an iteration that computes nothing, split into the time without moving gradients"
        " and the form's addition. The tick marks the form's limit: its passes over memory at the speed of plain"
        " copies. Shorter is faster.",
        bars,
        "milliseconds per iteration",
        keys=keys,
    )


def _predicted(rows: Sequence[Predicted], network: str) -> list[Chart]:
    band = " The band around a line is its expected range."
    names = list(dict.fromkeys(row.requested for row in rows))
    counts = sorted({row.workers for row in rows})

    def chart(title: str, caption: str, ylabel: str, ends: Callable[[Predicted], Iterable[float]]) -> list[Chart]:
        curves = []
        for name, style in zip(names, strategy_styles(names), strict=True):
            its = sorted((row for row in rows if row.requested == name), key=lambda row: row.workers)
            heights = zip(*(ends(row) for row in its), strict=True)
            curves.append(Curve(name, style, [row.workers for row in its], *heights))

        def finish(axes: Axes) -> None:
            axes.set_xscale("log", base=2)
            _by_workers(axes, counts, ylabel)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))

        return line_chart(f"{title}, {network}", caption, curves, finish, marker=3.5)

    def efficiency(row: Predicted) -> Iterable[float]:
        scale = 100 * row.scaling_efficiency * row.iteration_s
        return scale / row.iteration_s, scale / row.high_s, scale / max(row.low_s, 1e-12)

    return [
        *chart(
            "Iteration time",
            "Milliseconds of an iteration against the number of workers." + band,
            "milliseconds per iteration",
            lambda row: (1e3 * row.iteration_s, 1e3 * row.low_s, 1e3 * row.high_s),
        ),
        *chart(
            "Scaling efficiency",
            "Images per second against those of one worker times the number of workers." + band,
            "scaling efficiency, %",
            efficiency,
        ),
        *chart(
            "Exposed communication",
            "The time that the training thread waits in an iteration: the communication that a strategy does not hide"
            " behind computation.",
            "milliseconds per iteration",
            lambda row: (1e3 * row.exposed_comm_s,),
        ),
    ]


def _predicted_stages(rows: Sequence[Predicted], network: str) -> list[Chart]:
    most = max(row.workers for row in rows)
    shown = [row for row in rows if row.workers == most]
    return bar_chart(
        f"Stages on {most} workers, {network}",
        "Each bar stacks an iteration's stages; the text next to it has the total and the bottleneck.",
        [Bar(row.requested, _parts(row), f"{units.seconds(row.iteration_s)}, {row.bottleneck}") for row in shown],
        "milliseconds per iteration",
        keys=_used(shown),
        margin=0.3,
    )
