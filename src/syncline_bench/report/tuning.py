"""The result of a tuning: its rows, file and table. The rules of ``files`` hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from . import units
from .columns import Column, Sheet, Table
from .files import ResultFile


@dataclass(frozen=True)
class Tried:
    """A strategy that a tuning considered, measured or not."""

    strategy: Annotated[str, "the candidate"]
    predicted_s: Annotated[float | None, "of an iteration; `null` without a prediction"] = None
    measured_s: Annotated[
        float | None, "the median of `times_s`; `null` if it was not measured, failed or was refused"
    ] = None
    why: Annotated[str, "the outcome"] = ""
    times_s: Annotated[tuple[float, ...], "each measurement, the median of some iterations"] = ()
    efficiency: Annotated[
        float | None, "the progress of a step relative to exact training, if a paired run measured it"
    ] = None

    @property
    def counts_s(self) -> float | None:
        """Seconds of an iteration divided by its efficiency."""
        return None if self.measured_s is None else self.measured_s / (self.efficiency or 1.0)


@dataclass(frozen=True)
class Tuned(ResultFile):
    """The whole result of a tuning; ``tried`` has the measured candidates first, the fastest before the others.

    ``best`` is a strategy's text and ``iteration_s`` its time of an iteration. ``default_iteration_s`` is the time
    under the requested strategy, with every open word left to the run. ``lab`` is the rate of the links between hosts.
    ``networks`` are the network files of the predictions, by transport, as ``syncline calibrate`` writes them.
    """

    verb: ClassVar[str] = "tune"
    work: ClassVar = {
        "workload": "workload", "workers": "number of workers", "framework": "framework", "lab": "lab",
        "default": "strategy",
    }  # fmt: skip

    best: str = ""
    iteration_s: float | None = None
    default: str = ""
    default_iteration_s: float | None = None
    tried: tuple[Tried, ...] = ()
    explanation: str = ""
    workload: str = ""
    workers: int = 0
    framework: str = "torch"
    lab: str | None = None
    budget_s: float = 0.0
    spent_s: float = 0.0
    searcher: str = ""
    seed: int = 0
    loss: float | None = None
    networks: Mapping[str, Any] = field(default_factory=dict)


_COLUMNS: tuple[Column[Tried], ...] = (
    Column("strategy", "strategy", kind="name", means=""),
    Column("iter", "measured_s", units.milliseconds, unit="ms", means="median of an iteration"),
    Column("predicted", "predicted_s", units.milliseconds, 2, means="the same by simulation, before it was measured"),
    Column(
        "runs", "times_s", lambda times: str(len(times)), 3, means="the number of measurements, in turn with others"
    ),
    Column("step", "efficiency", units.share, 4, unit="%", when=lambda row: row.efficiency is not None),
    Column("outcome", "why", rank=1, kind="text", means=""),
)


def render(result: Tuned) -> Sheet:
    """The table of measured candidates, the fastest first, and the result in words."""
    shown = [row for row in result.tried if row.times_s or row.why.startswith(("failed", "refused"))]
    return Sheet([Table(_COLUMNS, shown)] if shown else (), findings=summary(result))


def summary(result: Tuned) -> list[str]:
    """Sentences on the search: candidates that ran or were predicted, the best strategy, and its reason."""
    predicted = sum(row.predicted_s is not None for row in result.tried)
    ran = sum(bool(row.times_s) for row in result.tried)
    found = [f"{ran} of {len(result.tried)} candidates ran, {predicted} were predicted, in {result.spent_s:.0f} s."]
    if result.best and result.iteration_s is not None and result.default_iteration_s is not None:
        times = result.default_iteration_s / result.iteration_s
        found.append(
            f"best: {result.best}: {units.seconds(result.iteration_s)} an iteration, {units.significant(times)} times"
            f" as fast as {result.default} ({units.seconds(result.default_iteration_s)})"
        )
    return found + ([result.explanation] if result.explanation else [])
