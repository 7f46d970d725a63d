"""One worker's iterations on a virtual clock: batches, layers, and what ``engine.step`` answers to them.

What is foreseen is what is run: the worker drives the very state machine that a training drives. It is a process that
yields what it waits for, a ``Stage`` (time of its own) or an operation, and is given the clock back when that is over.

Theory. A batch is loaded, beside the training where batches are prepared ahead, copied to the device, and then layer
after layer computes. What the machine hands over goes under way; where it waits the worker waits. What is applied takes
the time of an optimizer. Shi and Chu, arXiv 1711.05979, have these stages.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from ..engine.step import Action, Agree, Apply, Average, BucketPhase, Steps, Submit, Wait
from .virtual import Clock, Operations, Stage, Used

Wanted = Stage | BucketPhase
Process = Generator[Wanted, None, None]


class Stretch(NamedTuple):
    """Layers that compute as one: the seconds of both passes, and the tensors whose gradients end with the second."""

    forward_s: float
    backward_s: float
    tensors: tuple[int, ...]


@dataclass(frozen=True)
class Batches:
    """How batches come, as ``workloads.Pipeline`` has it: seconds to load and to copy one, and how many ahead."""

    loading_s: float = 0.0
    h2d_s: float = 0.0
    prefetch: int = 0


@dataclass(frozen=True)
class Duties:
    """What a worker computes in an iteration: ``parts`` in forward order.

    Beside layers the training thread has to ``update`` the weights of a bucket, to take over averaged ones, and to do
    what every ``gradient`` and every ``iteration`` takes. Layers just last, as on an accelerator.
    """

    parts: tuple[Stretch, ...]
    batches: Batches = Batches()
    update: Callable[[int], Sequence[Stage]] = lambda _: ()
    gradient: Sequence[Stage] = ()
    iteration: Sequence[Stage] = ()
    averaging: Sequence[Stage] = ()

    @property
    def computing_s(self) -> float:
        """Seconds of both passes."""
        return sum(part.forward_s + part.backward_s for part in self.parts)


@dataclass
class Spent:
    """Seconds of a worker so far, by what they went on; ``waited_s`` is what was exposed of communication."""

    loading_s: float = 0.0
    h2d_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    other_s: float = 0.0
    waited_s: float = 0.0
    ends_s: list[float] = field(default_factory=list)


class Handed(NamedTuple):
    """Where a worker's operations go, and what is to be agreed on before any of a step."""

    submit: Callable[[Submit], None]
    agree: Callable[[int], None]


class VirtualWorker:
    """Makes steps with these ``duties``; ``stretch`` gives what the times of a step's layers are multiplied by.

    ``spent`` is where its time went, ``ends_s`` when its iterations ended.
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
        self.spent = Spent()
        self._loaded_s: list[float] = []  # when batches were ready
        self._taken_s: list[float] = []  # when they were asked for, and there

    def iterations(self) -> Process:
        """The process, which does not end."""
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
            yield from self._lasting("forward_s", self._compute(part.forward_s * factor))
        for part in reversed(duties.parts):
            yield from self._lasting("backward_s", self._compute(part.backward_s * factor))
            for tensor in reversed(part.tensors):
                yield from self._lasting("backward_s", duties.gradient)
                yield from self._do(steps.produced(tensor))
        yield from self._do(steps.backward_ended())
        yield from self._do(steps.stepped())
        yield from self._do(steps.updated())
        yield from self._lasting("other_s", duties.iteration)

    def _load(self, step: int) -> Process:
        """The next batch, which a thread beside this one may have prepared, and its copy."""
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

    def _compute(self, seconds: float) -> tuple[Stage, ...]:
        return (Stage(None, seconds),)

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
    """Begin a process now; it goes on whenever what it waits for is there."""

    def go_on() -> None:
        for wanted in process:
            if isinstance(wanted, BucketPhase):
                if wanted in operations.done_at:
                    continue
                operations.when_done(wanted, go_on)
            elif wanted.resource is None:
                clock.at(clock.now_s + wanted.seconds, go_on)
            else:
                resources[wanted.resource].use(wanted.seconds, go_on, lane=wanted.lane)
            return

    clock.at(clock.now_s, go_on)
