"""The result file of ``syncline bench steps``: what every number in it means, and its JSON form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .result_file import ResultFile, reader

PER_STEP_S = 1e-3
PER_BUCKET_S = 20e-6
"""The goal is what these make together."""


@dataclass(frozen=True)
class StepRow:
    """A step of one framework on ``tensors`` of ``elements`` float32, each of which is a bucket.

    Times are in seconds, medians over the repetitions, in each of which that of the slowest rank counts. ``bare_s`` is
    a step of the framework alone, ``exchange_s`` what a step hands to the engine, called from Python, and ``step_s`` a
    step of a model that Syncline exchanges the gradients of. ``beyond_s`` is the median of what that takes beyond the
    two others of the same repetition, ``quiet_beyond_s`` the difference of the fifth percentiles of the three, which
    other work on the machine changes less, and ``cpu_beyond_s`` the median of a rank's processor time, of all its
    threads, beyond that of the two others. ``correct`` says that the weights are those that so many steps make.
    ``error`` says why there are no figures.
    """

    framework: str
    tensors: int
    elements: int
    bare_s: float | None = None
    exchange_s: float | None = None
    step_s: float | None = None
    beyond_s: float | None = None
    quiet_beyond_s: float | None = None
    cpu_beyond_s: float | None = None
    correct: bool | None = None
    error: str | None = None

    @property
    def goal_s(self) -> float:
        """What it may take beyond both."""
        return PER_STEP_S + PER_BUCKET_S * self.tensors

    @property
    def finished(self) -> bool:
        """True when it was measured without an error and the weights were right."""
        return self.error is None and self.beyond_s is not None and self.correct is True


@dataclass(frozen=True, kw_only=True)
class StepResult(ResultFile):
    """A whole run: where, with what and how it was measured, and its rows; ``load`` is the machine's behind it."""

    verb: ClassVar = "bench steps"
    lists: ClassVar = {"rows": reader(StepRow)}

    strategy: str
    ranks: int
    repetitions: int
    load: float | None = None
    rows: tuple[StepRow, ...] = ()
