"""The result file of ``syncline accuracy``: what every number in it means, and its JSON form.

Owns the names, units and JSON of an ``AccuracyResult``: the trainings that were run, from which an interrupted table
goes on, and the rows that they make. The rules of ``result_file`` hold here. Does not know how anything was trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from .result_file import ResultFile, known
from .rows import BASELINE, Point, points

DENSE = "direct"
"""The strategy that a table of codecs compares all others with: their architecture without a codec."""

_ROUNDING = 1e-9
"""Percentage points that differences of equal shares of a test set may be apart."""


@dataclass(frozen=True)
class AccuracyRun:
    """One training: a strategy from one seed.

    ``codec`` and ``feedback`` say what was asked for where that was a codec, and are None where it was a strategy.
    ``strategy`` is what the processes were told, ``chosen`` what really ran. ``accuracy`` (0 to 1) and ``loss`` are of
    the test set after the last iteration, ``bytes_sent_per_step`` is the median over workers and iterations. ``error``
    says why the training does not count. ``replica_sha256`` is the digest of the weights at the end, ``curve`` how the
    training went.
    """

    codec: str | None
    feedback: bool | None
    seed: int
    strategy: str
    accuracy: float | None = None
    loss: float | None = None
    bytes_sent_per_step: float | None = None
    chosen: str | None = None
    error: str | None = None
    replica_sha256: str | None = None
    curve: tuple[Point, ...] = ()

    @property
    def key(self) -> tuple[str, int]:
        """What makes two trainings of a table the same."""
        return self.strategy, self.seed

    @property
    def finished(self) -> bool:
        """True when it ran to its end and its replicas agreed."""
        return self.error is None and self.accuracy is not None


@dataclass(frozen=True)
class AccuracyRow:
    """One strategy over all seeds that it was trained from.

    ``codec`` and ``feedback`` are None where it was asked for as a strategy. ``accuracy`` (0 to 1) has a value per
    seed, in the order of ``seeds``, None where the training failed; ``error`` is that of the first one that did.
    Median, ``lowest`` and ``highest`` are over the others, ``scatter_points`` is how many percentage points these two
    are apart, None for fewer than two seeds. ``points_below_dense`` is by how many percentage points the median is
    below that of the row which all others stand beside; negative where it is above. ``within_scatter`` says whether
    this, above or below, is no more than that row's scatter. ``bytes_sent_per_step`` is per worker and iteration,
    ``of_dense_bytes`` its share of what that row sends, or, where that is a single worker, the first row that does.
    ``chosen`` is what really ran.
    """

    codec: str | None
    feedback: bool | None
    accuracy: tuple[float | None, ...]
    median_accuracy: float | None
    lowest: float | None
    highest: float | None
    bytes_sent_per_step: float | None
    of_dense_bytes: float | None
    points_below_dense: float | None
    workload: str
    workers: int
    seeds: tuple[int, ...]
    error: str | None
    strategy: str
    chosen: str | None
    scatter_points: float | None
    within_scatter: bool | None


@dataclass(frozen=True, kw_only=True)
class AccuracyResult(ResultFile):
    """A whole table: where, on what and how long was trained, and every training, those of one row together.

    ``iterations`` is the length of every training, ``epochs`` the same where it was given so, ``batch`` the global one.
    ``reference`` is the strategy whose row all others stand beside.
    """

    verb: ClassVar = "accuracy"
    lists: ClassVar = {"runs": lambda data: _run(data)}

    workload: str
    workers: int
    epochs: int | None
    iterations: int
    batch: int
    runs: tuple[AccuracyRun, ...] = ()
    reference: str = DENSE

    @property
    def of_codecs(self) -> bool:
        """Whether every training was asked for as a codec, so that codecs name the rows."""
        return all(run.codec is not None for run in self.runs)

    @property
    def sender(self) -> str | None:
        """The strategy whose bytes those of all others are shares of; beside a single worker the first that sends."""
        if self.reference != BASELINE:
            return self.reference
        return next((strategy for strategy, runs in self.grouped.items() if _median(_sent(runs))), None)

    @property
    def grouped(self) -> Mapping[str, Sequence[AccuracyRun]]:
        """The trainings of every strategy, in their order."""
        found: dict[str, list[AccuracyRun]] = {}
        for run in self.runs:
            found.setdefault(run.strategy, []).append(run)
        return found

    @property
    def rows(self) -> tuple[AccuracyRow, ...]:
        """One row per strategy, in the order of the trainings."""
        grouped = self.grouped
        reference, sender = (grouped.get(name or "", ()) for name in (self.reference, self.sender))
        return tuple(self._row(runs, _accuracies(reference), _median(_sent(sender))) for runs in grouped.values())

    def with_run(self, run: AccuracyRun) -> AccuracyResult:
        """This result with one more training."""
        return dataclasses.replace(self, runs=(*self.runs, run))

    def arranged(self, keys: Sequence[tuple[str, int]]) -> AccuracyResult:
        """This result in the order of ``keys``; trainings that are not among them come last, in their own order."""
        place = {key: number for number, key in enumerate(keys)}
        runs = sorted(self.runs, key=lambda run: place.get(run.key, len(place)))
        return dataclasses.replace(self, runs=tuple(runs))

    def beside(self, reference: str) -> AccuracyResult:
        """This result with that reference, or as it is where only the reference that it has is trained yet."""
        there = {run.strategy for run in self.runs if run.finished}
        if reference not in there and self.reference in there:
            return self
        return dataclasses.replace(self, reference=reference)

    def same_work(self, other: AccuracyResult) -> bool:
        """Whether both trained the same on the same machine with the same code and libraries."""
        names = (
            "machine",
            "cores",
            "versions",
            "source_sha256",
            "workload",
            "workers",
            "iterations",
            "batch",
        )
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def content(self) -> dict[str, Any]:
        """All fields; ``rows`` is there for programs and follows from ``runs``."""
        return {**super().content(), "rows": [dataclasses.asdict(row) for row in self.rows]}

    def _row(self, runs: Sequence[AccuracyRun], reference: Sequence[float], dense_sent: float | None) -> AccuracyRow:
        found, sent = _accuracies(runs), _median(_sent(runs))
        middle, other = _median(found), _median(reference)
        below = None if middle is None or other is None else 100 * (other - middle)
        within = None if runs[0].strategy == self.reference else _within(below, _scatter(reference))
        failed = next((run for run in runs if not run.finished), None)
        return AccuracyRow(
            runs[0].codec,
            runs[0].feedback,
            accuracy=tuple(run.accuracy if run.finished else None for run in runs),
            median_accuracy=middle,
            lowest=min(found, default=None),
            highest=max(found, default=None),
            bytes_sent_per_step=sent,
            of_dense_bytes=sent / dense_sent if sent is not None and dense_sent else None,
            points_below_dense=below,
            workload=self.workload,
            workers=self.workers,
            seeds=tuple(run.seed for run in runs),
            error=None if failed is None else f"seed {failed.seed}: {failed.error}",
            strategy=runs[0].strategy,
            chosen=next((run.chosen for run in runs if run.finished), None),
            scatter_points=_scatter(found),
            within_scatter=within,
        )


def _run(data: Mapping[str, Any]) -> AccuracyRun:
    return AccuracyRun(**{**known(AccuracyRun, data), "curve": points(data.get("curve", ()))})


def _accuracies(runs: Sequence[AccuracyRun]) -> list[float]:
    return [run.accuracy for run in runs if run.finished and run.accuracy is not None]


def _sent(runs: Sequence[AccuracyRun]) -> list[float]:
    return [run.bytes_sent_per_step for run in runs if run.finished and run.bytes_sent_per_step is not None]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _scatter(accuracies: Sequence[float]) -> float | None:
    return 100 * (max(accuracies) - min(accuracies)) if len(accuracies) > 1 else None


def _within(below: float | None, scatter: float | None) -> bool | None:
    return None if below is None or scatter is None else abs(below) <= scatter + _ROUNDING
