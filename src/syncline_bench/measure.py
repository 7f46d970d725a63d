"""The arithmetic of a measured training: the stages of an iteration, the medians of a worker, the row of all workers.

Owns the meaning of a row's numbers. Does no I/O and reads no clock of its own, so tests need not wait. The stages
follow Shi and Chu (arXiv 1711.05979). Exposed communication is the time for which the training thread is blocked in
the communication library; it is subtracted from the stage in which it occurs.

The bound of a replayed iteration (``bound_s``, ``of_bound``) assumes that communication is hidden perfectly:

    bound = max(compute, 2(N-1)/N bytes / link)    bytes: all gradients, uncompressed
    link  = max(measured goodput, rate * 1448/1514)
    compute = copy + forward + backward            plus loading; if prefetched, the larger of the two

A full Ethernet frame of 1514 bytes carries 1448 bytes of TCP payload (with timestamps); rate limits count whole frames.
In an allreduce each rank sends and receives at least 2(N-1)/N of the bytes. Servers on hosts of their own and
compression can need less; ``of_bound`` is then above 1. If neither a lab nor the strategy limits the link (shared
memory, loopback), the bound is compute alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median, median_low
from typing import Any

from .report.comparison import BASELINE, STAGES, Point, Row
from .workloads import AT_ONCE, EVEN, Pipeline, Speed, Trace

COMPUTE_STAGES = tuple(stage for stage in STAGES if stage != "exposed_comm_s")
MEASURES = (*STAGES, "iteration_s", "compute_s", "images_per_s", "bytes_sent_per_step")
COUNTED = ("exposed_comm_s", "compute_s", "bytes_sent_per_step")
"""Measures that exist only if the communication library counts its blocked time and bytes."""
PASSES = ("forward_s", "backward_s", "update_s")
"""Measures that exist unless the framework fuses these stages into one computation, which is ``step_s``."""
_CURVE_POINTS = 100
_SLOWER = 1.25
"""The slowest worker is named if its computation takes more than this factor of the median worker's."""


@dataclass
class IterationClock:
    """Splits an iteration into stages, excluding the time blocked in communication.

    ``now`` reads a clock in seconds, ``blocked`` the total blocked time so far. Call ``begin``, then ``lap`` at the end
    of each stage, then ``end``.
    """

    now: Callable[[], float]
    blocked: Callable[[], float]
    _start: tuple[float, float] = (0.0, 0.0)
    _last: tuple[float, float] = (0.0, 0.0)
    _stages: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Start an iteration and set its stages to zero."""
        self._start = self._last = (self.now(), self.blocked())
        self._stages = dict.fromkeys(COMPUTE_STAGES, 0.0)

    def lap(self, stage: str) -> None:
        """Add the time since the last call to ``stage``."""
        at, blocked = self.now(), self.blocked()
        # The two clocks are read one after the other, so a stage that was blocked throughout can be slightly negative.
        self._stages[stage] += max(0.0, (at - self._last[0]) - (blocked - self._last[1]))
        self._last = (at, blocked)

    def end(self) -> dict[str, float]:
        """The seconds of all stages, and iteration_s, compute_s and exposed_comm_s, up to the last lap."""
        iteration = self._last[0] - self._start[0]
        exposed = min(iteration, self._last[1] - self._start[1])
        return {
            **self._stages,
            "iteration_s": iteration,
            "exposed_comm_s": exposed,
            "compute_s": iteration - exposed,
        }


@dataclass
class Record:
    """The measurements of one worker so far: the numbers of each iteration and the points of its curves."""

    iterations: int
    """The planned number of iterations."""
    counted: bool = True
    """Whether blocked time and bytes are counted; otherwise their zeros mean nothing."""
    fused: bool = False
    """Whether forward, backward and update are one computation."""
    warmup: int | None = None
    """The number of first iterations that medians exclude; None for the default of ``warmup()``."""
    measures: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MEASURES})
    points: list[Point] = field(default_factory=list)
    seconds: float = 0.0
    position: int = 0
    """The latest step of the run, counted over all workers; asynchronous workers have done fewer themselves."""
    last_loss: float | None = None
    _samples: list[int] = field(default_factory=list)
    _losses: list[tuple[float, int]] = field(default_factory=list)

    @property
    def done(self) -> int:
        """The number of iterations measured so far."""
        return len(self.measures["iteration_s"])

    def add(
        self, times: Mapping[str, float], loss: float, samples: int, bytes_sent: int, position: int | None = None
    ) -> None:
        """Add an iteration: its times, training loss, number of samples, and bytes sent since the previous iteration.

        ``position`` is the position of its batch, by default the number of iterations so far.
        """
        for name, value in times.items():
            self.measures[name].append(value)
        self.measures["images_per_s"].append(samples / times["iteration_s"] if times["iteration_s"] > 0 else 0.0)
        self.measures["bytes_sent_per_step"].append(bytes_sent)
        self.position = self.done if position is None else position
        self.seconds += times["iteration_s"]
        self.last_loss = loss
        self._samples.append(samples)
        self._losses.append((loss, samples))
        if len(self._losses) == math.ceil(self.iterations / _CURVE_POINTS) or self.done == self.iterations:
            self._enter_loss()

    def evaluated(
        self, accuracy: float, loss: float, position: int | None = None, seconds: float | None = None
    ) -> None:
        """Add an evaluation on the test set, at this step and training time (by default the end of the run)."""
        at = self.iterations if position is None else position
        seconds = self.seconds if seconds is None else seconds
        self.points.append(Point(at, seconds, accuracy=accuracy, test_loss=loss))

    def report(self) -> dict[str, Any]:
        """The worker's medians, means and curve as JSON values. All are zero for a worker that had no batch."""
        skip = warmup(self.done) if self.warmup is None else min(self.warmup, max(0, self.done - 1))
        if self._losses:
            self._enter_loss()
        found = {name: values[skip:] or [0.0] for name, values in self.measures.items()}
        measures: dict[str, float | None] = {name: median(values) for name, values in found.items()}
        seconds = sum(found["iteration_s"])
        measures["images_per_s"] = sum(self._samples[skip:]) / seconds if seconds > 0 else 0.0
        measures["bytes_sent_per_step"] = fmean(self.measures["bytes_sent_per_step"] or [0.0])
        unknown = {*(() if self.counted else COUNTED), *(PASSES if self.fused else ("step_s",))}
        return {
            "iterations": self.done,
            "seconds": self.seconds,
            "warmup": skip,
            "measures": {name: None if name in unknown else value for name, value in measures.items()},
            "mean_compute_s": fmean(found["compute_s"]) if self.counted else None,
            "curve": [asdict(point) for point in sorted(self.points, key=lambda point: point.iteration)],
        }

    def _enter_loss(self) -> None:
        total = sum(count for _, count in self._losses)
        mean = sum(value * count for value, count in self._losses) / total
        self.points.append(Point(self.position, self.seconds, loss=mean))
        self._losses = []


def warmup(iterations: int) -> int:
    """The default number of first iterations that medians exclude: a fifth, at most ten."""
    return min(10, iterations // 5)


def row_of(
    strategy: str,
    workers: int,
    servers: int,
    batch: int,
    reports: Sequence[Mapping[str, Any]],
    served_s: float = 0.0,
) -> Row:
    """Make a row from the reports of all workers, in rank order. A measure that one worker lacks is None.

    ``served_s`` is the processor time of the servers. Medians exclude workers without a batch: the pool of an
    asynchronous run may be empty before a slow worker takes its first.
    """
    first = reports[0]
    steps = [int(report["iterations"]) for report in reports]
    busy = [report for report in reports if report["iterations"]]
    values = {name: [report["measures"][name] for report in busy] for name in MEASURES}
    measures: dict[str, Any] = {name: None if None in items else median(items) for name, items in values.items()}
    measures["images_per_s"] = sum(values["images_per_s"])
    counted = measures["bytes_sent_per_step"] is not None
    sent, received = [report["sent"] for report in reports], [report["received"] for report in reports]
    digests = {str(report["sha256"]) for report in reports}
    curve = _curve(reports)
    scored = [point for point in curve if point.accuracy is not None]
    iterations = round(sum(steps) / workers)
    losses = [point.loss for point in curve if point.loss is not None]
    return Row(
        strategy,
        workers,
        accuracy=scored[-1].accuracy if scored else None,
        loss=scored[-1].test_loss if scored else (losses[-1] if losses else None),
        **measures,
        replicas_equal=len(digests) == 1,
        chosen=str(first["chosen"]),
        framework_version=first.get("version"),
        servers=servers,
        iterations=iterations,
        cpu_s_per_step=(served_s + sum(report["cpu_s"] for report in reports)) / iterations if iterations else None,
        warmup=int(_furthest(reports)["warmup"]),
        batch=batch,
        replica_sha256=digests.pop() if len(digests) == 1 else None,
        start_s=median(report["start_s"] for report in reports),
        peak_bytes=max(report["peak_bytes"] for report in reports),
        curve=curve,
        traffic=traffic(sent, received, servers) if counted else (),
        steps=tuple(steps),
        **_coordination(reports, steps),
    )


def _coordination(reports: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> dict[str, Any]:
    """The coordination of the workers: summed staleness and version lags, waits by rank, and the slowest worker."""
    found: dict[str, Any] = {}
    for name in ("staleness", "version_lag"):
        total: Counter[int] = Counter()
        for report in reports:
            total.update({int(number): count for number, count in report[name].items()})
        found[name] = dict(sorted(total.items()))
    waited = [report["waited_s"] for report in reports]
    if None not in waited:
        found["waits"] = tuple(
            tuple(float(line.get(str(rank), 0.0)) for rank in range(len(reports))) for line in waited
        )
        found["wait_s_per_step"] = fmean(
            sum(line) / count for line, count in zip(found["waits"], steps, strict=True) if count
        )
    computing = [report["mean_compute_s"] for report in reports]
    if None not in computing and len(computing) > 1:
        found["compute_by_rank_s"] = tuple(computing)
        slowest = max(range(len(computing)), key=lambda rank: computing[rank])
        if computing[slowest] > _SLOWER * median_low(filter(None, computing)):
            found["slowest_rank"] = slowest
    return found


def timed(row: Row, target: float | None) -> Row:
    """The row with the training time at its first evaluation that reached ``target``; unchanged without a target."""
    if target is None:
        return row
    reached = (point.seconds for point in row.curve if point.accuracy is not None and point.accuracy >= target)
    return replace(row, time_to_accuracy_s=next(reached, None))


def scaled(row: Row, baseline: Row | None) -> Row:
    """The row with its scaling efficiency: its throughput / (workers * throughput of the baseline).

    A single worker's row without a ``baseline`` is its own baseline. The row is unchanged if a throughput is unknown.
    """
    base = row if baseline is None and row.strategy == BASELINE else baseline
    if row.images_per_s is None or base is None or not base.images_per_s:
        return row
    return replace(row, scaling_efficiency=row.images_per_s / (row.workers * base.images_per_s))


def traffic(
    sent: Sequence[Mapping[str, float]], received: Sequence[Mapping[str, float]], servers: int
) -> tuple[tuple[float, ...], ...]:
    """The traffic matrix in bytes per step, [sender][receiver], over workers and then servers.

    ``sent`` and ``received`` have an entry per worker in rank order, keyed by the other process's index (as text).
    Servers do not report, so the workers' ``received`` counts give the servers' rows.
    """
    workers = len(sent)
    count = workers + servers
    matrix = [[0.0] * count for _ in range(count)]
    for rank in range(workers):
        for peer, value in sent[rank].items():
            matrix[rank][int(peer)] = float(value)
        for peer, value in received[rank].items():
            if int(peer) >= workers:
                matrix[int(peer)][rank] = float(value)
    return tuple(tuple(line) for line in matrix)


def _curve(reports: Sequence[Mapping[str, Any]]) -> tuple[Point, ...]:
    """Rank 0's evaluations, and the training losses, averaged over all workers with a point at the same step.

    The losses use the steps of the worker with the most iterations, because in an asynchronous run rank 0 may have few
    or none. The last evaluation is of the work of all workers, so its time is the time of the last worker to finish.
    """
    losses: dict[int, list[float]] = {}
    for report in reports:
        for point in report["curve"]:
            if point["loss"] is not None:
                losses.setdefault(point["iteration"], []).append(point["loss"])
    scored = [Point(**point) for point in reports[0]["curve"] if point["accuracy"] is not None]
    if scored:
        scored[-1] = replace(scored[-1], seconds=max(report["seconds"] for report in reports))
    trained = [
        Point(point["iteration"], point["seconds"], loss=fmean(losses[point["iteration"]]))
        for point in _furthest(reports)["curve"]
        if point["loss"] is not None
    ]
    return tuple(sorted((*trained, *scored), key=lambda point: point.iteration))


def _furthest(reports: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The report of the worker with the most iterations; the lowest rank if several have as many."""
    return max(reports, key=lambda report: int(report["iterations"]))


PAYLOAD_SHARE = 1448 / 1514


def link_bytes_per_s(goodput_bytes_per_s: float | None, lab_rate: float | None, own_rate: float | None) -> float | None:
    """The speed of a rank's link in bytes/s; None if nothing limits it. The rates are in bits/s.

    ``lab_rate`` is the rate of a lab's links, ``own_rate`` the strategy's own limit (``tcp(rate=)``). The lower counts.
    """
    limits = []
    if lab_rate is not None:
        limits.append(max(goodput_bytes_per_s or 0.0, _payload(lab_rate)))
    if own_rate is not None:
        limits.append(_payload(own_rate))
    return min(limits, default=None)


def bound_s(trace: Trace, workers: int, link: float | None, pipeline: Pipeline = AT_ONCE, speed: Speed = EVEN) -> float:
    """The least time of an iteration in seconds, on a worker that is not slowed down; ``link`` in bytes/s."""
    wire_s = 0.0 if link is None else 2 * (workers - 1) / workers * trace.nbytes / link
    return max(pipeline.least_s(speed.least_s(trace.total_s)), wire_s)


def bounded(
    row: Row, trace: Trace | None, link: float | None, pipeline: Pipeline = AT_ONCE, speed: Speed = EVEN
) -> Row:
    """The row with its bound and bound / iteration time. Unchanged if the workload is not a replay."""
    if trace is None:
        return row
    bound = bound_s(trace, row.workers, link, pipeline, speed)
    return replace(row, bound_s=bound, of_bound=bound / row.iteration_s if row.iteration_s else None)


def _payload(rate: float) -> float:
    return rate / 8 * PAYLOAD_SHARE
