"""A worker's steps without a framework: every schedule and sync mode on a link and a clock that are made up."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import registry
from syncline.engine.step import Agree, Apply, Operation, Steps, Submit, Wait
from syncline.errors import UsageError
from syncline.nouns import Bucket, Layer, Slice, Spec
from syncline.schedules import Cost, Schedule
from syncline.sync import SyncMode
from syncline.sync.bsp import Bsp

STEPS = 4


@dataclass(frozen=True)
class Sliced:
    """Slices of tensors, those of the first layers before the others; all that a schedule may ask for beside that."""

    phases: Literal["whole", "split"] = "whole"
    apply: Literal["step", "layer", "next_step"] = "step"
    release: Literal["ready", "backward_end"] = "ready"
    in_flight: int = 1

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:  # noqa: ARG002
        return [
            Bucket((Slice(index, start, min(start + 3, layers[index].spec.elements)),), layers[index].spec.dtype)
            for index in reversed(range(len(layers)))
            for start in range(0, layers[index].spec.elements, 3)
        ]

    def priority(self, bucket: Bucket) -> float:
        return float(bucket.slices[0].tensor)


@dataclass(frozen=True)
class EverySecond(Bsp):
    """Exchanges in every second step."""

    def due(self, step: int) -> bool:
        return step % 2 == 1


SCHEDULES: list[Schedule] = [
    *(entry.target() for entry in registry.entries("schedules")),
    *(
        Sliced(phases, apply, release)
        for phases in ("whole", "split")
        for apply in ("step", "layer", "next_step")
        for release in ("ready", "backward_end")
    ),
]
MODES: list[SyncMode] = [*(entry.target() for entry in registry.entries("sync")), EverySecond()]


class Laid(NamedTuple):
    buckets: list[Bucket]
    priorities: list[float]


@dataclass
class Link:
    """Carries one operation at a time, of those that may go that with the smallest priority; an element takes a second.

    ``free_at`` is when it may begin the next one.
    """

    elements: Callable[[int], int]
    waiting: list[tuple[float, int, float, Submit]] = field(default_factory=list)
    done_at: dict[Operation, float] = field(default_factory=dict)
    free_at: float = 0.0
    serial: count[int] = field(default_factory=count)

    def submit(self, now: float, submit: Submit) -> None:
        self.waiting.append((submit.priority, next(self.serial), now, submit))

    def carry_until(self, wanted: Operation) -> float:
        while wanted not in self.done_at:
            ready = [
                (max(at, 0.0 if submit.after is None else self.done_at[submit.after]), priority, serial, submit)
                for priority, serial, at, submit in self.waiting
                if submit.after is None or submit.after in self.done_at
            ]
            begin = max(self.free_at, min(entry[0] for entry in ready))
            _, _, serial, submit = min((e for e in ready if e[0] <= begin), key=lambda e: e[1:3])
            self.waiting = [entry for entry in self.waiting if entry[1] != serial]
            self.free_at = self.done_at[submit.operation] = begin + self.elements(submit.operation.bucket)
        return self.done_at[wanted]


class Worker:
    """Drives ``Steps`` through training on a virtual clock and holds every answer to the laws."""

    def __init__(self, layers: Sequence[Layer], schedule: Schedule, mode: SyncMode) -> None:
        self.layers, self.schedule, self.mode = layers, schedule, mode
        self.buckets = schedule.buckets(layers)
        self.steps = Steps(
            len(layers), Laid(self.buckets, [schedule.priority(one) for one in self.buckets]), schedule, mode
        )
        self.link = Link(lambda bucket: self.buckets[bucket].elements)
        self.now = 0.0
        self.step = 0
        self.agreed: set[int] = set()
        self.produced: set[tuple[int, int]] = set()
        self.ended: set[int] = set()
        self.stepped: set[int] = set()
        self.submitted: dict[Operation, float] = {}
        self.versions = [0] * len(self.buckets)  # how many steps have been applied

    def do(self, actions: Sequence[Agree | Submit | Wait | Apply]) -> None:
        for action in actions:
            if isinstance(action, Agree):
                assert action.step not in self.agreed
                self.agreed.add(action.step)
            elif isinstance(action, Submit):
                self.check_submitted(action)
                self.submitted[action.operation] = self.now
                self.link.submit(self.now, action)
            elif isinstance(action, Wait):
                for operation in action.operations:
                    self.now = max(self.now, self.link.carry_until(operation))
            else:
                self.apply(action)

    def check_submitted(self, submit: Submit) -> None:
        step, number, phase = submit.operation
        assert submit.operation not in self.submitted
        assert step in self.agreed
        assert self.mode.due(step)
        assert all((step, part.tensor) in self.produced for part in self.buckets[number].slices)
        assert self.schedule.release == "ready" or step in self.ended
        assert submit.priority == self.schedule.priority(self.buckets[number])
        assert (phase == "allreduce") == (self.schedule.phases == "whole")
        if phase == "all_gather":
            assert submit.after == Operation(step, number, "reduce_scatter")
            assert submit.after in self.submitted
        else:
            assert submit.after is None

    def apply(self, action: Apply) -> None:
        last = "allreduce" if self.schedule.phases == "whole" else "all_gather"
        assert action.step in self.stepped
        for number in action.buckets:
            assert self.versions[number] == action.step  # once, and in order
            self.versions[number] += 1
            if self.mode.due(action.step):
                assert self.link.done_at[Operation(action.step, number, last)] <= self.now

    def train(self, backward: Sequence[int]) -> None:
        for self.step in range(STEPS):
            for index, layer in enumerate(self.layers):
                self.do(self.steps.needed(index))
                self.check_weights(index)
                self.now += layer.forward_s
            for index in backward:
                self.now += self.layers[index].backward_s
                self.produced.add((self.step, index))
                self.do(self.steps.produced(index))
            self.ended.add(self.step)
            self.do(self.steps.backward_ended())
            self.stepped.add(self.step)
            self.do(self.steps.stepped())

    def check_weights(self, tensor: int) -> None:
        """How many steps are in the weights that a forward pass reads: as many as the schedule promises."""
        for number, bucket in enumerate(self.buckets):
            if any(part.tensor == tensor for part in bucket.slices):
                behind = self.step > 0 and self.schedule.apply == "next_step" and self.mode.due(self.step - 1)
                assert self.versions[number] == self.step - behind


LAYERS = st.lists(
    st.builds(
        lambda elements, dtype, forward_s, backward_s: Layer(Spec("w", (elements,), dtype), forward_s, backward_s),
        st.integers(1, 8),
        st.sampled_from(["float32", "float64"]),
        st.integers(0, 5).map(float),
        st.integers(0, 5).map(float),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_every_schedule_and_mode_keeps_its_promises(data: st.DataObject, schedule: Schedule, mode: SyncMode) -> None:
    layers = data.draw(LAYERS)
    backward = data.draw(st.permutations(range(len(layers))))
    worker = Worker(layers, schedule, mode)
    worker.train(backward)
    worker.do(worker.steps.flush())
    assert worker.versions == [STEPS] * len(worker.buckets)
    phases = 1 if schedule.phases == "whole" else 2
    due = [step for step in range(STEPS) if mode.due(step)]
    assert worker.agreed == set(due)
    assert len(worker.submitted) == phases * len(due) * len(worker.buckets)
    assert not worker.steps.flush()


@settings(max_examples=20)
@given(LAYERS, st.data())
def test_buckets_are_submitted_in_the_order_of_the_list(layers: list[Layer], data: st.DataObject) -> None:
    """Whatever order backward completes them in: workers whose backward passes differ submit alike."""
    for schedule in SCHEDULES:
        order = []
        for _ in range(2):
            worker = Worker(layers, schedule, Bsp())
            worker.train(data.draw(st.permutations(range(len(layers)))))
            order.append(list(worker.submitted))
        assert order[0] == order[1]
        if schedule.phases == "split" and schedule.apply == "layer":
            gathers = [operation.bucket for operation in order[0] if operation.phase == "all_gather"]
            assert gathers == STEPS * [*range(len(schedule.buckets(layers)))][::-1]  # what is needed first goes first


def seconds(schedule: Schedule, layers: Sequence[Layer]) -> float:
    worker = Worker(layers, schedule, Bsp())
    worker.train(range(len(layers))[::-1])
    worker.do(worker.steps.flush())
    return worker.now


def test_what_goes_early_and_is_waited_for_late_is_hidden() -> None:
    """Four layers of 8 elements, 5 s forward and backward each: a step computes 40 s and sends for 32 s.

    After backward, all is exposed; during backward, all but what the first layer sends at its end. The layers that wait
    for themselves hide that behind the next forward pass, and the step after hides it altogether.
    """
    layers = [Layer(Spec(f"w{index}", (8,)), 5.0, 5.0) for index in range(4)]
    late = seconds(Sliced(release="backward_end"), layers)
    ready = seconds(Sliced(), layers)
    layerwise = seconds(Sliced(apply="layer"), layers)
    after = seconds(Sliced(apply="next_step"), layers)
    assert late == STEPS * (40 + 32)
    assert late > ready > layerwise > after >= STEPS * 40


# Out of turn -------------------------------------------------------------------------------------------------------


def made(schedule: Schedule | None = None, tensors: int = 2, mode: SyncMode | None = None) -> Steps:
    schedule = schedule or Sliced()
    layers = [Layer(Spec(f"w{index}", (4,))) for index in range(tensors)]
    buckets = schedule.buckets(layers)
    return Steps(tensors, Laid(buckets, [schedule.priority(bucket) for bucket in buckets]), schedule, mode or Bsp())


def backward(steps: Steps) -> None:
    for tensor in (1, 0):
        steps.produced(tensor)
    steps.backward_ended()


def shown(steps: Steps) -> Any:
    """All that a state machine has in it, in a form that can be compared."""
    return {
        key: [vars(step) for step in value] if key == "_open" else vars(value) if key == "_now" and value else value
        for key, value in vars(copy.deepcopy(steps)).items()
    }


def refused(steps: Steps, call: Callable[[], object], words: str) -> None:
    before = shown(steps)
    with pytest.raises(UsageError, match=words):
        call()
    assert shown(steps) == before


def test_what_comes_out_of_turn_changes_nothing() -> None:
    steps = made()
    refused(steps, steps.stepped, "before a backward pass")
    refused(steps, steps.backward_ended, "2 of 2 tensors")
    steps.produced(1)
    refused(steps, lambda: steps.produced(1), "twice in step 0")
    refused(steps, steps.backward_ended, "1 of 2 tensors")
    refused(steps, steps.stepped, "before a backward pass")
    refused(steps, lambda: steps.arrived(Operation(0, 3, "allreduce")), "not submitted")
    refused(steps, steps.abandon, "the others wait")
    refused(steps, steps.flush, "in the middle of the backward pass of step 0")
    for tensor in (-1, 2):
        refused(steps, lambda tensor=tensor: steps.produced(tensor), f"there is no tensor {tensor}")
    assert steps.missing == [0]
    steps.produced(0)
    steps.backward_ended()
    steps.stepped()
    refused(steps, steps.stepped, "a second time")


@pytest.mark.parametrize("apply", ["layer", "next_step"])
def test_passes_that_are_exchanged_add_up_only_where_backward_waits(apply: Literal["layer", "next_step"]) -> None:
    steps = made(Sliced(apply=apply))
    backward(steps)
    refused(steps, lambda: steps.produced(1), "accumulate them under no_sync")
    steps = made()
    backward(steps)
    backward(steps)  # as the other libraries do it
    assert steps.stepped() == [Apply(1, (0, 1, 2, 3))]


def test_only_a_step_of_the_workers_own_can_be_given_up() -> None:
    """The others have been asked whether they make a step that is due, even if nothing of it has been submitted."""
    steps = made(Sliced(release="backward_end"))
    assert steps.produced(1) == [Agree(0)]
    refused(steps, steps.abandon, "the others wait")
    steps = made(mode=EverySecond())
    before = shown(steps)
    steps.abandon()
    steps.produced(1)
    steps.abandon()
    assert shown(steps) == before
    backward(steps)
    assert steps.begun == 1


def test_what_is_given_up_leaves_the_step_before_it() -> None:
    steps = made(mode=EverySecond())
    for _ in range(2):
        backward(steps)
    steps.produced(1)
    steps.abandon()
    assert steps.stepped() == [Apply(1, (0, 1, 2, 3))]


def test_what_has_arrived_is_not_waited_for() -> None:
    steps = made(Sliced(phases="split", apply="layer"))
    backward(steps)
    for _ in range(2):  # what is told again does no harm
        steps.arrived(Operation(0, 0, "all_gather"))
        steps.arrived(Operation(0, 0, "reduce_scatter"))
    with pytest.raises(UsageError, match="not submitted"):
        steps.arrived(Operation(1, 0, "all_gather"))
    waits = [action for action in steps.flush() if isinstance(action, Wait)]
    assert waits == [Wait(tuple(Operation(0, number, "all_gather") for number in (1, 2, 3)))]
    assert steps.stepped() == []
    assert [type(action) for action in steps.needed(0)] == [Apply]
    assert steps.flush() == [Apply(0, (0, 1))]
    steps.arrived(Operation(0, 3, "all_gather"))  # long waited for


def test_gradients_are_there_after_a_flush_and_not_applied_before_their_step() -> None:
    steps = made(Sliced(apply="next_step"))
    backward(steps)
    assert [type(action) for action in steps.flush()] == [Wait]
    assert steps.stepped() == []
    assert steps.flush() == [Apply(0, (0, 1, 2, 3))]
