"""The script that every process of a comparison runs: ``python -m syncline.bench.train JOB``.

Owns the training loop and where its clock ticks; the loop is the one a user would write, with ``prepare`` and nothing
else between it and plain PyTorch. Strategy ``single`` does not touch Syncline's communication at all: it is the peer
that all others are compared with. Further peers, such as ``ddp``, take Syncline's place behind the same calls. JOB is
the JSON of ``Job``; results go to the pipe that it names for this process. One thread per process, so that rows with
more processes do not get more of it each.

Stages of an iteration: *loading* waits for the next batch of the workload, which takes the time that its pipeline says
or, prefetched, is there; *h2d* is the copy to the device, which is 0 on a CPU, where the batch already is, unless the
pipeline says otherwise; *forward* includes the loss; *backward* is ``loss.backward()``; *update* is the
optimizer's step, the learning-rate schedule's, and ``zero_grad``, which closes the iteration. Each excludes the time
blocked in Syncline; a peer does not say how long it was blocked. Evaluation, barriers, and the reports are outside of
iterations. The start is joining the group and preparing the model; loading data and building the model are not.
"""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from ..launch.environment import recognise
from ..report.rows import BASELINE
from ..strategy.parts import build
from ..workloads import Feed, Workload, load
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
            train(job, _side(job.strategy), sender, time.perf_counter() - begun, recognise().rank)
        except Exception as error:
            sender.send("error", at=time.monotonic(), text=f"{type(error).__name__}: {error}")
            raise


def train(job: Job, side: Side, sender: Sender, joined_s: float = 0.0, process: int = 0) -> None:
    """Train to the end of the job and send one result.

    Joining the group took ``joined_s``; ``process`` is which of the run's processes this is.
    """
    workload = load(job.workload)
    bare = workload.computing.placed(workload.model(job.seed), process)
    bare_optimizer = workload.optimizer(bare)
    begun = time.perf_counter()
    model, optimizer = side.prepare(bare, bare_optimizer, weight=workload.weight)
    start_s = joined_s + time.perf_counter() - begun
    rank, world = side.rank(), side.world_size()
    # Replicas start equal; what is random during training (dropout) differs between them, as it would in one big batch.
    torch.manual_seed(job.seed * 65_537 + rank)
    loop = _Loop(model, optimizer, workload, job.iterations, side)
    told = time.monotonic()
    start = side.stats()
    record = Record(job.iterations, counted=start.blocked_s is not None)
    model.train()
    with closing(Feed(_batches(workload, rank, world, job), workload.pipeline)) as feed:
        while record.done < job.iterations:
            epoch_ended = loop.iterate(feed, record)
            last = record.done == job.iterations
            if rank == 0 and (last or time.monotonic() - told > _REPORT_EVERY_S):
                told = time.monotonic()
                _tell(sender, record, world)
            if last or epoch_ended:
                _evaluate(workload, model, bare, side, record)
    model.eval()
    sender.send("result", **record.report(), start_s=start_s, **_outcome(bare, start, side.stats(), record.done))
    side.shutdown()


class _Batch(NamedTuple):
    """What one worker computes a gradient of; ``ends_epoch`` says that it is the last one of its epoch."""

    inputs: torch.Tensor
    target: torch.Tensor
    ends_epoch: bool

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> _Batch:
        """The batch with its tensors elsewhere."""
        return self._replace(inputs=move(self.inputs), target=move(self.target))


def _batches(workload: Workload, rank: int, world: int, job: Job) -> Iterator[_Batch]:
    """This worker's batches of the whole job, one epoch after the other."""
    steps = workload.steps_per_epoch(job.batch, world)
    for epoch in range(-(-job.iterations // steps)):
        batches = workload.batches(rank, world, job.batch, job.seed, epoch)
        for taken, (inputs, target) in enumerate(batches, start=1):
            yield _Batch(workload.computing.laid_out(inputs), target, taken == steps)


class _Loop:
    """The body of the training loop, with the clock around its stages."""

    def __init__(self, model: Any, optimizer: Any, workload: Workload, iterations: int, side: Side) -> None:
        self._model, self._optimizer = model, optimizer
        self._loss: Callable[..., Any] = workload.loss
        self._scheduler = workload.schedule(optimizer, iterations)
        self._copies, self._computing = workload.copied, workload.computing
        self._stats = side.stats
        self._clock = IterationClock(workload.computing.now, lambda: side.stats().blocked_s or 0.0)

    def iterate(self, feed: Feed[_Batch], record: Record) -> bool:
        """One iteration, entered into the record; returns whether its batch was the last one of an epoch."""
        clock = self._clock
        before = _total(self._stats().bytes_sent)
        clock.begin()
        batch = next(feed)
        clock.lap("loading_s")
        if self._copies:
            batch = feed.copied(batch, lambda loaded: loaded.moved(self._computing.moved))
            clock.lap("h2d_s")
        inputs, target, ends_epoch = batch
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
        return ends_epoch


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
