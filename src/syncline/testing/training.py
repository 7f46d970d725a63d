"""A simulated worker without a framework: ``engine.step`` with a virtual link and clock.

It drives the state machine of a worker's steps as a framework's adapter does, with any schedule and sync mode, and
checks every answer against their promises. The clock follows from the times of the layers and from a link that carries
one element per second, urgent ones first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from ..costs.iteration import Spent, VirtualLink
from ..engine import step as machine
from ..engine.step import Agree, Steps, Submit, Wait
from ..nouns import Bucket, Layer, Slice
from ..schedules import Cost, Schedule
from ..sync import Averages, Elements, SyncMode
from .laws import require

STEPS = 4
"""The number of steps that a worker trains."""


@dataclass(frozen=True)
class Sliced:
    """Slices of tensors, the first layers' with priority, with any combination of a schedule's other options."""

    phases: Literal["whole", "split"] = "whole"
    apply: Literal["step", "layer", "next_step"] = "step"
    release: Literal["ready", "backward_end"] = "ready"
    in_flight: int = 1
    measures: int = 0

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:  # noqa: ARG002
        """Buckets of three elements, or of an eighth of a large tensor, from the last layer to the first."""
        made = []
        for index in reversed(range(len(layers))):
            spec = layers[index].spec
            step = max(3, -(-spec.elements // 8))
            for start in range(0, max(1, spec.elements), step):
                made.append(Bucket((Slice(index, start, min(start + step, spec.elements)),), spec.dtype))
        return made

    def priority(self, bucket: Bucket) -> float:
        """The first layers before the others."""
        return float(bucket.slices[0].tensor)


SLICED: tuple[Schedule, ...] = tuple(
    Sliced(phases, apply, release)
    for phases in ("whole", "split")
    for apply in ("step", "layer", "next_step")
    for release in ("ready", "backward_end")
)
"""One schedule for every combination of options."""


@dataclass(frozen=True)
class Every:
    """Gradients are exchanged in the last step of every ``period``; workers stay together."""

    period: int = 1
    merges: ClassVar[bool] = True

    def due(self, step: int) -> bool:
        return step % self.period == self.period - 1

    def may_proceed(self, clock: int, slowest: int) -> bool:
        return clock <= slowest


@dataclass(frozen=True)
class Averaged(Every):
    """Weights are exchanged after the last step of every ``period``; gradients never are."""

    remembers: ClassVar[bool] = False

    def due(self, step: int) -> bool:  # noqa: ARG002
        return False

    def averages(self, step: int) -> bool:
        return Every.due(self, step)

    def pull(self, workers: int) -> float:  # noqa: ARG002
        return 1.0

    def agree(self, agreed: Elements, mean: Elements, memory: Elements | None) -> None:  # noqa: ARG002
        agreed += mean


@dataclass(frozen=True)
class Bound:
    """Every push is an update of its own; no worker is more than ``by`` steps ahead of the slowest."""

    by: int = 0
    merges: ClassVar[bool] = False

    def due(self, step: int) -> bool:  # noqa: ARG002
        return True

    def may_proceed(self, clock: int, slowest: int) -> bool:
        return clock <= slowest + self.by


@dataclass(frozen=True)
class Free(Bound):
    """Every push is an update of its own; no worker waits."""

    def may_proceed(self, clock: int, slowest: int) -> bool:  # noqa: ARG002
        return True


MODES: tuple[SyncMode, ...] = (Every(), Every(2), Averaged(2), Bound(1))


def go_together(schedule: Schedule, mode: SyncMode) -> bool:
    """Whether both fit one strategy: weights are exchanged between two steps, so no step may extend into the next."""
    return schedule.apply == "step" or not isinstance(mode, Averages)


class Laid(NamedTuple):
    """The layout of a model's buckets for ``Steps``."""

    buckets: list[Bucket]
    priorities: list[float]


class Worker:
    """Drives ``Steps`` through training on a virtual clock and checks every answer.

    ``now`` is the clock in seconds, ``submitted`` the operations in the order in which they started, and ``versions``
    the number of steps applied to each bucket.
    """

    def __init__(self, layers: Sequence[Layer], schedule: Schedule, mode: SyncMode, cost: Cost | None = None) -> None:
        self.layers, self.schedule, self.mode = layers, schedule, mode
        self.buckets = schedule.buckets(layers, cost)
        laid = Laid(self.buckets, [schedule.priority(bucket) for bucket in self.buckets])
        self.steps = Steps(len(layers), laid, schedule, mode)
        self.link = VirtualLink(self._spent, schedule.in_flight)
        self.now = 0.0
        self.step = 0
        self.submitted: dict[machine.BucketPhase, float] = {}
        self.versions = [0] * len(self.buckets)
        self._agreed: set[int] = set()
        self._produced: set[tuple[int, int]] = set()
        self._ended: set[int] = set()
        self._stepped: set[int] = set()
        self._averaged: list[int] = []

    def train(self, backward: Sequence[int]) -> None:
        """Train some steps whose backward passes produce the tensors in that order, and apply everything at the end."""
        for self.step in range(STEPS):
            for index, layer in enumerate(self.layers):
                self._do(self.steps.needed(index))
                self._check_weights(index)
                self.now += layer.forward_s
            for index in backward:
                self.now += self.layers[index].backward_s
                self._produced.add((self.step, index))
                self._do(self.steps.produced(index))
            self._ended.add(self.step)
            self._do(self.steps.backward_ended())
            self._stepped.add(self.step)
            self._do(self.steps.stepped())
            self._do(self.steps.updated())
        self._do(self.steps.flush())
        self._check_end()

    def _spent(self, operation: machine.BucketPhase) -> Spent:
        return Spent(0.0, self.buckets[operation.bucket].elements)

    def _do(self, actions: Sequence[machine.Action]) -> None:
        for action in actions:
            if isinstance(action, Agree):
                require(action.step not in self._agreed, f"step {action.step} is agreed on twice")
                self._agreed.add(action.step)
            elif isinstance(action, Submit):
                self._check_submitted(action)
                self.submitted[action.operation] = self.now
                self.link.submit(self.now, action)
            elif isinstance(action, Wait):
                for operation in action.operations:
                    self.now = max(self.now, self.link.carry_until(operation))
            elif isinstance(action, machine.Apply):
                self._apply(action)
            else:
                self._average(action.step)

    def _check_submitted(self, submit: Submit) -> None:
        (step, number, phase), what = submit.operation, submit.operation
        require(what not in self.submitted, f"{what} is submitted twice")
        agreed = step in self._agreed or not self.mode.merges
        require(agreed, f"{what} is submitted before its step is agreed on")
        due = self.mode.due(step) or self._averages(step)
        require(due, f"{what} is submitted in a step that is not due")
        made = all((step, part.tensor) in self._produced for part in self.buckets[number].slices)
        require(made, f"{what} is submitted before its gradients are complete")
        early = self.schedule.release == "backward_end" and step not in self._ended
        require(not early, f"{what} is submitted before backward has ended, with release='backward_end'")
        priority = self.schedule.priority(self.buckets[number])
        require(submit.priority == priority, f"{what} has the priority {submit.priority} in place of {priority}")
        whole = self.schedule.phases == "whole"
        require((phase == "allreduce") == whole, f"{what} is submitted with phases={self.schedule.phases!r}")
        after = machine.BucketPhase(step, number, "reduce_scatter") if phase == "all_gather" else None
        require(submit.after == after, f"{what} is submitted behind {submit.after} in place of {after}")
        require(after is None or after in self.submitted, f"{what} is submitted before {after}")

    def _apply(self, action: machine.Apply) -> None:
        require(action.step in self._stepped, f"step {action.step} is applied before the optimizer was called for it")
        for number in action.buckets:
            done = self.versions[number]
            require(done == action.step, f"bucket {number} gets step {action.step} when it has had {done} steps")
            self.versions[number] += 1
            if self.mode.due(action.step):
                at = self.link.done_at.get(machine.BucketPhase(action.step, number, self._last), np.inf)
                require(at <= self.now, f"bucket {number} gets step {action.step} before it has arrived")

    def _averages(self, step: int) -> bool:
        return isinstance(self.mode, Averages) and self.mode.averages(step)

    def _average(self, step: int) -> None:
        """Check an average: the step's own update must have been applied, and all data must have arrived."""
        require(self._averages(step), f"weights are averaged after step {step}, of which the sync mode says nothing")
        require(step in self._stepped, f"weights are averaged after step {step} before the optimizer was called for it")
        for number in range(len(self.buckets)):
            at = self.link.done_at.get(machine.BucketPhase(step, number, self._last), np.inf)
            require(at <= self.now, f"bucket {number} is averaged after step {step} before it has arrived")
        self._averaged.append(step)

    @property
    def _last(self) -> machine.Phase:
        return "allreduce" if self.schedule.phases == "whole" else "all_gather"

    def _check_weights(self, tensor: int) -> None:
        """Check that the weights read by a forward pass contain as many steps as the schedule promises."""
        for number, bucket in enumerate(self.buckets):
            if any(part.tensor == tensor for part in bucket.slices):
                behind = self.step > 0 and self.schedule.apply == "next_step" and self.mode.due(self.step - 1)
                found, promised = self.versions[number], self.step - behind
                fault = f"in step {self.step} tensor {tensor} is read with {found} steps in it, promised are {promised}"
                require(found == promised, fault)

    def _check_end(self) -> None:
        """Check that every step was applied to every bucket and every due exchange was made once."""
        require(self.versions == [STEPS] * len(self.buckets), f"of {STEPS} steps buckets have had {self.versions}")
        averaged = [step for step in range(STEPS) if self._averages(step)]
        require(self._averaged == averaged, f"weights are averaged after {self._averaged} in place of {averaged}")
        due = {step for step in range(STEPS) if self.mode.due(step)}.union(averaged)
        wanted = due if self.mode.merges else set[int]()
        require(self._agreed == wanted, f"the steps {sorted(self._agreed)} are agreed on in place of {sorted(wanted)}")
        phases = 1 if self.schedule.phases == "whole" else 2
        count = phases * len(due) * len(self.buckets)
        require(len(self.submitted) == count, f"{len(self.submitted)} operations were submitted in place of {count}")
        require(not self.steps.flush(), "something is left to be applied")
