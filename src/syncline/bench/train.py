"""The script that every process of a comparison runs: ``python -m syncline.bench.train JOB``.

Owns the training loop and where its clock ticks; the loop is the one a user would write, with ``prepare`` and nothing
else between it and plain PyTorch. Strategy ``single`` does not touch Syncline's communication at all: it is the peer
that all others are compared with. Further peers, such as ``ddp``, take Syncline's place behind the same calls. JOB is
the JSON of ``Job``; results go to the pipe that it names for this process. One thread per process, so that rows with
more processes do not get more of it each.

Stages of an iteration: *loading* waits for the next batch of the workload, which takes the time that its pipeline says
or, prefetched, is there; *h2d* is the copy to the device, which is 0 on a CPU, where the batch already is, unless the
pipeline says otherwise; *forward* includes the loss; *backward* is ``loss.backward()``; *update* is the optimizer's
step, the learning-rate schedule's, and ``zero_grad``, which closes the iteration. Each excludes the time blocked in
Syncline; a peer does not say how long it was blocked. What the workload's text says of the speed of workers is slept in
forward and backward. Evaluation (``looks``), barriers, and the reports are outside of iterations. The start is joining
the group and preparing the model; loading data and building the model are not. Replicas that differ on the way are
brought together behind the last iteration, before the last evaluation.
"""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from statistics import fmean
from typing import Any

import torch

from ..launch.environment import recognise
from ..report.rows import BASELINE
from ..strategy.parts import build
from ..workloads import Feed, Tempo, Workload, load
from .batches import Batch, batches, pooled, weighed
from .contenders import peer_of
from .looks import Looks
from .measure import IterationClock, Record
from .messages import Job, Sender
from .sides import Alone, Counters, Side

_REPORT_EVERY_S = 0.1


def main(text: str) -> None:
    """Run the job; a failure is told to the process that started this one, and raised."""
    job = Job.from_json(text)
    with closing(Sender(job.report_fds[recognise().rank])) as sender:
        try:
            torch.set_num_threads(1)
            begun = time.perf_counter()
            train(job, _side(job.strategy), sender, time.perf_counter() - begun, recognise().rank)
        except Exception as error:
            sender.send("error", at=time.monotonic(), text=f"{type(error).__name__}: {error}")
            raise


def train(job: Job, side: Side, sender: Sender, joined_s: float = 0.0, process: int = 0) -> None:
    """Train to the end of the job and send one result.

    Joining the group took ``joined_s``; ``process`` is which of the run's processes this is.
    """
    workload = load(job.workload)

    def build() -> torch.nn.Module:
        return workload.computing.placed(workload.model(job.seed, process), process)

    bare = build()
    bare_optimizer = workload.optimizer(bare)
    begun = time.perf_counter()
    weight = workload.weight if weighed(job.strategy) else 1
    model, optimizer = side.prepare(bare, bare_optimizer, weight=weight)
    start_s = joined_s + time.perf_counter() - begun
    rank, world = side.rank(), side.world_size()
    # Replicas start equal; what is random during training (dropout) differs between them, as it would in one big batch.
    torch.manual_seed(job.seed * 65_537 + rank)
    epoch = workload.steps_per_epoch(job.batch, world)
    every, keeps = job.evaluate_every or epoch, rank == 0
    looks = Looks(workload, model, bare, build, every=every, epoch=epoch, target=job.target, keeps=keeps)
    source = batches(workload, rank, world, job)
    start = side.stats()
    record = Record(job.iterations, counted=start.blocked_s is not None)
    model.train()
    with closing(Feed(source, workload.pipeline)) as feed:
        loop = _Loop(model, optimizer, workload, job, side)
        told = time.monotonic()
        while loop.iterate(feed, record):
            if rank == 0 and time.monotonic() - told > _REPORT_EVERY_S:
                told = time.monotonic()
                _tell(sender, record, world)
            looks.look(record)
    if rank == 0:
        _tell(sender, record, world)
    end = side.stats()
    # Who has no more batches holds nobody up here; whom a bound on staleness stops would wait for it at a barrier.
    side.consolidate()
    side.barrier()
    model.eval()
    outcome = _outcome(bare, start, end, record.done)
    # Waits of workers in step are part of their exchanges, and nobody tells them apart.
    outcome["waited_s"] = _by_text(end.waited_s) if pooled(job.strategy) or end.waited_s else None
    looks.end(record)
    sender.send("result", **record.report(), start_s=start_s, **outcome)
    side.shutdown()


class _Loop:
    """The body of the training loop, with the clock around its stages."""

    def __init__(self, model: Any, optimizer: Any, workload: Workload, job: Job, side: Side) -> None:
        self._model, self._optimizer = model, optimizer
        self._loss: Callable[..., Any] = workload.loss
        self._scheduler = workload.schedule(optimizer, job.iterations)
        self._scheduled = 0
        self._copies, self._computing = workload.copied, workload.computing
        self._stats = side.stats
        replayed_s = None if workload.trace is None else workload.trace.total_s
        now = workload.computing.now
        self._clock = IterationClock(now, lambda: side.stats().blocked_s or 0.0)
        self._tempo = Tempo(workload.speed, side.rank(), job.seed, replayed_s, now, lambda: side.stats().blocked_s)
        self._sent = _total(side.stats().bytes_sent)

    def iterate(self, feed: Feed[Batch], record: Record) -> bool:
        """One iteration, entered into the record; False when there is no batch for it."""
        clock, tempo = self._clock, self._tempo
        clock.begin()
        batch = next(feed, None)
        if batch is None:
            return False
        clock.lap("loading_s")
        if self._copies:
            batch = feed.copied(batch, lambda loaded: loaded.moved(self._computing.moved))
            clock.lap("h2d_s")
        tempo.begin()
        loss = self._loss(self._model(batch.inputs), batch.target)
        tempo.forward_ended()
        clock.lap("forward_s")
        tempo.backward_begins()
        loss.backward()
        tempo.backward_ended()
        clock.lap("backward_s")
        self._optimizer.step()
        self._schedule(batch.position)
        self._optimizer.zero_grad()
        clock.lap("update_s")
        sent, before = _total(self._stats().bytes_sent), self._sent
        self._sent = sent
        record.add(clock.end(), float(loss.detach()), len(batch.inputs), sent - before, batch.position)
        return True

    def _schedule(self, position: int) -> None:
        """Bring the learning rate to where the run is, which another worker may have brought further than this one."""
        while self._scheduler is not None and self._scheduled < position:
            self._scheduler.step()
            self._scheduled += 1


def _side(strategy: str) -> Side:
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


def _tell(sender: Sender, record: Record, world: int) -> None:
    rates = record.measures["images_per_s"][-20:]
    sender.send(
        "progress",
        iteration=record.position,
        loss=record.last_loss,
        images_per_s=world * fmean(rates) if rates else None,
    )


def _outcome(model: torch.nn.Module, start: Counters, end: Counters, steps: int) -> dict[str, Any]:
    def per_step(first: Mapping[int, int], last: Mapping[int, int]) -> dict[str, float]:
        return {str(peer): (count - first.get(peer, 0)) / steps for peer, count in last.items()} if steps else {}

    return {
        "chosen": end.chosen,
        "sha256": digest(model),
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "sent": per_step(start.bytes_sent, end.bytes_sent),
        "received": per_step(start.bytes_received, end.bytes_received),
        "staleness": _by_text(end.staleness),
        "version_lag": _by_text(end.version_lag),
    }


def _by_text(counts: Mapping[int, float]) -> dict[str, float]:
    return {str(number): count for number, count in counts.items()}


def digest(model: torch.nn.Module) -> str:
    """The SHA-256 of all parameters and buffers, names, types and bytes, in the order of their names."""
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _total(counts: Mapping[int, int]) -> int:
    return sum(counts.values())


if __name__ == "__main__":
    main(sys.argv[1])
