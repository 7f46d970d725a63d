"""Results of ``syncline compare``: rows, their file and table, and remarks on them.

Owns the names, units and JSON of a ``Result`` and its ``Row``s, and the choice of the main figures. The first row is
the single worker; every strategy has the same work. Replayed layers learn nothing: their rows have the share of the
bound in place of the accuracy. The stages of an iteration are on the page. A failed row keeps its place, and its full
error follows below. Does not know how the rows were measured. The rules of ``files`` apply.

The decomposition of an iteration into tasks (loading, copy to the device, forward, backward, aggregation, update) is
that of Shi and Chu, "Performance modeling and evaluation of distributed deep learning frameworks on GPUs"
(arXiv 1711.05979).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Annotated, Any, ClassVar

from . import units
from .columns import Column, Sheet, Table
from .files import ResultFile, grouped

STAGES = ("loading_s", "h2d_s", "forward_s", "backward_s", "update_s", "step_s", "exposed_comm_s")
"""The parts of an iteration in chronological order; the last one overlaps none of the others.

``step_s`` replaces the three before it if a framework makes one computation of them."""

BASELINE = "single"
"""The strategy text of the one-worker row that every other row is compared with."""


@dataclass(frozen=True)
class Point:
    """One point of a training curve; values not measured there are None."""

    iteration: int
    seconds: Annotated[float, "of all iterations so far, without evaluations"]
    loss: Annotated[float | None, "mean training loss since the point before it, over all workers"] = None
    accuracy: Annotated[float | None, "of the test set"] = None
    test_loss: Annotated[float | None, "of the test set"] = None


@dataclass(frozen=True)
class Row:
    """One strategy, measured. Times are seconds per iteration, bytes are per worker and iteration.

    A worker's value is the median over its iterations, a row's value the median over its workers that had a batch,
    unless the field says otherwise. ``exposed_comm_s`` and ``compute_s`` are None if the time blocked in communication
    is not counted, as under a peer; ``backward_s`` and ``update_s`` then include it.
    """

    strategy: Annotated[str, "the strategy that the processes got"]
    workers: Annotated[int, "the number of workers"]
    accuracy: Annotated[float | None, "test accuracy after the last iteration"] = None
    loss: Annotated[
        float | None, "on the test set after the last iteration; without a test set the last point of the curve"
    ] = None
    images_per_s: Annotated[float | None, "of all workers together, without the warm-up"] = None
    scaling_efficiency: Annotated[float | None, "images per second against W times the single worker's"] = None
    iteration_s: Annotated[float | None, "median"] = None
    loading_s: Annotated[float | None, "median of the stage, without the time blocked in communication"] = None
    h2d_s: Annotated[float | None, "median of the copy of a batch to the device"] = None
    forward_s: Annotated[float | None, "median of the stage, without the time blocked in communication"] = None
    backward_s: Annotated[float | None, "median of the stage, without the time blocked in communication"] = None
    update_s: Annotated[float | None, "median of the stage, without the time blocked in communication"] = None
    compute_s: Annotated[float | None, "an iteration without the time blocked in communication"] = None
    exposed_comm_s: Annotated[float | None, "time that the training thread was blocked in communication"] = None
    bytes_sent_per_step: Annotated[float | None, "by one worker in one iteration, the mean over the whole run"] = None
    replicas_equal: Annotated[bool | None, "replicas agree bit for bit"] = None
    chosen: Annotated[str | None, "the strategy that ran, with every choice made by measuring"] = None
    servers: Annotated[int, "server processes"] = 0
    iterations: Annotated[int, "the number of finished iterations"] = 0
    warmup: Annotated[int, "first iterations that the medians exclude"] = 0
    batch: Annotated[int | None, "samples per iteration of all workers together"] = None
    replica_sha256: Annotated[str | None, "digest of parameters and buffers at the end, if equal on all workers"] = None
    start_s: Annotated[float | None, "joining the group and preparing the model"] = None
    peak_bytes: Annotated[int | None, "peak memory of a worker's process, including framework, model and data"] = None
    curve: Annotated[tuple[Point, ...], "loss and accuracy during the training"] = ()
    traffic: Annotated[tuple[tuple[float, ...], ...], "bytes per iteration from process to process, workers first"] = ()
    bound_s: Annotated[float | None, "the lower bound of an iteration of a replayed workload without compression"] = (
        None
    )
    of_bound: Annotated[
        float | None, "the lower bound of an iteration without compression, relative to the iteration"
    ] = None
    error: Annotated[str | None, "the reason why the row failed"] = None
    requested: Annotated[str | None, "the requested text of the strategy"] = None
    note: Annotated[str | None, "the differences from the framework that the preset is named after"] = None
    preset: Annotated[str | None, "the requested preset"] = None
    steps: Annotated[tuple[int, ...], "iterations of each worker, with their mean in `iterations`"] = ()
    staleness: Annotated[Mapping[int, int], "steps ahead of the slowest worker when a step begins, mean (most)"] = (
        field(default_factory=dict)
    )
    version_lag: Annotated[
        Mapping[int, int], "pushes by their version lag, the number of updates behind the weights"
    ] = field(default_factory=dict)
    wait_s_per_step: Annotated[float | None, "time per step that a worker waited for others"] = None
    waits: Annotated[
        tuple[tuple[float, ...], ...], "seconds of the run that one worker waited for another before its steps"
    ] = ()
    compute_by_rank_s: Annotated[
        tuple[float, ...], "each worker's mean `compute_s`, 0 for a worker without a batch"
    ] = ()
    slowest_rank: Annotated[
        int | None, "the slowest worker, if it computes at least a quarter longer than the median worker"
    ] = None
    step_s: Annotated[float | None, "forward, backward and update if a framework makes one computation of them"] = None
    framework: Annotated[str, "what trained"] = "torch"
    framework_version: Annotated[str | None, "its version"] = None
    time_to_accuracy_s: Annotated[float | None, "training time until the first evaluation with the target accuracy"] = (
        None
    )
    cpu_s_per_step: Annotated[
        float | None, "processor time of all processes per iteration, the mean over the whole run"
    ] = None
    launcher: Annotated[str, "the launcher of the processes: `compare` itself, or the one of `--launcher`"] = "local"

    @property
    def name(self) -> str:
        """The row's name for readers: the strategy, preceded by its preset if any."""
        return self.strategy if self.preset is None else f"{self.preset}: {self.strategy}"

    @property
    def mean_staleness(self) -> float | None:
        """The mean lead over the slowest worker at the start of a step; None if it was not counted."""
        steps = sum(self.staleness.values())
        return sum(number * count for number, count in self.staleness.items()) / steps if steps else None

    @property
    def slower(self) -> float | None:
        """The computation time of the slowest worker relative to the median worker's; None without a slowest worker."""
        if self.slowest_rank is None:
            return None
        return self.compute_by_rank_s[self.slowest_rank] / median_low(filter(None, self.compute_by_rank_s))

    @property
    def reasoned(self) -> bool:
        """Whether ``chosen`` gives the reason of a choice made by measuring."""
        return self.chosen is not None and " (" in self.chosen

    @property
    def finished(self) -> bool:
        """True if the row ran to its end and its replicas agree."""
        return self.error is None and self.replicas_equal is True


@dataclass(frozen=True, kw_only=True)
class Result(ResultFile):
    """A whole comparison: machine, workload and rows, the single worker first."""

    verb: ClassVar = "compare"

    workload: str
    rows: tuple[Row, ...] = ()
    seed: int = 0
    epochs: int | None = None
    iterations: int | None = None
    lab: str | None = None
    """The rate of each link if every process had a host of its own in a lab."""
    goodput_bytes_per_s: float | None = None
    """The goodput of one stream between two hosts, measured before the rows."""
    target: float | None = None
    """The target accuracy of ``time_to_accuracy_s``."""

    @classmethod
    def current(cls, data: Any) -> Any:
        """The first versions wrote only the request of a row, which was the preset."""
        return {**data, "rows": [{"preset": row.get("requested"), **row} for row in data["rows"]]}

    @property
    def frameworks(self) -> tuple[str, ...]:
        """The frameworks, in the order of the rows."""
        return tuple(dict.fromkeys(row.framework for row in self.rows))

    def baseline(self, framework: str) -> Row | None:
        """The finished row of that framework's single worker, if there is one."""
        alone = (row for row in self.rows if row.strategy == BASELINE and row.framework == framework)
        return next((row for row in alone if row.error is None), None)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of workers of the strategies, ascending."""
        return tuple(sorted({row.workers for row in self.rows if row.strategy != BASELINE}))

    def titled(self, row: Row) -> str:
        """The name of a row, preceded by its framework if there are several."""
        return row.name if len(self.frameworks) < 2 else f"{row.framework} {row.name}"

    def label(self, row: Row) -> str:
        """The unique title of a row: with its number of workers if strategies have rows with several numbers."""
        if len(self.counts) < 2 or row.strategy == BASELINE:
            return self.titled(row)
        return f"{self.titled(row)}, {row.workers} worker" + ("s" if row.workers > 1 else "")

    @property
    def replayed(self) -> bool:
        """Whether the workload is replayed layers, so that its rows have a bound and learn nothing."""
        return any(row.bound_s is not None for row in self.rows)

    def with_row(self, row: Row) -> Result:
        """This result with one more row at its end."""
        return dataclasses.replace(self, rows=(*self.rows, row))


def render(result: Result) -> Sheet:
    """The table of all rows with its legend, then failures and remarks."""
    return Sheet([table(result)], remarks=remarks(result))


def table(result: Result) -> Table[Row]:
    """The rows, all strategies in one table."""
    return Table(
        _columns(result),
        result.rows,
        measured=lambda row: row.error is None or row.iteration_s is not None,
        errors=[f"{result.label(row)}: {row.error}" for row in result.rows if row.error is not None],
    )


def _columns(result: Result) -> list[Column[Row]]:
    """The columns of merit come first, visible on a page without scrolling; the others explain a row."""
    score = ("bnd", "of_bound", "of bound") if result.replayed else ("acc", "accuracy", "accuracy")
    ms = units.milliseconds
    return [
        Column("strategy", "name", kind="name"),
        Column("framework", by=_framework, kind="text", when=lambda row: row.framework != "torch"),
        Column("W", "workers", rank=1, head="", means="workers"),
        Column(score[0], score[1], units.hundredths, unit="%", head=score[2], fails=True),
        Column("", "loss", units.number, head="loss"),
        Column("img/s", "images_per_s", units.significant, head="images/s"),
        Column("eff", "scaling_efficiency", units.share, 5, unit="%", head="scaling"),
        Column("stale", "staleness", rank=6, by=staleness, head="staleness", when=lambda row: any(row.staleness)),
        Column("wait", "wait_s_per_step", _waited, 7, unit="ms", head="waited", when=lambda row: row.wait_s_per_step),
        Column(
            "to acc",
            "time_to_accuracy_s",
            units.significant,
            unit="s",
            means="",
            when=lambda row: row.time_to_accuracy_s is not None,
        ),
        Column("iter", "iteration_s", ms, 4, unit="ms", head="iteration"),
        Column("", "loading_s", ms, unit="ms", head="loading"),
        Column("", "h2d_s", ms, unit="ms", head="copy"),
        Column("", "forward_s", ms, unit="ms", head="forward"),
        Column("", "backward_s", ms, unit="ms", head="backward"),
        Column("", "update_s", ms, unit="ms", head="update"),
        Column("", "step_s", ms, unit="ms", head="step", when=lambda row: row.step_s is not None),
        Column("", "compute_s", ms, unit="ms", head="compute"),
        Column("comm", "exposed_comm_s", ms, 2, unit="ms", head="exposed"),
        Column("sent", "bytes_sent_per_step", units.size, 3),
        Column("cpu", "cpu_s_per_step", ms, 8, unit="ms", head=""),
        Column("", "start_s", units.seconds, head="start"),
        Column("", "peak_bytes", units.size, head="memory"),
        Column("equal", "replicas_equal", units.verdict),
    ]


def _framework(row: Row) -> str:
    return " ".join(filter(None, (row.framework, row.framework_version)))


def _waited(value: float | None) -> str:
    return units.milliseconds(value or None)


def staleness(row: Row) -> str:
    """The lead of workers over the slowest in steps: the mean and the maximum."""
    if not any(row.staleness):
        return units.MISSING  # all in step
    return f"{units.significant(row.mean_staleness, 2)} ({max(row.staleness)})"


def remarks(result: Result) -> tuple[str, ...]:
    """Remarks that a reader needs to judge the numbers of this machine."""
    lines = []
    if result.lab is not None:
        goodput = result.goodput_bytes_per_s
        got = "" if goodput is None else f", of which one stream gets {goodput * 8 / 1e6:,.0f} Mbit/s"
        lines.append(f"Every process had a host of its own behind links of {result.lab}{got}.")
    elif result.replayed:
        lines.append(
            "The bound contains loading and the trace's compute, and the link only if a strategy limits its rate."
        )
    if result.target is not None and any(row.iteration_s is not None for row in result.rows):
        accuracy = units.percent(result.target, 0 if round(100 * result.target, 9).is_integer() else 2)
        never = [result.label(row) for row in result.rows if row.time_to_accuracy_s is None and row.error is None]
        lines.append(
            f"To acc is the training time after which the model was first seen to be {accuracy} accurate"
            + (f"; {', '.join(never)} never was." if never else ".")
        )
    lines += _launched(result)
    lines += _slowest(result)
    lines += [f"{preset}: {note}." for preset, note in _noted(result).items()]
    found = [row for row in result.rows if row.iteration_s is not None and row.exposed_comm_s is None]
    if found:
        uncounted, fused = dict.fromkeys(map(result.titled, found)), {row.step_s is not None for row in found}
        stage = " or ".join("step" if one else "backward" for one in sorted(fused))
        lines.append(f"{', '.join(uncounted)}: waits and bytes are not counted there; {stage} includes communication.")
    processes = max((row.workers + row.servers for row in result.rows if row.iteration_s is not None), default=0)
    if processes > result.cores:
        lines.append(
            f"Up to {processes} processes shared {result.cores} cores: the stages of the larger rows, and so their "
            "scaling, include waiting for a core."
        )
    if any(row.replicas_equal is False for row in result.rows):
        lines.append("Replicas that differ at the end are a fault, unless the strategy lets them drift on purpose.")
    return tuple(lines)


def _launched(result: Result) -> list[str]:
    """The rows whose processes a launcher has started."""
    lines = []
    for launcher, rows in grouped(result.rows, lambda row: row.launcher).items():
        if launcher != "local":
            names = "all rows" if len(rows) == len(result.rows) else ", ".join(map(result.label, rows))
            lines.append(f"{launcher} started the processes of {names}.")
    return lines


def _slowest(result: Result) -> list[str]:
    """The slowest workers, with their strategies unless it is true for all."""
    measured = [row for row in result.rows if row.compute_by_rank_s]
    lines = []
    for rank in sorted({row.slowest_rank for row in measured if row.slowest_rank is not None}):
        rows = [row for row in measured if row.slowest_rank == rank]
        ends = sorted({f"{row.slower or 0.0:.1f}" for row in rows}, key=float)
        where = "" if rows == measured else f" under {', '.join(map(result.label, rows))}"
        times = " to ".join(dict.fromkeys((ends[0], ends[-1])))
        lines.append(f"Rank {rank} computes {times} times as long as the median worker{where}.")
    return lines


def _noted(result: Result) -> dict[str, str]:
    """The differences from the original, by preset."""
    return {row.preset: row.note for row in result.rows if row.preset is not None and row.note is not None}
