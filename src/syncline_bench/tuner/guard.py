"""The accuracy guard: whether a strategy that changes the mathematics may be taken, by a short paired run.

Pure: judges two rows, one trained as it is and one under the candidate, on the same batches from the same weights.

Two things count. The *loss* is how much worse the model is at the end: points of accuracy on the test set where the
workload has one, else the share by which the training loss is higher. More than what is allowed refuses the candidate.
The *efficiency* is how far its steps go: the step at which the exact run had the training loss that the candidate ends
with, over the steps of the candidate, at most 1. An iteration that is short counts as long as its seconds over its
efficiency: what is compared is time to accuracy, not bytes. Pollux (Qiao et al., OSDI 2021) has this as goodput,
throughput times statistical efficiency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ..report import units
from ..report.rows import Point, Row

_TAIL = 0.2
"""The share of a curve whose mean is the loss at its end: single batches vary."""


@dataclass(frozen=True)
class Verdict:
    """What a paired run has found; ``why`` says it in words."""

    accepted: bool
    loss: float
    efficiency: float
    why: str


def judge(exact: Row, lossy: Row, allowed: float) -> Verdict:
    """Whether the candidate loses at most ``allowed``; a run that failed, or whose numbers are none, is refused."""
    if lossy.error is not None:
        return Verdict(False, math.inf, 0.0, f"refused: its paired run failed: {lossy.error}")
    before, after = _losses(exact), _losses(lossy)
    if not before or not after or not all(math.isfinite(point.loss or math.nan) for point in lossy.curve if point.loss):
        return Verdict(False, math.inf, 0.0, "refused: its training loss is no number")
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
    if not loss <= allowed:  # what is no number is refused too
        return Verdict(False, loss, efficiency, f"refused: it loses {what} {steps}, and {limit} are allowed")
    if efficiency <= 0:
        return Verdict(False, loss, 0.0, f"refused: it has learnt nothing {steps}")
    return Verdict(True, loss, efficiency, f"loses {what} {steps}, makes {goes}")


def _losses(row: Row) -> list[tuple[int, float]]:
    """The training losses by iteration."""

    def known(point: Point) -> bool:
        return point.loss is not None and math.isfinite(point.loss)

    return [(point.iteration, float(point.loss or 0.0)) for point in row.curve if known(point)]


def _end(curve: Sequence[tuple[int, float]]) -> float:
    return fmean(loss for _, loss in curve[-max(1, round(_TAIL * len(curve))) :])


def _efficiency(exact: Sequence[tuple[int, float]], lossy: Sequence[tuple[int, float]]) -> float:
    """The steps in which the exact run comes to where the candidate ends, over the candidate's."""
    reached, width = _end(lossy), max(1, round(_TAIL * len(exact)))
    steps = exact[-1][0]
    for place in range(width, len(exact) + 1):
        window = exact[place - width : place]
        if fmean(loss for _, loss in window) <= reached:
            # A window's mean stands for its end, for the exact run as for the candidate.
            return min(1.0, 0.0 if place == width and reached >= exact[0][1] else window[-1][0] / steps)
    return 1.0
