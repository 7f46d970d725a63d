"""Results of ``syncline accuracy``: trainings, their rows, file and table.

Owns the names, units and JSON of an ``AccuracyResult``: the finished trainings, from which an interrupted table
continues, and their rows. Each field's annotation has its meaning; ``files`` has the rules of the JSON. Does not know
how anything was trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, ClassVar

from . import units
from .columns import Column, Sheet, Table
from .comparison import BASELINE, Point
from .files import ResultFile, grouped

DENSE = "direct"
"""The reference of a table of codecs: their architecture without a codec."""

_ROUNDING = 1e-9
"""The rounding error, in percentage points, of differences of equal shares of a test set."""


@dataclass(frozen=True)
class AccuracyRun:
    """One training: a strategy from one seed."""

    codec: Annotated[str | None, "the codec's text; `null` if a strategy was requested"]
    feedback: Annotated[bool | None, "whether with error feedback; `null` if a strategy was requested"]
    seed: int
    strategy: Annotated[str, "the strategy that the processes got"]
    accuracy: Annotated[float | None, "of the test set after the last iteration, 0 to 1"] = None
    loss: Annotated[float | None, "loss on the test set after the last iteration"] = None
    bytes_sent_per_step: Annotated[
        float | None, "by one worker in one iteration, median over workers and iterations"
    ] = None
    chosen: Annotated[str | None, "the strategy that ran, with all choices made"] = None
    error: Annotated[str | None, "the reason why the training does not count"] = None
    replica_sha256: Annotated[str | None, "the digest of the weights at the end"] = None
    curve: Annotated[tuple[Point, ...], "loss and accuracy during the training"] = ()

    @property
    def key(self) -> tuple[str, int]:
        """The identity of a training within a table."""
        return self.strategy, self.seed

    @property
    def finished(self) -> bool:
        """True if it ran to its end and its replicas agreed."""
        return self.error is None and self.accuracy is not None


@dataclass(frozen=True)
class AccuracyRow:
    """One strategy over all seeds that it was trained from."""

    codec: Annotated[str | None, "the codec's text; `null` if a strategy was requested"]
    feedback: Annotated[bool | None, "whether with error feedback; `null` if a strategy was requested"]
    accuracy: Annotated[tuple[float | None, ...], "test accuracy after the last iteration, 0 to 1, one per seed"]
    median_accuracy: Annotated[float | None, "test accuracy after the last iteration, median over the seeds"]
    lowest: Annotated[float | None, "of the seeds"]
    highest: Annotated[float | None, "of the seeds"]
    bytes_sent_per_step: Annotated[
        float | None, "by one worker in one iteration, headers included: the median over workers and iterations"
    ]
    of_dense_bytes: Annotated[
        float | None,
        "its bytes as a share of the reference row's; if the reference is a single worker, of the first row that sends",
    ]
    points_below_dense: Annotated[
        float | None,
        "percentage points from this row's median up to the reference row's; negative if this row is better",
    ]
    workload: Annotated[str, "the trained workload"]
    workers: Annotated[int, "the number of workers"]
    seeds: Annotated[tuple[int, ...], "in the order of `accuracy`"]
    error: Annotated[str | None, "the error of the first failed training"]
    strategy: Annotated[str, "the strategy of the trainings"]
    chosen: Annotated[str | None, "the strategy that ran, with all choices made"]
    scatter_points: Annotated[
        float | None, "percentage points between the lowest and the highest; `null` for fewer than two seeds"
    ]
    within_scatter: Annotated[
        bool | None, "whether the size of `points_below_dense` is at most the reference row's `scatter_points`"
    ]


@dataclass(frozen=True, kw_only=True)
class AccuracyResult(ResultFile):
    """A whole table: machine, workload and length of the trainings, and every training, row by row.

    ``iterations`` is the length of every training, ``epochs`` the same if it was given in epochs, ``batch`` the global
    batch. ``reference`` is the strategy whose row all others are compared with.
    """

    verb: ClassVar = "accuracy"
    work: ClassVar = {
        "workload": "workload", "workers": "number of workers", "iterations": "length", "batch": "size of batches",
    }  # fmt: skip

    workload: str
    workers: int
    epochs: int | None
    iterations: int
    batch: int
    runs: tuple[AccuracyRun, ...] = ()
    reference: str = DENSE

    @property
    def of_codecs(self) -> bool:
        """Whether every training was requested as a codec, so that codecs name the rows."""
        return all(run.codec is not None for run in self.runs)

    @property
    def sender(self) -> str | None:
        """The strategy whose bytes are the unit of all shares: the reference, or the first strategy that sends if that
        is a single worker."""
        if self.reference != BASELINE:
            return self.reference
        return next((strategy for strategy, runs in self.grouped.items() if _median(_sent(runs))), None)

    @property
    def grouped(self) -> Mapping[str, Sequence[AccuracyRun]]:
        """The trainings of every strategy, in their order."""
        return grouped(self.runs, lambda run: run.strategy)

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
        """This result in the order of ``keys``; trainings without a key come last, in their own order."""
        place = {key: number for number, key in enumerate(keys)}
        runs = sorted(self.runs, key=lambda run: place.get(run.key, len(place)))
        return dataclasses.replace(self, runs=tuple(runs))

    def beside(self, reference: str) -> AccuracyResult:
        """This result with that reference, or unchanged while only the present reference has been trained."""
        there = {run.strategy for run in self.runs if run.finished}
        if reference not in there and self.reference in there:
            return self
        return dataclasses.replace(self, reference=reference)

    def content(self) -> dict[str, Any]:
        """All fields; ``rows`` is for programs and follows from ``runs``."""
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


def render(result: AccuracyResult) -> Sheet:
    """The results for a terminal."""
    return Sheet([table(result)] if result.runs else ())


def table(result: AccuracyResult, codecs: bool = True) -> Table[AccuracyRow]:
    """The rows, named by strategies or, with ``codecs``, by codecs."""
    codecs = codecs and result.of_codecs
    other, sender = result.reference, result.sender or result.reference
    if codecs and other == DENSE:
        other = sender = "dense"

    def name(row: AccuracyRow) -> str:
        return row.codec or row.strategy if codecs else row.strategy

    def failed(row: AccuracyRow) -> str:
        return f"{name(row)}{' with feedback' if codecs and row.feedback else ''}, {row.error}"

    columns: list[Column[AccuracyRow]] = [
        Column("codec" if codecs else "strategy", by=name, kind="name"),
        Column("fb", "feedback", _yes, head="feedback", means="with error feedback", when=lambda _: codecs),
        Column("acc", "median_accuracy", units.hundredths, unit="%", head="accuracy", fails=True),
        Column("range", rank=3, by=_range, head="lowest to highest", means="the lowest and the highest of the seeds"),
        Column("below", "points_below_dense", _points, head=f"points below {other}", means=f"points below {other}"),
        Column(
            "within",
            "within_scatter",
            _yes,
            4,
            head="within scatter",
            means=f"no further from {other} than the seeds of {other} from each other",
        ),
        Column("bytes", "bytes_sent_per_step", units.size, 1, head="bytes per step"),
        Column("share", "of_dense_bytes", _share, 2, head=f"of {sender}", means=f"of the bytes of {sender}"),
    ]
    return Table(
        columns,
        result.rows,
        title_of(result),
        measured=lambda row: row.median_accuracy is not None,
        style=lambda row: "red" if row.error is not None else "",
        errors=[failed(row) for row in result.rows if row.error is not None],
        spare=8,
    )


def _range(row: AccuracyRow) -> str:
    if row.lowest is None or row.scatter_points is None:
        return units.MISSING if row.lowest is None else "one seed"
    return f"{units.percent(row.lowest, 2, '')} - {units.percent(row.highest, 2, '')}"


def _points(value: float | None) -> str:
    return units.MISSING if value is None else f"{round(value, 2) + 0.0:.2f}"


def _share(value: float | None) -> str:
    return units.MISSING if value is None else f"{units.significant(100 * value)} %"


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: units.MISSING}[value]


def markdown(result: AccuracyResult) -> str:
    """The table in Markdown under a line on the workload, the machine and the versions."""
    shown = table(result)
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    commit = (
        "" if result.commit is None else f", commit {result.commit[:10]}{' with changes' if result.modified else ''}"
    )
    origin = f"{result.machine}, {result.cores} cores; {versions}{commit}"
    failed = "; ".join(error.partition("\n")[0].rstrip(".") for error in shown.errors)
    text = f"{title_of(result)}; {length_of(result)}. {origin}.\n\n{shown.markdown()}"
    return f"{text}\nFailed: {failed}.\n" if failed else text


def title_of(result: AccuracyResult) -> str:
    """Workload, workers and seeds: ``digits, 4 workers, seeds 0, 1, 2``."""
    # The path of a data set on this machine stays private.
    workload = result.workload.partition(":")[0]
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(run.seed for run in result.runs))
    return f"{workload}, {result.workers} workers, seed{'s' if ',' in seeds else ''} {seeds}"


def length_of(result: AccuracyResult) -> str:
    """The length of every training: ``12 epochs, 276 iterations of 64 images``."""
    epochs = "" if result.epochs is None else f"{result.epochs} epoch{'s' if result.epochs > 1 else ''}, "
    return f"{epochs}{result.iterations} iterations of {result.batch} images"


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
