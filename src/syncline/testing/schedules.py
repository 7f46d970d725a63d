"""Laws of schedules: every element travels once, in one order on all ranks, and training keeps the schedule's
promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from ..nouns import Bucket, Layer, Spec
from ..schedules import Application, Cost, GoesAhead, Phases, Release, Schedule
from ..strategy.grammar import read_part
from ..strategy.parts import build
from .laws import Laws, require
from .training import MODES, Worker, go_together

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
def what_it_asks_for_is_done_by_engines(case: Case) -> None:
    """``release``, ``phases``, ``apply`` and ``local`` have known values, buckets may start, and priorities are
    numbers."""
    for name, known in (("release", Release), ("phases", Phases), ("apply", Application)):
        value = getattr(case.schedule, name)
        require(value in get_args(known), f"{name} is {value!r}, and can be one of {', '.join(get_args(known))}")
    require(case.schedule.in_flight >= 1, f"in_flight is {case.schedule.in_flight}: nothing would ever go")
    require(case.schedule.measures >= 0, f"measures is {case.schedule.measures}: it counts steps")
    if isinstance(case.schedule, GoesAhead):
        local, apply = case.schedule.local, case.schedule.apply
        require(local in (True, False), f"local is {local!r}, and can be True or False")
        require(not local or apply == "next_step", f"local is True with apply={apply!r}, in place of 'next_step'")
    for number, bucket in enumerate(case.buckets()):
        priority = case.schedule.priority(bucket)
        require(math.isfinite(priority), f"the priority of bucket {number} is {priority}")


@LAWS.law(models(30, 1e8))
def every_element_is_in_one_bucket_of_its_type(case: Case) -> None:
    """The slices of a tensor, even an empty one, are its elements once, and have the bucket's element type."""
    covered: list[list[tuple[int, int]]] = [[] for _ in case.layers]
    for bucket in case.buckets():
        require(bool(bucket.slices), "a bucket has nothing in it")
        for part in bucket.slices:
            require(0 <= part.tensor < len(case.layers), f"{part} is of no tensor: there are {len(case.layers)}")
            dtype = case.layers[part.tensor].spec.dtype
            require(bucket.dtype == dtype, f"tensor {part.tensor} is {dtype}, and in a bucket of {bucket.dtype}")
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
        require(at == elements, f"the slices of tensor {tensor} end at {at}, and it has {elements} elements")


@LAWS.law(models(30, 1e8))
def buckets_are_listed_as_backward_completes_them(case: Case) -> None:
    """Backward goes from the last layer to the first, so a bucket is complete with its tensor nearest to the input."""
    complete = [min(part.tensor for part in bucket.slices) for bucket in case.buckets()]
    wanted = sorted(complete, reverse=True)
    require(complete == wanted, f"backward completes the buckets with the tensors {wanted}, listed are {complete}")


@LAWS.law(models(30, 1e8))
def all_ranks_make_the_same_buckets(case: Case) -> None:
    """The same layers give the same buckets and priorities, whatever the earlier calls: each rank decides by itself."""
    first = case.buckets()
    priorities = [case.schedule.priority(bucket) for bucket in first]
    case.schedule.buckets(case.layers[::2], None)
    again = case.buckets()
    require(first == again, "asked again, it makes other buckets of the same layers")
    found = [case.schedule.priority(bucket) for bucket in again]
    require(found == priorities, "asked again, it gives the same buckets other priorities")


@LAWS.law(models(6, 8, least_elements=1, least_layers=1))
def training_keeps_its_promises(case: Case) -> None:
    """In any order of backward, each bucket is sent once, when allowed, and applied when promised."""
    for mode in (mode for mode in MODES if go_together(case.schedule, mode)):
        Worker(case.layers, case.schedule, mode, case.cost).train(backward_of(case, case.draw()))


@LAWS.law(models(6, 8, least_elements=1, least_layers=1))
def workers_submit_alike_whatever_order_backward_has(case: Case) -> None:
    """Buckets are submitted in the order of the list, or else workers would deadlock."""
    draw, orders = case.draw(), []
    for _ in range(2):
        worker = Worker(case.layers, case.schedule, MODES[0], case.cost)
        worker.train(backward_of(case, draw))
        orders.append(list(worker.submitted))
    require(orders[0] == orders[1], "two workers whose backward passes differ submit in different orders")


def backward_of(case: Case, draw: np.random.Generator) -> Sequence[int]:
    """A possible order in which a backward pass produces the tensors."""
    return [int(index) for index in draw.permutation(len(case.layers))]
