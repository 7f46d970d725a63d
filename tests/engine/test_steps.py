"""A worker's steps without a framework: every schedule and sync mode on a link and a clock that are made up."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.engine.step import Agree, Apply, Average, BucketPhase, Steps, Wait
from syncline.errors import UsageError
from syncline.nouns import Layer, Spec
from syncline.schedules import Schedule
from syncline.sync import SyncMode
from syncline.sync.bsp import Bsp
from syncline.testing import check_schedule
from syncline.testing.schedules import LAWS, SLICED, STEPS, Averaged, Every, Laid, Sliced, Worker

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


@pytest.mark.parametrize("schedule", SLICED, ids=str)
def test_all_that_a_schedule_may_ask_for_is_done(schedule: Schedule) -> None:
    """Those of the registry have tests beside them; these are for the values that none of them has."""
    assert check_schedule(schedule, examples=12) == LAWS.names


@settings(max_examples=20)
@given(LAYERS, st.data())
def test_what_is_needed_first_is_gathered_first(layers: list[Layer], data: st.DataObject) -> None:
    """Where layers wait for themselves, whatever order backward completes buckets in."""
    schedule = Sliced("split", "layer")
    worker = Worker(layers, schedule, Bsp())
    worker.train(data.draw(st.permutations(range(len(layers)))))
    gathers = [operation.bucket for operation in worker.submitted if operation.phase == "all_gather"]
    assert gathers == STEPS * [*range(len(schedule.buckets(layers)))][::-1]


def seconds(schedule: Schedule, layers: Sequence[Layer]) -> float:
    worker = Worker(layers, schedule, Bsp())
    worker.train(range(len(layers))[::-1])
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


def made(
    schedule: Schedule | None = None, tensors: int = 2, mode: SyncMode | None = None, *, held: bool = False
) -> Steps:
    schedule = schedule or Sliced()
    layers = [Layer(Spec(f"w{index}", (4,))) for index in range(tensors)]
    buckets = schedule.buckets(layers)
    laid = Laid(buckets, [schedule.priority(bucket) for bucket in buckets])
    return Steps(tensors, laid, schedule, mode or Bsp(), held=held)


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
    refused(steps, lambda: steps.arrived(BucketPhase(0, 3, "allreduce")), "not submitted")
    refused(steps, steps.abandon, "the others wait")
    refused(steps, steps.flush, "in the middle of the backward pass of step 0")
    for tensor in (-1, 2):
        refused(steps, lambda tensor=tensor: steps.produced(tensor), f"there is no tensor {tensor}")
    assert steps.missing == [0]
    steps.produced(0)
    steps.backward_ended()
    steps.stepped()
    refused(steps, steps.stepped, "a second time")


def test_where_others_hold_the_weights_only_the_optimizers_step_waits() -> None:
    """So they are told of the step while the last gradients are under way."""
    steps = made(held=True)
    for tensor in (1, 0):
        steps.produced(tensor)
    assert steps.backward_ended() == []
    wait, apply = steps.stepped()
    assert isinstance(wait, Wait)
    assert isinstance(apply, Apply)
    assert [operation.bucket for operation in wait.operations] == list(apply.buckets)
    refused(steps, steps.stepped, "a second time")


@pytest.mark.parametrize("apply", ["layer", "next_step"])
def test_passes_that_are_exchanged_add_up_only_where_backward_waits(apply: Literal["layer", "next_step"]) -> None:
    steps = made(Sliced(apply=apply))
    backward(steps)
    refused(steps, lambda: steps.produced(1), "accumulate under no_sync")
    steps = made()
    backward(steps)
    backward(steps)  # as the other libraries do it
    assert steps.stepped() == [Apply(1, (0, 1, 2, 3))]


def test_only_a_step_of_the_workers_own_can_be_given_up() -> None:
    """The others have been asked whether they make a step that is due, even if nothing of it has been submitted."""
    steps = made(Sliced(release="backward_end"))
    assert steps.produced(1) == [Agree(0)]
    refused(steps, steps.abandon, "the others wait")
    steps = made(mode=Every(2))
    before = shown(steps)
    steps.abandon()
    steps.produced(1)
    steps.abandon()
    assert shown(steps) == before
    backward(steps)
    assert steps.begun == 1


@pytest.mark.parametrize("phases", ["whole", "split"])
def test_weights_are_exchanged_once_when_the_optimizer_has_run(phases: Literal["whole", "split"]) -> None:
    """Also after steps that are made without the state machine, and in the order in which they were made."""
    steps = made(Sliced(phases), mode=Averaged(2))
    assert steps.updated() == []
    steps.made_alone()
    assert not steps.averages_next
    for tensor in (1, 0):
        assert steps.produced(tensor) == []
    refused(steps, steps.updated, "in the middle of the backward pass of step 1")
    refused(steps, steps.made_alone, "not local to this worker")
    assert steps.backward_ended() == []
    steps.stepped()
    assert steps.averages_next
    agree, *submits, wait, average = steps.updated()
    assert (agree, average) == (Agree(1), Average(1))
    assert isinstance(wait, Wait)
    assert len(wait.operations) == 4
    assert len(submits) == (4 if phases == "whole" else 8)
    assert not steps.averages_next
    assert steps.updated() == []
    for _ in range(4):  # nobody has said that the optimizer ran: weights have been updated once, or not at all
        steps.made_alone()
    assert [action.step for action in steps.updated() if isinstance(action, Average)] == [5]


class Both(Averaged):
    """Says of the third step that gradients are exchanged, and that weights are."""

    def due(self, step: int) -> bool:
        return step == 2

    def averages(self, step: int) -> bool:
        return step == 2


def test_a_step_exchanges_gradients_or_weights() -> None:
    """What of a mode is looked at beforehand are its first steps: the others are refused when they begin."""
    steps = made(mode=Both())
    for _ in range(2):
        backward(steps)
    refused(
        steps,
        lambda: steps.produced(1),
        r"step 2 the sync mode exchanges both gradients \(due\) and weights \(averages\)",
    )
    refused(steps, lambda: steps.produced(0), "step 2 the sync mode exchanges both")
    assert steps.stepped() == [Apply(1, (0, 1, 2, 3))]  # what was open still is


def test_a_step_that_is_exchanged_is_not_made_alone() -> None:
    steps = made()
    refused(steps, steps.made_alone, "step 0 is not local to this worker: it is exchanged")


def test_what_is_given_up_leaves_the_step_before_it() -> None:
    steps = made(mode=Every(2))
    for _ in range(2):
        backward(steps)
    steps.produced(1)
    steps.abandon()
    assert steps.stepped() == [Apply(1, (0, 1, 2, 3))]


def test_what_has_arrived_is_not_waited_for() -> None:
    steps = made(Sliced(phases="split", apply="layer"))
    backward(steps)
    for _ in range(2):  # what is told again does no harm
        steps.arrived(BucketPhase(0, 0, "all_gather"))
        steps.arrived(BucketPhase(0, 0, "reduce_scatter"))
    with pytest.raises(UsageError, match="not submitted"):
        steps.arrived(BucketPhase(1, 0, "all_gather"))
    waits = [action for action in steps.flush() if isinstance(action, Wait)]
    assert waits == [Wait(tuple(BucketPhase(0, number, "all_gather") for number in (1, 2, 3)))]
    assert steps.stepped() == [Apply(0, (0, 1, 2, 3))]
    assert steps.flush() == []
    steps.arrived(BucketPhase(0, 3, "all_gather"))  # long waited for


@pytest.mark.parametrize("apply", ["layer", "next_step"])
def test_gradients_that_have_been_read_are_applied_when_the_optimizer_is_called(apply: Any) -> None:
    """Who has waited for them may have changed them: nothing of the step is left for later."""
    steps = made(Sliced(apply=apply))
    backward(steps)
    assert [type(action) for action in steps.flush()] == [Wait]
    assert steps.unstepped
    assert not steps.under_way
    assert steps.stepped() == [Apply(0, (0, 1, 2, 3))]
    assert steps.flush() == []
    backward(steps)
    assert steps.under_way  # the next one has been read by nobody
    assert not any(isinstance(action, Apply) for action in steps.stepped())


@pytest.mark.parametrize("apply", ["layer", "next_step"])
def test_passes_add_up_once_the_gradients_of_the_first_have_come(apply: Any) -> None:
    steps = made(Sliced(apply=apply))
    backward(steps)
    with pytest.raises(UsageError, match="a second backward pass begins before the optimizer was called"):
        steps.produced(0)
    steps.flush()
    backward(steps)
    steps.flush()
    assert steps.stepped() == [Apply(1, (0, 1, 2, 3))]
