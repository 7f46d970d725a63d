"""The accuracy guard: decides from a short paired run whether a tuning may use a strategy that changes the mathematics.

Pure: compares two rows that trained on the same batches from the same weights, one exactly and one under the candidate.

Two figures count. The *loss* is the deterioration of the final model: in points of accuracy if the workload has a test
set, else as the relative increase of the training loss. A candidate that loses more than allowed is refused. The
*efficiency* is the step at which the exact run reached the candidate's final training loss, divided by the candidate's
number of steps, and at most 1. The tuning compares iteration time / efficiency, an estimate of the time to accuracy.
Its inverse is the goodput of Pollux (Qiao et al., OSDI 2021): throughput times statistical efficiency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ..report import units
from ..report.comparison import Point, Row

_TAIL = 0.2
"""The share of a curve's points whose mean is the loss at its end, because single batches vary."""


@dataclass(frozen=True)
class Verdict:
    """The result of a paired run, with its explanation in ``why``."""

    accepted: bool
    loss: float
    efficiency: float
    why: str


def judge(exact: Row, lossy: Row, allowed: float) -> Verdict:
    """Accept the candidate if it loses at most ``allowed``. A failed run, or one without finite losses, is refused."""
    if lossy.error is not None:
        return Verdict(False, math.inf, 0.0, f"refused: its paired run failed: {lossy.error}")
    before, after = _losses(exact), _losses(lossy)
    if not before or not after or not all(math.isfinite(point.loss or math.nan) for point in lossy.curve if point.loss):
        return Verdict(False, math.inf, 0.0, "refused: its training loss is not a finite number")
    efficiency = _efficiency(before, after)
    if exact.accuracy is not None and lossy.accuracy is not None:
        loss = exact.accuracy - lossy.accuracy
        what = f"{100 * max(0.0, loss):.2g} points of accuracy"
        limit = f"{100 * allowed:.2g} points"
    else:
        loss = _end(after) / _end(before) - 1 if _end(before) > 0 else math.inf
        what, limit = f"{units.percent(max(0.0, loss), 1)} of the training loss", units.percent(allowed, 1)
    steps = f"after {lossy.iterations} steps"
    goes = f"{units.percent(efficiency)} of a step's progress"
    if not loss <= allowed:  # also true for NaN
        return Verdict(False, loss, efficiency, f"refused: it loses {what} {steps}, and {limit} are allowed")
    if efficiency <= 0:
        return Verdict(False, loss, 0.0, f"refused: its training loss has not fallen {steps}")
    return Verdict(True, loss, efficiency, f"loses {what} {steps}, makes {goes}")


def _losses(row: Row) -> list[tuple[int, float]]:
    """The finite training losses of a row, as (iteration, loss)."""

    def known(point: Point) -> bool:
        return point.loss is not None and math.isfinite(point.loss)

    return [(point.iteration, float(point.loss or 0.0)) for point in row.curve if known(point)]


def _end(curve: Sequence[tuple[int, float]]) -> float:
    return fmean(loss for _, loss in curve[-max(1, round(_TAIL * len(curve))) :])


def _efficiency(exact: Sequence[tuple[int, float]], lossy: Sequence[tuple[int, float]]) -> float:
    """The share of its steps that the exact run needs to reach the candidate's final loss; at most 1."""
    reached, width = _end(lossy), max(1, round(_TAIL * len(exact)))
    steps = exact[-1][0]
    for place in range(width, len(exact) + 1):
        window = exact[place - width : place]
        if fmean(loss for _, loss in window) <= reached:
            # The mean of a window counts as the loss at its end, in both runs.
            return min(1.0, 0.0 if place == width and reached >= exact[0][1] else window[-1][0] / steps)
    return 1.0
