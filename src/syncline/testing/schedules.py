"""Laws of schedules: every element travels once, in one order on all ranks, and training keeps the promises.

Training is a simulated ``Worker`` without a framework: it drives ``engine.step`` as a framework's adapter does, with
any schedule and sync mode, and checks every answer against their promises. The virtual clock follows from the times of
the layers and from a link that carries one element per second, urgent ones first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np

from ..costs.iteration import Spent, VirtualLink
from ..engine import step as machine
from ..engine.step import Agree, Steps, Submit, Wait
from ..nouns import Bucket, Layer, Slice, Spec
from ..schedules import Application, Cost, GoesAhead, Phases, Release, Schedule
from ..strategy.grammar import read_part
from ..strategy.words import build
from ..sync import Averages, Elements, SyncMode
from .laws import Laws, require

STEPS = 4
"""The number of steps that a worker trains."""


@dataclass(frozen=True)
class Sliced:
    """Slices of tensors, with priority for the first layers and any combination of a schedule's other options."""

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
        require(submit.priority == priority, f"{what} has the priority {submit.priority} instead of {priority}")
        whole = self.schedule.phases == "whole"
        require((phase == "allreduce") == whole, f"{what} is submitted with phases={self.schedule.phases!r}")
        after = machine.BucketPhase(step, number, "reduce_scatter") if phase == "all_gather" else None
        require(submit.after == after, f"{what} is submitted after {submit.after} instead of after {after}")
        require(after is None or after in self.submitted, f"{what} is submitted before {after}")

    def _apply(self, action: machine.Apply) -> None:
        require(action.step in self._stepped, f"step {action.step} is applied before the optimizer was called for it")
        for number in action.buckets:
            done = self.versions[number]
            require(done == action.step, f"bucket {number} gets step {action.step} after {done} steps")
            self.versions[number] += 1
            if self.mode.due(action.step):
                at = self.link.done_at.get(machine.BucketPhase(action.step, number, self._last), np.inf)
                require(at <= self.now, f"bucket {number} gets step {action.step} before it has arrived")

    def _averages(self, step: int) -> bool:
        return isinstance(self.mode, Averages) and self.mode.averages(step)

    def _average(self, step: int) -> None:
        """Check an average: the step's own update must have been applied, and all data must have arrived."""
        require(
            self._averages(step),
            f"weights are averaged after step {step}, although the sync mode does not average then",
        )
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
                fault = f"in step {self.step} tensor {tensor} is read after {found} updates instead of {promised}"
                require(found == promised, fault)

    def _check_end(self) -> None:
        """Check that every step was applied to every bucket and every due exchange was made once."""
        require(self.versions == [STEPS] * len(self.buckets), f"the buckets got {self.versions} of {STEPS} steps")
        averaged = [step for step in range(STEPS) if self._averages(step)]
        require(
            self._averaged == averaged, f"weights are averaged after the steps {self._averaged} instead of {averaged}"
        )
        due = {step for step in range(STEPS) if self.mode.due(step)}.union(averaged)
        wanted = due if self.mode.merges else set[int]()
        require(self._agreed == wanted, f"the steps {sorted(self._agreed)} are agreed on instead of {sorted(wanted)}")
        phases = 1 if self.schedule.phases == "whole" else 2
        count = phases * len(due) * len(self.buckets)
        require(len(self.submitted) == count, f"{len(self.submitted)} operations were submitted instead of {count}")
        require(not self.steps.flush(), "some updates were not applied")


_DTYPES = ("float32", "float64", "float16", "bfloat16")


def check_schedule(schedule: str | Schedule, *, seed: int = 0, examples: int = 40) -> tuple[str, ...]:
    """Check a schedule, or the registered one of a text such as ``"fixed(bucket=4MiB)"``, against all laws.

    Returns the names of the laws. Raises BrokenLaw, an AssertionError with the law, the schedule and the failing
    example. ``examples`` are drawn for every law, from ``seed``.
    """
    built: Schedule = build("schedules", read_part(schedule)) if isinstance(schedule, str) else schedule
    return LAWS.hold(built, f"schedule {schedule}", seed, examples)


@dataclass(frozen=True)
class Case:
    """A schedule and the layers of a model, with measured costs or None, and the seed of further draws."""

    schedule: Schedule
    layers: tuple[Layer, ...]
    cost: Cost | None
    seed: int

    def buckets(self) -> list[Bucket]:
        """The schedule's buckets."""
        return self.schedule.buckets(self.layers, self.cost)

    def draw(self) -> np.random.Generator:
        """A random generator for further choices of a law."""
        return np.random.default_rng([self.seed, 1])

    def __str__(self) -> str:
        tensors = ", ".join(f"{layer.spec.elements} {layer.spec.dtype}" for layer in self.layers)
        return f"tensors of {tensors} (seed {self.seed})" if tensors else "no tensors"


LAWS: Laws[Schedule, Case] = Laws()


def models(
    most_layers: int, most_elements: float, least_elements: int = 0, least_layers: int = 0
) -> Callable[[Schedule, int, int], Iterator[Case]]:
    """Models of limited numbers of layers and elements, on many scales."""

    def cases(schedule: Schedule, seed: int, count: int) -> Iterator[Case]:
        draw = np.random.default_rng(seed)
        made = [model(schedule, draw) for _ in range(count)]
        yield from sorted(made, key=lambda case: len(case.layers))

    def model(schedule: Schedule, draw: np.random.Generator) -> Case:
        many = int(draw.integers(least_layers, most_layers + 1))
        largest = max(least_elements + 1, int(most_elements ** draw.uniform(0.3, 1)))
        sizes = draw.integers(least_elements, largest + 1, many)
        dtypes = draw.choice(_DTYPES[: draw.integers(1, len(_DTYPES) + 1)], many)
        times = draw.integers(0, 6, (many, 2)).astype(float)
        layers = tuple(
            Layer(Spec(f"w{index}", (int(size),), str(dtype)), *map(float, seconds))
            for index, (size, dtype, seconds) in enumerate(zip(sizes, dtypes, times, strict=True))
        )
        cost = (lambda nbytes: 1e-4 + 1e-9 * nbytes) if draw.random() < 0.5 else None
        return Case(schedule, layers, cost, int(draw.integers(0, 2**32)))

    return cases


@LAWS.law(models(3, 10, least_layers=1))
def engines_support_its_declarations(case: Case) -> None:
    """``release``, ``phases``, ``apply`` and ``local`` are known, buckets may start, and priorities are numbers."""
    for name, known in (("release", Release), ("phases", Phases), ("apply", Application)):
        value = getattr(case.schedule, name)
        require(value in get_args(known), f"{name} is {value!r}, but must be one of {', '.join(get_args(known))}")
    require(case.schedule.in_flight >= 1, f"in_flight is {case.schedule.in_flight}: no bucket could ever be sent")
    require(case.schedule.measures >= 0, f"measures is {case.schedule.measures}, but must be a number of steps")
    if isinstance(case.schedule, GoesAhead):
        local, apply = case.schedule.local, case.schedule.apply
        require(local in (True, False), f"local is {local!r}, but must be True or False")
        require(not local or apply == "next_step", f"local is True with apply={apply!r}, instead of 'next_step'")
    for number, bucket in enumerate(case.buckets()):
        priority = case.schedule.priority(bucket)
        require(math.isfinite(priority), f"the priority of bucket {number} is {priority}")


@LAWS.law(models(30, 1e8))
def every_element_is_in_one_bucket_of_its_type(case: Case) -> None:
    """The slices of a tensor, even an empty one, are its elements once, and have the bucket's element type."""
    covered: list[list[tuple[int, int]]] = [[] for _ in case.layers]
    for bucket in case.buckets():
        require(bool(bucket.slices), "a bucket is empty")
        for part in bucket.slices:
            require(0 <= part.tensor < len(case.layers), f"{part} belongs to no tensor: there are {len(case.layers)}")
            dtype = case.layers[part.tensor].spec.dtype
            require(bucket.dtype == dtype, f"tensor {part.tensor} is {dtype}, but lies in a bucket of {bucket.dtype}")
            covered[part.tensor].append((part.start, part.stop))
    for tensor, ranges in enumerate(covered):
        require(bool(ranges), f"tensor {tensor} is in no bucket")
        at = 0
        for begin, stop in sorted(ranges):
            require(begin <= stop, f"a slice of tensor {tensor} ends at {stop}, before its start at {begin}")
            fault = "are in no bucket" if begin > at else "are in two buckets"
            require(begin == at, f"elements {min(at, begin)} to {max(at, begin)} of tensor {tensor} {fault}")
            at = stop
        elements = case.layers[tensor].spec.elements
        require(at == elements, f"the slices of tensor {tensor} end at {at}, but it has {elements} elements")


@LAWS.law(models(30, 1e8))
def buckets_are_listed_as_backward_completes_them(case: Case) -> None:
    """Backward goes from the last layer to the first, so a bucket is complete with its tensor nearest to the input."""
    complete = [min(part.tensor for part in bucket.slices) for bucket in case.buckets()]
    wanted = sorted(complete, reverse=True)
    require(
        complete == wanted,
        f"backward completes the buckets in the order {wanted} of their last tensors, but"
        f" they are listed as {complete}",
    )


@LAWS.law(models(30, 1e8))
def all_ranks_make_the_same_buckets(case: Case) -> None:
    """The same layers give the same buckets and priorities, whatever the earlier calls: each rank decides by itself."""
    first = case.buckets()
    priorities = [case.schedule.priority(bucket) for bucket in first]
    case.schedule.buckets(case.layers[::2], None)
    again = case.buckets()
    require(first == again, "a second call makes other buckets of the same layers")
    found = [case.schedule.priority(bucket) for bucket in again]
    require(found == priorities, "a second call gives the same buckets other priorities")


@LAWS.law(models(6, 8, least_elements=1, least_layers=1))
def training_keeps_its_promises(case: Case) -> None:
    """In any order of backward, each bucket is sent once, when allowed, and applied when promised."""
    for mode in (mode for mode in MODES if go_together(case.schedule, mode)):
        Worker(case.layers, case.schedule, mode, case.cost).train(backward_of(case, case.draw()))


@LAWS.law(models(6, 8, least_elements=1, least_layers=1))
def workers_submit_in_the_same_order_whatever_backward_does(case: Case) -> None:
    """Buckets are submitted in the order of the list, or else workers would deadlock."""
    draw, orders = case.draw(), []
    for _ in range(2):
        worker = Worker(case.layers, case.schedule, MODES[0], case.cost)
        worker.train(backward_of(case, draw))
        orders.append(list(worker.submitted))
    require(orders[0] == orders[1], "two workers with different backward orders submit buckets in different orders")


def backward_of(case: Case, draw: np.random.Generator) -> Sequence[int]:
    """A possible order in which a backward pass produces the tensors."""
    return [int(index) for index in draw.permutation(len(case.layers))]
