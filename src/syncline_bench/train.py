"""The script that every process of a comparison runs: ``python -m syncline_bench.train JOB``.

Owns the training loop and where its clock ticks; the loop is the one a user would write, with ``prepare`` and nothing
else between it and the plain framework (``frameworks``), which is the only one that is imported. Strategy ``single``
does not touch Syncline's communication at all: it is the peer that all others are compared with. Further peers, such as
``ddp``, take Syncline's place behind the same calls. JOB is the JSON of ``Job``; results go to the line that it names
for this process. One thread per process, so that rows with more processes do not get more of it each.

Stages of an iteration: *loading* waits for the next batch of the workload, which takes the time that its pipeline says
or, prefetched, is there; *h2d* is the copy to the device, which is 0 on a CPU, where the batch already is, unless the
pipeline says otherwise; *forward* includes the loss; *backward* is ``loss.backward()``; *update* is the optimizer's
step, the learning-rate schedule's, and ``zero_grad``, which closes the iteration. Where a framework makes one
computation of these three, that is the stage *step*. Each excludes the time blocked in Syncline; a peer does not say
how long it was blocked. What the workload's text says of the speed of workers is slept in forward and backward, or
before that one computation. Evaluation (``looks``), barriers, and the reports are outside of iterations. The start is
joining the group and preparing the model; loading data and building the model are not. Replicas that differ on the way
are brought together behind the last iteration, before the last evaluation.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from statistics import fmean
from typing import Any, cast

from syncline.launch.environment import recognise
from syncline.strategy.parts import build

from .batches import Batch, batches, pooled, weighed
from .contenders import peer_of
from .frameworks import Training, framework_of
from .looks import Looks
from .measure import IterationClock, Record
from .messages import Connection, Job, connect
from .report.rows import BASELINE
from .sides import Alone, Counters, Side
from .workloads import Feed, Tempo, Workload, load

_REPORT_EVERY_S = 0.1


def main(text: str) -> None:
    """Run the job; a failure is told to the process that started this one, and raised."""
    job = Job.from_json(text)
    with closing(connect(job.reports)) as connection:
        try:
            framework_of(job.framework).target.loaded()  # type: ignore[attr-defined]
            begun = time.perf_counter()
            train(job, side_of(job.strategy), connection, time.perf_counter() - begun, recognise().rank)
        except Exception as error:
            connection.fail(error)
            raise


def train(
    job: Job,
    side: Side,
    connection: Connection,
    joined_s: float = 0.0,
    process: int = 0,
    workload: Workload | None = None,
    beside: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Train to the end of the job and send one result, with what ``beside`` says when the last iteration is over.

    Joining the group took ``joined_s``; ``process`` is which of the run's processes this is. ``workload`` is the job's
    where it was loaded before.
    """
    workload = workload or load(job.workload)
    kind = cast("type[Training]", framework_of(job.framework).target)
    version = kind.loaded()
    training = kind(workload, job, process)
    begun, used_s = time.perf_counter(), time.process_time()
    try:
        training.prepare(side, workload.weight if weighed(job.strategy) else 1)
    except SystemExit:  # a server, when all workers have left
        connection.send("served", cpu_s=time.process_time() - used_s)
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
                _tell(connection, record, world)
            looks.look(record)
    if rank == 0:
        _tell(connection, record, world)
    end, used_s = side.stats(), time.process_time() - used_s
    # Who has no more batches holds nobody up here; whom a bound on staleness stops would wait for it at a barrier.
    training.consolidate(side)
    side.barrier()
    training.pause()
    outcome = _outcome(training, start, end, record.done) | {"version": version, "cpu_s": used_s}
    # Waits of workers in step are part of their exchanges, and nobody tells them apart.
    outcome["waited_s"] = _by_text(end.waited_s) if pooled(job.strategy) or end.waited_s else None
    looks.end(record)
    connection.send("result", **record.report(), start_s=start_s, **outcome, **beside())
    side.shutdown()


class _Loop:
    """The body of the training loop, with the clock around its stages."""

    def __init__(self, training: Training, workload: Workload, job: Job, side: Side) -> None:
        self._training, self._copies, self._stats = training, workload.copied, side.stats
        replayed_s = None if workload.trace is None else workload.trace.total_s
        now = training.now
        self._clock = IterationClock(now, lambda: side.stats().blocked_s or 0.0)
        self._tempo = Tempo(workload.speed, side.rank(), job.seed, replayed_s, now, lambda: side.stats().blocked_s)
        self._sent = _total(side.stats().bytes_sent)

    def iterate(self, feed: Feed[Batch], record: Record) -> bool:
        """One iteration, entered into the record; False when there is no batch for it."""
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
    """Join the group that a strategy or peer makes; the single worker is in none."""
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


def _tell(connection: Connection, record: Record, world: int) -> None:
    rates = record.measures["images_per_s"][-20:]
    connection.send(
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
    main(sys.argv[1])
