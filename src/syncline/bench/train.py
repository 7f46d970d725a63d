"""The script that every process of a comparison runs: ``python -m syncline.bench.train JOB``.

Owns the training loop and where its clock ticks; the loop is the one a user would write, with ``prepare`` and nothing
else between it and plain PyTorch. Strategy ``single`` does not touch Syncline's communication at all: it is the peer
that all others are compared with. Further peers, such as ``ddp``, take Syncline's place behind the same calls. JOB is
the JSON of ``Job``; results go to the pipe that it names for this process. One thread per process, so that rows with
more processes do not get more of it each.

Stages of an iteration: *loading* takes the next batch from the workload; *h2d* is the copy to the device, which is 0 on
a CPU, where the batch already is; *forward* includes the loss; *backward* is ``loss.backward()``; *update* is the
optimizer's step, the learning-rate schedule's, and ``zero_grad``, which closes the iteration. Each excludes the time
blocked in Syncline; a peer does not say how long it was blocked. Evaluation, barriers, and the reports are outside of
iterations. The start is joining the group and preparing the model; loading data and building the model are not.
"""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..launch.environment import recognise
from ..report.rows import BASELINE
from ..strategy.parts import build
from ..workloads import Workload, load
from .contenders import peer_of
from .measure import IterationClock, Record
from .messages import Job, Sender

_REPORT_EVERY_S = 0.1


class Counters(Protocol):
    """What the measurement reads: seconds blocked so far, None where nobody counts, and bytes so far per process."""

    @property
    def blocked_s(self) -> float | None: ...  # noqa: D102
    @property
    def bytes_sent(self) -> Mapping[int, int]: ...  # noqa: D102
    @property
    def bytes_received(self) -> Mapping[int, int]: ...  # noqa: D102
    @property
    def chosen(self) -> str: ...  # noqa: D102


class Side(Protocol):
    """What a contender in a comparison has to offer: the names are those of Syncline's public interface."""

    def rank(self) -> int: ...  # noqa: D102
    def world_size(self) -> int: ...  # noqa: D102
    def prepare(self, model: Any, optimizer: Any, *, weight: Any) -> tuple[Any, Any]: ...  # noqa: D102
    def stats(self) -> Counters: ...  # noqa: D102
    def barrier(self) -> None: ...  # noqa: D102
    def shutdown(self) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class _NoTraffic:
    blocked_s: float = 0.0
    bytes_sent: Mapping[int, int] = field(default_factory=dict)
    bytes_received: Mapping[int, int] = field(default_factory=dict)
    chosen: str = BASELINE


class _Alone:
    """One worker in plain PyTorch."""

    def rank(self) -> int:
        return 0

    def world_size(self) -> int:
        return 1

    def prepare(self, model: Any, optimizer: Any, *, weight: Any) -> tuple[Any, Any]:  # noqa: ARG002
        return model, optimizer

    def stats(self) -> Counters:
        return _NoTraffic()

    def barrier(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def main(text: str) -> None:
    """Run the job; a failure is told to the process that started this one, and raised."""
    job = Job.from_json(text)
    with closing(Sender(job.report_fds[recognise().rank])) as sender:
        try:
            torch.set_num_threads(1)
            begun = time.perf_counter()
            train(job, _side(job.strategy), sender, time.perf_counter() - begun)
        except Exception as error:
            sender.send("error", at=time.monotonic(), text=f"{type(error).__name__}: {error}")
            raise


def train(job: Job, side: Side, sender: Sender, joined_s: float = 0.0) -> None:
    """Train to the end of the job and send one result; joining the group took ``joined_s``."""
    workload = load(job.workload)
    bare = workload.model(job.seed)
    bare_optimizer = workload.optimizer(bare)
    begun = time.perf_counter()
    model, optimizer = side.prepare(bare, bare_optimizer, weight=workload.weight)
    start_s = joined_s + time.perf_counter() - begun
    rank, world = side.rank(), side.world_size()
    # Replicas start equal; what is random during training (dropout) differs between them, as it would in one big batch.
    torch.manual_seed(job.seed * 65_537 + rank)
    loop = _Loop(model, optimizer, workload.schedule(optimizer, job.iterations), workload.loss, side)
    batches = _Batches(workload, rank, world, job)
    told = time.monotonic()
    start = side.stats()
    record = Record(job.iterations, counted=start.blocked_s is not None)
    model.train()
    while record.done < job.iterations:
        loop.iterate(batches, record)
        last = record.done == job.iterations
        if rank == 0 and (last or time.monotonic() - told > _REPORT_EVERY_S):
            told = time.monotonic()
            _tell(sender, record, world)
        if last or batches.epoch_ended:
            _evaluate(workload, model, bare, side, record)
    model.eval()
    sender.send("result", **record.report(), start_s=start_s, **_outcome(bare, start, side.stats(), record.done))
    side.shutdown()


class _Loop:
    """The body of the training loop, with the clock around its stages."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, loss: Any, side: Side) -> None:
        self._model, self._optimizer, self._scheduler, self._loss = model, optimizer, scheduler, loss
        self._stats = side.stats
        self._clock = IterationClock(time.perf_counter, lambda: side.stats().blocked_s or 0.0)

    def iterate(self, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], record: Record) -> None:
        """One iteration, entered into the record."""
        clock = self._clock
        before = _total(self._stats().bytes_sent)
        clock.begin()
        inputs, target = next(batches)
        clock.lap("loading_s")
        loss = self._loss(self._model(inputs), target)
        clock.lap("forward_s")
        loss.backward()
        clock.lap("backward_s")
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad()
        clock.lap("update_s")
        sent = _total(self._stats().bytes_sent) - before
        record.add(clock.end(), float(loss.detach()), len(inputs), sent)


class _Batches(Iterator[tuple[torch.Tensor, torch.Tensor]]):
    """This worker's batches without end, one epoch after the other."""

    def __init__(self, workload: Workload, rank: int, world: int, job: Job) -> None:
        self._workload, self._rank, self._world, self._job = workload, rank, world, job
        self._steps = workload.steps_per_epoch(job.batch, world)
        self._epoch, self._taken = 0, 0
        self._current = self._start()

    @property
    def epoch_ended(self) -> bool:
        """True when the batch that was taken last is the last one of its epoch."""
        return self._taken == self._steps

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.epoch_ended:
            self._epoch, self._taken = self._epoch + 1, 0
            self._current = self._start()
        self._taken += 1
        return next(self._current)

    def _start(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        job = self._job
        return self._workload.batches(self._rank, self._world, job.batch, job.seed, self._epoch)


def _side(strategy: str) -> Side:
    if strategy == BASELINE:
        return _Alone()
    peer = peer_of(strategy)
    if peer is not None:
        joined: Side = build("peers", peer).join()
        return joined
    import syncline

    syncline.init(strategy=strategy)
    side: Side = syncline
    return side


def _evaluate(workload: Workload, model: Any, bare: torch.nn.Module, side: Side, record: Record) -> None:
    """Test the model on rank 0, all replicas being equal; the others wait, outside of any iteration."""
    # On every rank, since it may have to complete an exchange that is still under way.
    model.eval()
    scores = workload.evaluate(bare) if side.rank() == 0 else None
    if scores is not None:
        record.evaluated(*scores)
    side.barrier()
    model.train()


def _tell(sender: Sender, record: Record, world: int) -> None:
    rates = record.measures["images_per_s"][-20:]
    sender.send(
        "progress",
        iteration=record.done,
        loss=record.last_loss,
        images_per_s=world * sum(rates) / len(rates),
    )


def _outcome(model: torch.nn.Module, start: Counters, end: Counters, steps: int) -> dict[str, Any]:
    def per_step(first: Mapping[int, int], last: Mapping[int, int]) -> dict[str, float]:
        return {str(peer): (count - first.get(peer, 0)) / steps for peer, count in last.items()}

    return {
        "chosen": end.chosen,
        "sha256": digest(model),
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "sent": per_step(start.bytes_sent, end.bytes_sent),
        "received": per_step(start.bytes_received, end.bytes_received),
    }


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
