"""The result file of ``syncline accuracy``: what every number in it means, and its JSON form.

Owns the names, units and JSON of an ``AccuracyResult``: the trainings that were run, from which an interrupted table
goes on, and the rows that they make. The rules of ``bench_rows`` hold here too. Does not know how anything was trained.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..errors import DataError
from .files import replace_text
from .rows import finite, known

DENSE = ("none", False)
"""The codec, and whether with error feedback, that all others are compared with."""


@dataclass(frozen=True)
class AccuracyRun:
    """One training: a codec with or without error feedback, from one seed.

    ``strategy`` is what the processes were told, ``chosen`` what really ran. ``accuracy`` (0 to 1) and ``loss`` are of
    the test set after the last iteration, ``bytes_sent_per_step`` is the median over workers and iterations. ``error``
    says why the training does not count.
    """

    codec: str
    feedback: bool
    seed: int
    strategy: str
    accuracy: float | None = None
    loss: float | None = None
    bytes_sent_per_step: float | None = None
    chosen: str | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, bool, int]:
        """What makes two trainings of a table the same."""
        return self.codec, self.feedback, self.seed

    @property
    def finished(self) -> bool:
        """True when it ran to its end and its replicas agreed."""
        return self.error is None and self.accuracy is not None


@dataclass(frozen=True)
class AccuracyRow:
    """One codec with or without error feedback, over all seeds that it was trained from.

    ``accuracy`` (0 to 1) has a value per seed, in the order of ``seeds``, None where the training failed; ``error`` is
    that of the first one that did. Median, ``lowest`` and ``highest`` are over the others. ``bytes_sent_per_step`` is
    per worker and iteration, ``of_dense_bytes`` its share of the dense row's. ``points_below_dense`` is by how many
    percentage points the median is below the dense row's; negative where it is above.
    """

    codec: str
    feedback: bool
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
    error: str | None = None


@dataclass(frozen=True)
class AccuracyResult:
    """A whole table: where, on what and how long was trained, and every training, those of one row together.

    ``iterations`` is the length of every training, ``batch`` the global one.
    """

    machine: str
    cores: int
    versions: Mapping[str, str]
    commit: str | None
    modified: bool | None
    source_sha256: str
    started: str
    workload: str
    workers: int
    epochs: int
    iterations: int
    batch: int
    runs: tuple[AccuracyRun, ...] = ()

    @property
    def rows(self) -> tuple[AccuracyRow, ...]:
        """One row per codec and way of using it, in the order of the trainings."""
        grouped: dict[tuple[str, bool], list[AccuracyRun]] = {}
        for run in self.runs:
            grouped.setdefault((run.codec, run.feedback), []).append(run)
        dense = grouped.get(DENSE, ())
        return tuple(self._row(runs, dense) for runs in grouped.values())

    def with_run(self, run: AccuracyRun) -> AccuracyResult:
        """This result with one more training."""
        return dataclasses.replace(self, runs=(*self.runs, run))

    def arranged(self, keys: Sequence[tuple[str, bool, int]]) -> AccuracyResult:
        """This result in the order of ``keys``; trainings that are not among them come last, in their own order."""
        place = {key: number for number, key in enumerate(keys)}
        runs = sorted(self.runs, key=lambda run: place.get(run.key, len(place)))
        return dataclasses.replace(self, runs=tuple(runs))

    def same_work(self, other: AccuracyResult) -> bool:
        """Whether both trained the same on the same machine with the same code and libraries."""
        names = (
            "machine",
            "cores",
            "versions",
            "source_sha256",
            "workload",
            "workers",
            "epochs",
            "iterations",
            "batch",
        )
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def to_json(self) -> str:
        """The text of the result file: strict JSON; ``rows`` is there for programs and follows from ``runs``."""
        data = dataclasses.asdict(self)
        data["rows"] = [dataclasses.asdict(row) for row in self.rows]
        return json.dumps(finite(data), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> AccuracyResult:
        """Read a result file's text back; raises DataError where it is not one."""
        try:
            data = json.loads(text)
            runs = tuple(AccuracyRun(**known(AccuracyRun, item)) for item in data["runs"])
            return cls(**{**known(cls, data), "runs": runs})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise DataError(f"this is not a result file of syncline accuracy: {error!r}") from None

    def save(self, path: Path) -> None:
        """Write the result file in one piece, so that a reader never sees half of it."""
        replace_text(path, self.to_json())

    def _row(self, runs: Sequence[AccuracyRun], dense: Sequence[AccuracyRun]) -> AccuracyRow:
        found, reference = _accuracies(runs), _median(_accuracies(dense))
        middle, sent, dense_sent = _median(found), _median(_sent(runs)), _median(_sent(dense))
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
            points_below_dense=None if middle is None or reference is None else 100 * (reference - middle),
            workload=self.workload,
            workers=self.workers,
            seeds=tuple(run.seed for run in runs),
            error=None if failed is None else f"seed {failed.seed}: {failed.error}",
        )


def _accuracies(runs: Sequence[AccuracyRun]) -> list[float]:
    return [run.accuracy for run in runs if run.finished and run.accuracy is not None]


def _sent(runs: Sequence[AccuracyRun]) -> list[float]:
    return [run.bytes_sent_per_step for run in runs if run.finished and run.bytes_sent_per_step is not None]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
