"""Predicts the time of a training iteration by running ``engine.step`` on a virtual clock.

The simulation uses the code of a run: a ``VirtualWorker`` drives the same state machine, schedule, sync mode and
buckets. ``predict_iteration`` puts it on a link with two parameters, for choices at run time; ``syncline predict`` puts
it on a cluster.

**The worker** is a process that yields what it waits for, a ``Stage`` (a time of its own) or an operation, and
continues when that is over. A batch is loaded (concurrently with training if batches are prefetched) and copied to the
device, then the layers compute one after the other. The state machine's submissions start operations, and its waits
stop the worker. An update takes the optimizer's time. These are the stages of Shi and Chu, arXiv 1711.05979.

**The link with two parameters.** All workers are alike, so one stands for all. An exchange of n bytes takes a + n b: a
latency, during which other exchanges may pass, and the bytes, which the link carries for one operation at a time,
always the most urgent in progress. At most ``in_flight`` operations of each priority are in progress; all-gathers,
which follow their reduce-scatters, are counted separately, as in ``engine.order``. Each half of an exchange takes half
of its time. So a single operation takes the measured time, and many small ones hide their latencies as far as the
schedule allows. Not modelled here: processors that compute and communicate at once, and the optimizer's time, which is
the same under every schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from ..engine.step import Action, Agree, Apply, Average, BucketPhase, Laid, Steps, Submit, Wait
from ..errors import UsageError
from ..nouns import Layer
from ..schedules import Schedule
from ..sync import SyncMode
from .clock import Chain, Chains, Clock, Operations, Resource, Stage, Used
from .plans import LinearCost

Wanted = Stage | BucketPhase
Process = Generator[Wanted, None, None]


class Stretch(NamedTuple):
    """Consecutive layers as one: seconds of both passes, and the tensors whose gradients the backward pass produces."""

    forward_s: float
    backward_s: float
    tensors: tuple[int, ...]


@dataclass(frozen=True)
class Batches:
    """How batches arrive, as in ``workloads.Pipeline``: seconds to load and to copy one, and the prefetch depth."""

    loading_s: float = 0.0
    h2d_s: float = 0.0
    prefetch: int = 0


@dataclass(frozen=True)
class Duties:
    """The computation of a worker in an iteration: ``parts`` in forward order.

    Besides the layers the training thread has stages to ``update`` the weights of a bucket, for ``averaging`` weights,
    for every ``gradient`` and for every ``iteration``. Layers take their time ``on`` a resource; without one they are
    pure delays.
    """

    parts: tuple[Stretch, ...]
    on: str | None = None
    batches: Batches = Batches()
    update: Callable[[int], Sequence[Stage]] = lambda _: ()
    gradient: Sequence[Stage] = ()
    iteration: Sequence[Stage] = ()
    averaging: Sequence[Stage] = ()


@dataclass
class TimeSpent:
    """A worker's seconds so far, by purpose. ``waited_s`` is the exposed communication."""

    loading_s: float = 0.0
    h2d_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    other_s: float = 0.0
    waited_s: float = 0.0
    ends_s: list[float] = field(default_factory=list)


class Handed(NamedTuple):
    """The functions that receive a worker's operations, and the agreement before the first one of a step."""

    submit: Callable[[Submit], None]
    agree: Callable[[int], None]


class VirtualWorker:
    """A worker with these ``duties``; ``stretch`` gives the factor of a step's layer times.

    ``spent`` counts its time by purpose, and has the end of each iteration in ``ends_s``.
    """

    def __init__(
        self,
        clock: Clock,
        duties: Duties,
        steps: Steps,
        handed: Handed,
        stretch: Callable[[int], float] = lambda _: 1.0,
    ) -> None:
        self._clock, self._duties, self._steps, self._handed, self._stretch = clock, duties, steps, handed, stretch
        self.spent = TimeSpent()
        self._loaded_s: list[float] = []  # when each batch was ready
        self._taken_s: list[float] = []  # when each batch was taken

    def iterations(self) -> Process:
        """The process, which never ends."""
        for step in count():
            yield from self._iterate(step)
            self.spent.ends_s.append(self._clock.now_s)

    def _iterate(self, step: int) -> Process:
        duties, steps = self._duties, self._steps
        factor = self._stretch(step)
        yield from self._load(step)
        for part in duties.parts:
            for tensor in part.tensors:
                yield from self._do(steps.needed(tensor))
            yield from self._lasting("forward_s", (Stage(duties.on, part.forward_s * factor),))
        for part in reversed(duties.parts):
            yield from self._lasting("backward_s", (Stage(duties.on, part.backward_s * factor),))
            for tensor in reversed(part.tensors):
                yield from self._lasting("backward_s", duties.gradient)
                yield from self._do(steps.produced(tensor))
        yield from self._do(steps.backward_ended())
        yield from self._do(steps.stepped())
        yield from self._do(steps.updated())
        yield from self._lasting("other_s", duties.iteration)

    def _load(self, step: int) -> Process:
        """Load the next batch, or wait for the prefetching thread, then copy it."""
        batches = self._duties.batches
        now_s = self._clock.now_s
        if batches.prefetch:
            free_s = self._taken_s[step - batches.prefetch] if step >= batches.prefetch else 0.0
            before_s = self._loaded_s[-1] if self._loaded_s else 0.0
            self._loaded_s.append(max(free_s, before_s) + batches.loading_s)
            wait_s = max(0.0, self._loaded_s[-1] - now_s)
        else:
            wait_s = batches.loading_s
        yield from self._lasting("loading_s", (Stage(None, wait_s),))
        self._taken_s.append(self._clock.now_s)
        yield from self._lasting("h2d_s", (Stage(None, batches.h2d_s),))

    def _lasting(self, what: str, stages: Iterable[Stage]) -> Process:
        begun_s = self._clock.now_s
        for stage in stages:
            if stage.seconds > 0:
                yield stage
        setattr(self.spent, what, getattr(self.spent, what) + self._clock.now_s - begun_s)

    def _do(self, actions: Sequence[Action]) -> Process:
        for action in actions:
            if isinstance(action, Submit):
                self._handed.submit(action)
            elif isinstance(action, Agree):
                self._handed.agree(action.step)
            elif isinstance(action, Wait):
                begun_s = self._clock.now_s
                yield from action.operations
                self.spent.waited_s += self._clock.now_s - begun_s
            elif isinstance(action, Apply):
                for bucket in action.buckets:
                    yield from self._lasting("update_s", self._duties.update(bucket))
            elif isinstance(action, Average):
                yield from self._lasting("update_s", self._duties.averaging)


def run(clock: Clock, process: Process, resources: Mapping[str, Used], operations: Operations) -> None:
    """Start a process now; it continues whenever its wait is over."""

    def go_on() -> None:
        for wanted in process:
            if isinstance(wanted, BucketPhase):
                if wanted in operations.done_at:
                    continue
                operations.when_done(wanted, go_on)
            elif wanted.resource is None:
                clock.after(wanted.seconds, go_on)
            else:
                resources[wanted.resource].use(wanted.seconds, go_on, lane=wanted.lane)
            return

    clock.at(clock.now_s, go_on)


_BEFORE, _COUNTED = 3, 4
"""Iterations until a steady state, and those that are averaged then: a sync mode may have a period."""


@dataclass(frozen=True)
class IterationTimes:
    """Seconds of one steady iteration: the whole, and its computation."""

    whole_s: float
    computing_s: float

    @property
    def exposed_s(self) -> float:
        """The exposed communication."""
        return self.whole_s - self.computing_s


class Spent(NamedTuple):
    """Seconds of an operation: its latency, and its bytes on the link."""

    latency_s: float
    bytes_s: float


class VirtualLink:
    """Carries operations with the times that ``spent`` returns, up to ``in_flight`` of each priority at a time."""

    def __init__(self, spent: Callable[[BucketPhase], Spent], in_flight: int) -> None:
        self.clock = Clock()
        link = Resource(self.clock, ranked=True)

        def chains(operation: BucketPhase) -> tuple[Chain, ...]:
            latency_s, bytes_s = spent(operation)
            return ((Stage(None, latency_s), Stage("link", bytes_s)),)

        self.operations = Operations(self.clock, Chains(self.clock, {"link": link}, chains), in_flight)

    @property
    def done_at(self) -> Mapping[BucketPhase, float]:
        """When each operation was done."""
        return self.operations.done_at

    def submit(self, now_s: float, submit: Submit) -> None:
        """Queue an operation at ``now_s``, which must not decrease."""
        self.clock.run(now_s)
        self.operations.submit(submit)

    def carry_until(self, wanted: BucketPhase) -> float:
        """Advance time until an operation is done; return that time. UsageError if nothing in progress leads to it."""
        self.clock.run(over=lambda: wanted in self.done_at)
        if wanted not in self.done_at:
            raise UsageError(f"the worker waits for {wanted}, but no operation in progress completes it")
        return self.done_at[wanted]


def predict_iteration(
    layers: Sequence[Layer], laid: Laid, schedule: Schedule, mode: SyncMode, cost: LinearCost
) -> IterationTimes:
    """One steady iteration of a worker with ``layers`` in forward order, which have their measured times.

    ``laid`` has the buckets, ``cost`` the time of an exchange by its bytes. Takes tens of microseconds per tensor and
    bucket.
    """
    nbytes = [bucket.nbytes for bucket in laid.buckets]

    def spent(operation: BucketPhase) -> Spent:
        share = 1.0 if operation.phase == "allreduce" else 0.5
        return Spent(share * cost.base_s, share * cost.per_byte_s * nbytes[operation.bucket])

    link = VirtualLink(spent, schedule.in_flight)
    parts = [Stretch(layer.forward_s, layer.backward_s, (tensor,)) for tensor, layer in enumerate(layers)]
    steps = Steps(len(layers), laid, schedule, mode)
    worker = VirtualWorker(link.clock, Duties(tuple(parts)), steps, Handed(link.operations.submit, lambda _: None))
    run(link.clock, worker.iterations(), {}, link.operations)
    link.clock.run(over=lambda: len(worker.spent.ends_s) >= _BEFORE + _COUNTED)
    whole_s = (worker.spent.ends_s[-1] - worker.spent.ends_s[_BEFORE - 1]) / _COUNTED
    computing_s = math.fsum(layer.forward_s + layer.backward_s for layer in layers)
    return IterationTimes(whole_s, computing_s)
