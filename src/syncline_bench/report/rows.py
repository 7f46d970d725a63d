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
from typing import Annotated, Any, ClassVar

from .result_file import ResultFile, known

STAGES = ("loading_s", "h2d_s", "forward_s", "backward_s", "update_s", "step_s", "exposed_comm_s")
"""The parts of an iteration, in the order in which they happen; the last one overlaps none of the others.

``step_s`` stands for the three before it where a framework makes one computation of them."""

BASELINE = "single"
"""The strategy text of the one-worker row that every other row is compared with."""


@dataclass(frozen=True)
class Point:
    """One point of a training curve; what was not taken there is None."""

    iteration: int
    seconds: Annotated[float, "of all iterations so far, without evaluations"]
    loss: Annotated[float | None, "mean training loss since the point before it, over all workers"] = None
    accuracy: Annotated[float | None, "of the test set"] = None
    test_loss: Annotated[float | None, "of the test set"] = None


@dataclass(frozen=True)
class Row:
    """One strategy, measured. Times are seconds per iteration, bytes are per worker and iteration.

    A worker's value is the median over its iterations, a row's value the median over its workers (those that had a
    batch), unless the field says otherwise. ``exposed_comm_s`` and ``compute_s`` are None where nobody counts the time
    blocked in communication, as in a peer; ``backward_s`` and ``update_s`` include it there.
    """

    strategy: Annotated[str, "what the processes were told"]
    workers: Annotated[int, "how many trained"]
    accuracy: Annotated[float | None, "test accuracy after the last iteration"] = None
    loss: Annotated[
        float | None, "of the test set after the last iteration; without one the last point of the curve"
    ] = None
    images_per_s: Annotated[float | None, "of all workers together, the warm-up left out"] = None
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
    chosen: Annotated[str | None, "what really ran, every choice that was made by measuring filled in"] = None
    servers: Annotated[int, "processes beside the workers"] = 0
    iterations: Annotated[int, "how many the row finished"] = 0
    warmup: Annotated[int, "iterations at the start that the medians leave out"] = 0
    batch: Annotated[int | None, "samples per iteration of all workers together"] = None
    replica_sha256: Annotated[
        str | None, "digest of parameters and buffers at the end, when all workers have the same"
    ] = None
    start_s: Annotated[float | None, "joining the group and preparing the model"] = None
    peak_bytes: Annotated[int | None, "the most that a worker's process had, framework, model and data included"] = None
    curve: Annotated[tuple[Point, ...], "how the training went"] = ()
    traffic: Annotated[tuple[tuple[float, ...], ...], "bytes per iteration from process to process, workers first"] = ()
    bound_s: Annotated[
        float | None, "what no iteration of a replayed workload can be shorter than without compression"
    ] = None
    of_bound: Annotated[
        float | None, "the bound, what no iteration can be shorter than without compression, against the iteration"
    ] = None
    error: Annotated[str | None, "why the row could not be finished"] = None
    requested: Annotated[str | None, "the text that the strategy was asked for with"] = None
    note: Annotated[str | None, "what is not as in the framework that the preset is named after"] = None
    preset: Annotated[str | None, "the preset that the strategy was asked for as"] = None
    steps: Annotated[tuple[int, ...], "iterations of each worker, with their mean in `iterations`"] = ()
    staleness: Annotated[Mapping[int, int], "steps ahead of the slowest worker when a step begins, mean (most)"] = (
        field(default_factory=dict)
    )
    version_lag: Annotated[Mapping[int, int], "pushes by how many updates they were behind the weights"] = field(
        default_factory=dict
    )
    wait_s_per_step: Annotated[float | None, "time per step that a worker was held up by others"] = None
    waits: Annotated[
        tuple[tuple[float, ...], ...], "seconds of the run that worker waited for worker before its steps"
    ] = ()
    compute_by_rank_s: Annotated[tuple[float, ...], "each worker's mean `compute_s`, 0 of one that had no batch"] = ()
    slowest_rank: Annotated[
        int | None, "the worker that computes longest, by a quarter of the median worker's or more"
    ] = None
    step_s: Annotated[float | None, "forward, backward and update where a framework makes one computation of them"] = (
        None
    )
    framework: Annotated[str, "what trained"] = "torch"
    framework_version: Annotated[str | None, "its version"] = None
    time_to_accuracy_s: Annotated[
        float | None, "training time until the model was first seen to be as accurate as was asked for"
    ] = None
    cpu_s_per_step: Annotated[
        float | None, "processor time of all processes per iteration, the mean over the whole run"
    ] = None
    launcher: Annotated[str, "what started the processes: `compare` itself, or what `--launcher` said"] = "local"

    @property
    def name(self) -> str:
        """The row's name for readers: the strategy, behind its preset where there is one."""
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
    """The goodput of one stream between two hosts, measured before the rows."""
    target: float | None = None
    """The accuracy that ``time_to_accuracy_s`` is about."""

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
