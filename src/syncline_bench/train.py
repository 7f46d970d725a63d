"""The script of every process of a comparison: ``python -m syncline_bench.train JOB LINES``.

Owns the training loop and the points where its clock is read. The loop is a user's loop: ``prepare`` is the only
addition to the plain framework (``frameworks``), and no other framework is imported. The strategy ``single`` trains
without Syncline's communication and is the baseline. Peers such as ``ddp`` replace Syncline behind the same calls. JOB
is the JSON of a ``Job``, and LINES has the addresses of the connections to the starter. Each process has one thread, so
that rows with few processes have no advantage.

Stages of an iteration: *loading* waits for the next batch, whose delay the workload's pipeline sets, unless it is
prefetched; *h2d* copies the batch to the device, which takes no time on a CPU unless the pipeline sets one; *forward*
includes the loss; *backward* is ``loss.backward()``; *update* covers the steps of the optimizer and the learning-rate
schedule, and ``zero_grad``. A framework that fuses the last three into one computation has the stage *step* instead.
All stages exclude the time blocked in Syncline; peers do not count theirs. Slow workers of the workload sleep within
forward and backward, or before the fused computation. Evaluations, barriers and reports are outside
iterations. The start time covers joining the group and preparing the model, but neither loading data nor building the
model. Replicas that differ are consolidated after the last iteration, before the last evaluation.

An evaluation during training would delay the other workers if they wait for rank 0, and would give them a lead if they
do not. The weights are therefore only copied during training and evaluated afterwards (``Looks``). An accuracy belongs
to the training time at which its weights were copied. If the copies exceed ``KEPT_BYTES``, they are evaluated at once
and dropped.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from statistics import fmean
from typing import Any, NamedTuple, cast

from syncline.launch.environment import recognise
from syncline.strategy.words import build

from .batches import Batch, batches, pooled, weighed
from .contenders import peer_of
from .frameworks import Training, framework_of
from .measure import IterationClock, Record
from .messages import Job
from .ranks import Line
from .report.comparison import BASELINE
from .sides import Alone, Counters, Side
from .workloads import Feed, Tempo, Workload, load

KEPT_BYTES = 1 << 28
"""The most memory that copies may take before they are evaluated."""


class _Look(NamedTuple):
    position: int
    seconds: float
    weights: Mapping[str, Any]
    needed: bool
    """Whether these weights are evaluated even if earlier ones reached the target."""


class Looks:
    """Evaluates a model after every ``every`` steps and every ``epoch`` steps, both counted over all workers.

    ``keeps`` is true on the rank that evaluates. With a ``target``, copies from within epochs are evaluated only until
    one has that accuracy.
    """

    def __init__(self, training: Training, *, every: int, epoch: int, target: float | None, keeps: bool) -> None:
        self._training, self._every, self._epoch, self._target, self._keeps = training, every, epoch, target, keeps
        self._looks: list[_Look] = []
        self._reached = False
        self._before = 0

    def look(self, record: Record) -> None:
        """Copy the weights if an evaluation is due. All ranks call it after each step, since a copy may exchange."""
        before, now = self._before, record.position
        self._before = max(before, now)
        epoch_ended = now // self._epoch > before // self._epoch
        if now >= record.iterations or not (epoch_ended or now // self._every > before // self._every):
            return  # end() evaluates the final weights
        self._training.pause()
        if self._keeps:
            weights = self._training.copied()
            self._looks.append(_Look(now, record.seconds, weights, epoch_ended))
            if sum(tensor.nbytes for tensor in weights.values()) * len(self._looks) > KEPT_BYTES:
                self._test_kept(record)
        self._training.resume()

    def end(self, record: Record) -> None:
        """Evaluate the remaining copies and the final model."""
        if not self._keeps:
            return
        self._test_kept(record)
        record.evaluated(*self._training.evaluate())

    def _test_kept(self, record: Record) -> None:
        kept, self._looks = self._looks, []
        for look in kept:
            if self._reached and not look.needed:
                continue
            scores = self._training.evaluate(look.weights)
            record.evaluated(*scores, position=look.position, seconds=look.seconds)
            self._reached = self._target is not None and (self._reached or scores[0] >= self._target)


_REPORT_EVERY_S = 0.1

Send = Callable[..., None]
"""Sends the starter a report: its kind, and its content by name."""


def main(text: str, lines: str) -> None:
    """Run the job. A failure is reported to the starter before it ends the process."""
    job, place = Job.from_json(text), recognise()
    line = Line(lines, place, watched=place.launcher in ("mpirun", "srun"))
    with line.telling():
        framework_of(job.framework).target.loaded()  # type: ignore[attr-defined]
        begun = time.perf_counter()
        train(job, side_of(job.strategy), line.send, time.perf_counter() - begun, place.rank)


def train(
    job: Job,
    side: Side,
    send: Send,
    joined_s: float = 0.0,
    process: int = 0,
    workload: Workload | None = None,
    beside: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Train to the end of the job and ``send`` one result, extended by the fields that ``beside`` returns afterwards.

    ``joined_s`` is the time that joining the group took, ``process`` this process's index in the run. ``workload`` is
    the job's workload if already loaded.
    """
    workload = workload or load(job.workload)
    kind = cast("type[Training]", framework_of(job.framework).target)
    version = kind.loaded()
    training = kind(workload, job, process)
    begun, used_s = time.perf_counter(), time.process_time()
    try:
        training.prepare(side, workload.weight if weighed(job.strategy) else 1)
    except SystemExit:  # a server, when all workers have left
        send("served", cpu_s=time.process_time() - used_s)
        raise
    start_s = joined_s + time.perf_counter() - begun
    rank, world = side.rank(), side.world_size()
    epoch = workload.steps_per_epoch(job.batch, world)
    every, keeps = job.evaluate_every or epoch, rank == 0 and workload.test is not None and job.scored
    looks = Looks(training, every=every, epoch=epoch, target=job.target, keeps=keeps)
    source = batches(workload, rank, world, job, training.taken)
    start = side.stats()
    used_s = time.process_time()
    record = Record(job.iterations, counted=start.blocked_s is not None, fused=training.fused, warmup=job.warmup)
    with closing(Feed(source, workload.pipeline)) as feed:
        loop = _Loop(training, workload, job, side)
        told = time.monotonic()
        while loop.iterate(feed, record):
            if rank == 0 and time.monotonic() - told > _REPORT_EVERY_S:
                told = time.monotonic()
                _tell(send, record, world)
            looks.look(record)
    if rank == 0:
        _tell(send, record, world)
    end, used_s = side.stats(), time.process_time() - used_s
    # Consolidate before the barrier: a worker without further batches would hold a worker at its staleness bound
    # for ever if it waited at the barrier first.
    training.consolidate(side)
    side.barrier()
    training.pause()
    outcome = _outcome(training, start, end, record.done) | {"version": version, "cpu_s": used_s}
    # Synchronous workers wait within their exchanges, which do not count the waits separately.
    outcome["waited_s"] = _by_text(end.waited_s) if pooled(job.strategy) or end.waited_s else None
    looks.end(record)
    send("result", **record.report(), start_s=start_s, **outcome, **beside())
    side.shutdown()


class _Loop:
    """The body of the training loop, which measures its stages."""

    def __init__(self, training: Training, workload: Workload, job: Job, side: Side) -> None:
        self._training, self._copies, self._stats = training, workload.copied, side.stats
        replayed_s = None if workload.trace is None else workload.trace.total_s
        now = training.now
        self._clock = IterationClock(now, lambda: side.stats().blocked_s or 0.0)
        self._tempo = Tempo(workload.speed, side.rank(), job.seed, replayed_s, now, lambda: side.stats().blocked_s)
        self._sent = _total(side.stats().bytes_sent)

    def iterate(self, feed: Feed[Batch], record: Record) -> bool:
        """Run an iteration and add it to the record. False if there is no further batch."""
        training, clock, tempo = self._training, self._clock, self._tempo
        clock.begin()
        batch = next(feed, None)
        if batch is None:
            return False
        clock.lap("loading_s")
        if self._copies:
            batch = feed.copied(batch, training.moved)
            clock.lap("h2d_s")
        lap = (lambda _: None) if training.fused else clock.lap
        tempo.begin()
        training.forward(batch)
        tempo.forward_ended()
        lap("forward_s")
        tempo.backward_begins()
        training.backward()
        tempo.backward_ended()
        lap("backward_s")
        loss = training.update(batch.position)
        clock.lap("step_s" if training.fused else "update_s")
        sent, before = _total(self._stats().bytes_sent), self._sent
        self._sent = sent
        record.add(clock.end(), loss, len(batch.inputs), sent - before, batch.position)
        return True


def side_of(strategy: str) -> Side:
    """Join the group of a strategy or peer. The single worker joins none."""
    if strategy == BASELINE:
        return Alone()
    peer = peer_of(strategy)
    if peer is not None:
        joined: Side = build("peers", peer).join()
        return joined
    import syncline

    syncline.init(strategy=strategy)
    side: Side = syncline
    return side


def _tell(send: Send, record: Record, world: int) -> None:
    rates = record.measures["images_per_s"][-20:]
    send(
        "progress",
        iteration=record.position,
        loss=record.last_loss,
        images_per_s=world * fmean(rates) if rates else None,
    )


def _outcome(training: Training, start: Counters, end: Counters, steps: int) -> dict[str, Any]:
    def per_step(first: Mapping[int, int], last: Mapping[int, int]) -> dict[str, float]:
        return {str(peer): (count - first.get(peer, 0)) / steps for peer, count in last.items()} if steps else {}

    return {
        "chosen": end.chosen,
        "sha256": training.digest(),
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "sent": per_step(start.bytes_sent, end.bytes_sent),
        "received": per_step(start.bytes_received, end.bytes_received),
        "staleness": _by_text(end.staleness),
        "version_lag": _by_text(end.version_lag),
    }


def _by_text(counts: Mapping[int, float]) -> dict[str, float]:
    return {str(number): count for number, count in counts.items()}


def _total(counts: Mapping[int, int]) -> int:
    return sum(counts.values())


if __name__ == "__main__":
    main(*sys.argv[1:])
