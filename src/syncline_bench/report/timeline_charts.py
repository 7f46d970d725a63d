"""One iteration of a recorded run as a chart: every process's computation, waits, sends and receives over time.

Assigns bars to the lines of a process. Bars of a kind that are too close for the eye are drawn as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from syncline.engine.trace import Kind
from syncline.timeline.chrome import Bar, Iteration

from . import units
from .figures import PAPER, Chart, Key, new_figure, styled, svg

_CLOSEST = 1 / 1500
"""A share of the iteration's length: bars that are closer are drawn as one."""


@dataclass(frozen=True)
class _Look:
    """The drawing of bars of some kinds: the part of a process's line, from 0 at its top to 1, and the layer."""

    kinds: frozenset[Kind]
    label: str
    color: str
    top: float
    height: float
    hatched: bool = False


_LOOKS = (
    _Look(frozenset({"forward"}), "forward", "#56B4E9", 0.0, 0.34),
    _Look(frozenset({"backward"}), "backward", "#0072B2", 0.0, 0.34),
    _Look(frozenset({"optimizer"}), "optimizer step", "#009E73", 0.0, 0.34),
    _Look(frozenset({"update"}), "update by an owner", "#F0E442", 0.0, 0.34),
    _Look(frozenset({"wait"}), "waiting", "#D55E00", 0.0, 0.34, hatched=True),
    _Look(frozenset({"reduce", "copy", "advance"}), "adding and copying", "#E69F00", 0.36, 0.14),
    _Look(frozenset({"compute"}), "encoding and decoding", "#CC79A7", 0.36, 0.14),
    _Look(frozenset({"send"}), "sends under way", "#777777", 0.52, 0.14),
    _Look(frozenset({"receive"}), "receives under way", "#BBBBBB", 0.68, 0.14),
)


@styled()
def timeline_charts(iterations: Iterable[Iteration]) -> tuple[Chart, ...]:
    """One chart for every run."""
    return tuple(_chart(iteration) for iteration in iterations)


def _chart(iteration: Iteration) -> Chart:
    processes = iteration.processes
    figure, axes = new_figure(0.7 + 0.55 * len(processes))
    axes.set_ylim(len(processes) - 0.05, -0.1)
    axes.set_xlim(0, iteration.length_s * 1e3)
    axes.grid(visible=False, axis="y")
    axes.set_yticks([place + 0.17 for place in range(len(processes))], [name for name, _ in processes])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("milliseconds")
    used = [look for look in _LOOKS if any(bar.kind in look.kinds for _, bars in processes for bar in bars)]
    for place, (_, bars) in enumerate(processes):
        for look in used:
            _draw(axes, place, look, _merged(bars, look.kinds, iteration.length_s * _CLOSEST))
    title = f"Timeline: {iteration.title}" if iteration.title else "Timeline"
    clocks = f"clocks agree within {units.seconds(iteration.error_s)}" if iteration.error_s else "all on one clock"
    caption = (
        f"Iteration {iteration.number} of {iteration.count}, from one end of the optimizer's step on rank 0 to the"
        f" next ({clocks}). From the top: a process's computation and waits, its work on exchanged data, its sends,"
        " and its receives, each from the start of its send."
    )
    keys = tuple(Key(look.label, look.color, hatched=look.hatched) for look in used)
    return Chart(title, caption, svg(figure, title), keys)


def _draw(axes: Axes, place: int, look: _Look, spans: Sequence[tuple[float, float]]) -> None:
    bars = [(begin * 1e3, (end - begin) * 1e3) for begin, end in spans]
    hatch = "////" if look.hatched else None
    axes.broken_barh(bars, (place + look.top, look.height), facecolor=look.color, hatch=hatch, edgecolor=PAPER, lw=0)


def _merged(bars: Iterable[Bar], kinds: frozenset[Kind], closest_s: float) -> list[tuple[float, float]]:
    """The times in which a span of these kinds was under way."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted((bar.begin_s, bar.end_s) for bar in bars if bar.kind in kinds):
        if found and begin - found[-1][1] <= closest_s:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
