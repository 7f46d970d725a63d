"""The result file of a comparison: what every number in it means, and its JSON form.

Owns the names, units and JSON of a ``Result`` and its ``Row``s. Does not know how they were measured or how they are
shown. The rules of ``result_file`` hold here.

The decomposition of an iteration into tasks (loading, copy to the device, forward, backward, aggregation, update) is
that of Shi and Chu, "Performance modeling and evaluation of distributed deep learning frameworks on GPUs"
(arXiv 1711.05979).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, ClassVar

from .result_file import ResultFile, known

STAGES = ("loading_s", "h2d_s", "forward_s", "backward_s", "update_s", "step_s", "exposed_comm_s")
"""The parts of an iteration, in the order in which they happen; the last one overlaps none of the others.

``step_s`` stands for the three before it where a framework makes one computation of them."""

BASELINE = "single"
"""The strategy text of the one-worker row that every other row is compared with."""


@dataclass(frozen=True)
class Point:
    """One point of a training curve: the iteration it belongs to, the training time so far, and what was seen there.

    ``seconds`` counts iterations only, not evaluations. ``loss`` is the mean training loss since the point before it,
    over all workers; ``accuracy`` and ``test_loss`` are of the test set. Each is None where it was not taken.
    """

    iteration: int
    seconds: float
    loss: float | None = None
    accuracy: float | None = None
    test_loss: float | None = None


@dataclass(frozen=True)
class Row:
    """One strategy, measured. Times are seconds per iteration, bytes are per worker and iteration.

    A worker's value is the median over its iterations, a row's value the median over its workers (those that had a
    batch), with two exceptions.
    ``images_per_s`` is the sum over workers of what each did in its time, the warm-up left out, and
    ``bytes_sent_per_step`` is the mean over the whole run, exchanges that come every so many steps included.
    ``forward_s``, ``backward_s`` and the other stages exclude the time for which the training thread was blocked in the
    communication library; that time is ``exposed_comm_s``, and ``compute_s`` is the rest of the iteration. Where nobody
    counts that time, as in a peer, those two are None, and ``backward_s`` and ``update_s`` include it. ``accuracy`` and
    ``loss`` are of the test set after the last iteration; without a test set ``loss`` is the last point of the training
    curve.
    """

    strategy: str
    workers: int
    accuracy: float | None = None
    loss: float | None = None
    images_per_s: float | None = None
    scaling_efficiency: float | None = None
    iteration_s: float | None = None
    loading_s: float | None = None
    h2d_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None
    compute_s: float | None = None
    exposed_comm_s: float | None = None
    bytes_sent_per_step: float | None = None
    replicas_equal: bool | None = None
    chosen: str | None = None
    """What really ran, every choice that was made by measuring filled in."""
    servers: int = 0
    """Server processes of their own, beside the workers."""
    iterations: int = 0
    """Iterations that the row finished."""
    warmup: int = 0
    """Iterations at the start that the medians leave out."""
    batch: int | None = None
    """The global batch: samples per iteration of all workers together."""
    replica_sha256: str | None = None
    """The digest of parameters and buffers at the end, when all workers have the same one."""
    start_s: float | None = None
    """From before the group is joined until the model is prepared: the median over workers."""
    peak_bytes: int | None = None
    """The most memory that a worker had: all of its process, framework, model and data included."""
    curve: tuple[Point, ...] = ()
    traffic: tuple[tuple[float, ...], ...] = ()
    """Bytes per iteration that each process (row) sent to each process (column); workers first, then servers."""
    bound_s: float | None = None
    """What no iteration of a replayed workload can be shorter than without compression: loading and compute, or the
    trace's gradients over the link; None for other workloads."""
    of_bound: float | None = None
    """``bound_s`` as a share of the iteration: 1 is perfect, and only compression gets beyond."""
    error: str | None = None
    """Why the row could not be finished; None when it was."""
    requested: str | None = None
    """The text that ``strategy`` was asked for with, as it was given."""
    note: str | None = None
    """What in ``strategy`` is not as in the framework that the preset is named after."""
    preset: str | None = None
    """The preset that ``strategy`` was asked for as; None where the strategy itself was named."""
    steps: tuple[int, ...] = ()
    """The iterations of each worker, which differ where each goes at its own pace; ``iterations`` is their mean."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """How many steps began so many clocks ahead of the slowest worker, over all workers."""
    version_lag: Mapping[int, int] = field(default_factory=dict)
    """How many pushes were so many updates behind the weights that they were applied to, over all workers."""
    wait_s_per_step: float | None = None
    """How long a worker was held up by others before a step: the mean over workers; None where nobody counts that."""
    waits: tuple[tuple[float, ...], ...] = ()
    """Seconds of the run that each worker (row) waited for each worker (column) before its steps."""
    compute_by_rank_s: tuple[float, ...] = ()
    """Each worker's mean iteration without the time blocked in communication; 0 of one that had no batch."""
    slowest_rank: int | None = None
    """The worker that computes longest, where that is a quarter longer than the median worker or more."""
    step_s: float | None = None
    """Forward, backward and update where they are one computation of which nobody sees the parts; then those are None,
    and where they are seen this is."""
    framework: str = "torch"
    """What trained."""
    framework_version: str | None = None
    time_to_accuracy_s: float | None = None
    """Training time after which the model was first seen to be as accurate as was asked for; None if it never was."""
    cpu_s_per_step: float | None = None
    """Processor time of all workers and servers, user and kernel, for an iteration: the mean over the whole run. That
    of servers counts from when they prepare the model."""
    launcher: str = "local"
    """What started the processes: ``local`` is ``compare`` itself, anything else what ``--launcher`` said."""

    @property
    def name(self) -> str:
        """What the row is called where people read: the strategy, behind its preset where there is one."""
        return self.strategy if self.preset is None else f"{self.preset}: {self.strategy}"

    @property
    def mean_staleness(self) -> float | None:
        """How far ahead of the slowest worker a step began in the mean; None where nobody counted."""
        steps = sum(self.staleness.values())
        return sum(number * count for number, count in self.staleness.items()) / steps if steps else None

    @property
    def slower(self) -> float | None:
        """How many times as long as the median worker the slowest computes, where there is one."""
        if self.slowest_rank is None:
            return None
        return self.compute_by_rank_s[self.slowest_rank] / median_low(filter(None, self.compute_by_rank_s))

    @property
    def reasoned(self) -> bool:
        """Whether ``chosen`` gives the reason of a choice made by measuring."""
        return self.chosen is not None and " (" in self.chosen

    @property
    def finished(self) -> bool:
        """True when the row ran to its end and its replicas agree."""
        return self.error is None and self.replicas_equal is True


@dataclass(frozen=True, kw_only=True)
class Result(ResultFile):
    """A whole comparison: where it ran, on what work, and its rows, the single worker first."""

    verb: ClassVar = "compare"
    lists: ClassVar = {"rows": lambda data: _row(data)}

    workload: str
    rows: tuple[Row, ...] = ()
    seed: int = 0
    epochs: int | None = None
    iterations: int | None = None
    lab: str | None = None
    """The rate of each link when every process had a host of its own in a lab."""
    goodput_bytes_per_s: float | None = None
    """What one stream got from one host to another before the rows were measured."""
    target: float | None = None
    """The accuracy that ``time_to_accuracy_s`` is about."""

    @property
    def frameworks(self) -> tuple[str, ...]:
        """What trained, in the order of the rows."""
        return tuple(dict.fromkeys(row.framework for row in self.rows))

    def baseline(self, framework: str) -> Row | None:
        """The finished row of that framework's single worker, if there is one."""
        alone = (row for row in self.rows if row.strategy == BASELINE and row.framework == framework)
        return next((row for row in alone if row.error is None), None)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of workers of the strategies, ascending: one, unless every strategy was measured on several."""
        return tuple(sorted({row.workers for row in self.rows if row.strategy != BASELINE}))

    def titled(self, row: Row) -> str:
        """The name of a row, behind its framework where there are several."""
        return row.name if len(self.frameworks) < 2 else f"{row.framework} {row.name}"

    def label(self, row: Row) -> str:
        """The title of a row that no other row has: with its workers where strategies have rows of several numbers."""
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


def _row(data: Mapping[str, Any]) -> Row:
    found = known(Row, data)
    if "preset" not in data:  # of a version that told the preset only
        found["preset"] = data.get("requested")
    for name in ("staleness", "version_lag"):
        found[name] = {int(number): count for number, count in data.get(name, {}).items()}
    for name in ("traffic", "waits"):
        found[name] = tuple(tuple(line) for line in data.get(name, ()))
    for name in ("steps", "compute_by_rank_s"):
        found[name] = tuple(data.get(name, ()))
    return Row(**{**found, "curve": points(data.get("curve", ()))})


def points(data: Sequence[Mapping[str, Any]]) -> tuple[Point, ...]:
    """A curve of a result file."""
    return tuple(Point(**known(Point, point)) for point in data)
