"""Models that are dictionaries of NumPy arrays: gradients one by one, what is refused, and states that are taken up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from recorded import Recorder
from syncline.engine.step import BucketPhase, Steps
from syncline.errors import GradientError, MismatchError, SynclineError, UsageError
from syncline.frameworks import adapter_of
from syncline.frameworks._supported import SILENT
from syncline.frameworks.numpy import adapt
from syncline.global_batches import global_batches_of
from syncline.launch.connecting import in_process
from syncline.sampling import SampleOrder
from syncline.session.session import Session
from syncline.sync.bsp import Bsp

STEPS = 6
SHAPES = {"first": (5, 7), "bias": (7,), "last": (7, 1), "scale": ()}


def sgd(weights: Any, gradient: Any, state: dict[str, Any], *, lr: float = 0.1) -> None:  # noqa: ARG001
    weights -= lr * gradient


def model() -> dict[str, Any]:
    return {name: np.asarray(np.random.default_rng(3).standard_normal(shape)) for name, shape in SHAPES.items()}


def gradient(step: int, rank: int = 0) -> dict[str, Any]:
    return {name: np.sin(array + step + 10 * rank) for name, array in model().items()}


def prepare(session: Session, arrays: Any, rule: Any = sgd) -> Any:
    handed = adapt(session, arrays, rule, SILENT)
    assert handed is not None
    return handed.result


def train(session: Session) -> None:
    handed = adapt(session, model(), sgd, SILENT)
    for step in range(STEPS if handed is not None else 0):
        assert handed is not None
        for name, array in reversed(gradient(step, session.rank).items()):
            handed.result[1].produced(name, array)
        handed.result[1].step()


# Gradients.


@pytest.mark.parametrize("strategy", ["ring schedule=wait_free", "ps(servers=1, update=worker) schedule=wait_free"])
def test_buckets_arrive_while_backward_goes_on(group: Any, strategy: str) -> None:
    """The mean of the last layer is there before any other gradient has been told of."""

    def body(session: Session) -> Any:
        handed = adapt(session, model(), sgd, SILENT)
        if handed is None:
            return
        _, optimizer = handed.result
        optimizer.produced("scale", np.float64(session.rank))
        made = optimizer._steps
        session.engine.wait(made.trained._works[BucketPhase(0, 0, "allreduce")])
        assert (made.gradients.tensors[3] == 0.5).all()
        optimizer.step({name: array for name, array in gradient(0).items() if name != "scale"})

    group(strategy, 2, body)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda o: [o.produced("bias", np.ones(7)) for _ in range(2)], "gradient of 'bias' was given twice"),
        (lambda o: o.produced("other", np.ones(7)), "'other', which the model does not have"),
        (lambda o: o.produced("bias", np.ones((7, 1))), r"'bias' of shape \(7, 1\) for weights of shape \(7,\)"),
        (lambda o: o.produced("bias", [1.0] * 7), "the gradient of 'bias' is list"),
        (lambda o: (o.produced("bias", np.ones(7)), o.step()), "step.. without the gradients of 'first', 'last', 's"),
        (lambda o: o.step(gradient(0) | {"bias": np.ones((7, 1))}), r"'bias' of shape \(7, 1\) for weights"),
        (lambda o: o.step(gradient(0) | {"more": np.ones(1)}), "the gradients have 'more', which the model does not"),
        (lambda o: o.step({name: gradient(0)[name] for name in list(SHAPES)[1:]}), "without the gradients of 'first'$"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_that_are_none_are_named(group: Any, workers: int, call: Callable[[Any], object], says: str) -> None:
    def body(session: Session) -> None:
        _, optimizer = prepare(session, model())
        call(optimizer) if session.rank == workers - 1 else optimizer.step(gradient(0))

    with pytest.raises((GradientError, UsageError), match=says):
        group("ring", workers, body)


def test_parts_of_different_sizes_count_by_their_samples(group: Any) -> None:
    """Three samples of one worker and two of the other: the mean is that of the five."""

    def body(session: Session) -> Any:
        handed = adapt(session, {"w": np.zeros(3)}, sgd, {**SILENT, "weight": "batch"})
        assert handed is not None
        weights, optimizer = handed.result
        sampler = global_batches_of(session, SampleOrder(5, global_batch=5, shuffle=False))
        values = np.arange(15.0).reshape(5, 3) ** 2
        for batch in sampler:
            optimizer.step({"w": values[batch].mean(axis=0)})
            with pytest.raises(UsageError, match=r"commit\(2\): weight='batch' of this framework counts one batch"):
                sampler.commit(2)
            sampler.commit()
        return weights["w"], values.mean(axis=0)

    for found, mean in group("ring", 2, body):
        np.testing.assert_allclose(found, -0.1 * mean, rtol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("ring", r"weight='batch' counts the samples of .* of which this run has 0: make one, or leave weight= out"),
        ("ps(servers=1, on=workers)", "weight='batch' weighs gradients, but .* exchanges weights: use ring"),
        ("ring sync=local(steps=2)", "weight='batch' weighs gradients, but .* exchanges weights: use ring"),
    ],
)
def test_weights_need_global_batches_and_gradients(group: Any, strategy: str, words: str) -> None:
    def body(session: Session) -> None:
        handed = adapt(session, model(), sgd, {**SILENT, "weight": "batch"})
        assert handed is not None
        handed.result[1].step(gradient(0))

    with pytest.raises((UsageError, GradientError), match=words):
        group(strategy, 2, body)


def test_nothing_else_is_called_in_the_middle_of_a_step(group: Any) -> None:
    def body(session: Session) -> None:
        _, optimizer = prepare(session, model())
        optimizer.produced("bias", np.ones(7))
        optimizer.state_dict()

    with pytest.raises(GradientError, match=r"state_dict\(\) in the middle of a step, after some of its gradients"):
        group("ring", 2, body)


def test_an_interrupt_in_the_middle_of_a_step_is_not_forgotten(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that catches it and goes on gets an error from its next call, and so do the others."""
    ended = Steps.backward_ended
    struck: list[threading.Thread] = []

    def interrupted(self: Steps) -> Any:
        if self.begun == 2 and threading.current_thread() in struck:
            raise KeyboardInterrupt
        return ended(self)

    monkeypatch.setattr(Steps, "backward_ended", interrupted)

    def body(session: Session) -> None:
        if session.rank == 0:
            struck.append(threading.current_thread())
        _, optimizer = prepare(session, model())
        for step in range(3):
            with contextlib.suppress(*[KeyboardInterrupt] * (step == 1)):
                optimizer.step(gradient(step, session.rank))

    with pytest.raises((SynclineError, KeyboardInterrupt)):
        group("ring schedule=fifo", 2, body)


@pytest.mark.parametrize("strategy", ["ring schedule=wait_free", "ps(servers=1, on=workers)"])
def test_an_observer_is_told_of_buckets_and_phases(run_on: Any, strategy: str) -> None:
    ticks = iter(range(1 << 30))
    told = [Recorder(lambda: float(next(ticks))) for _ in range(2)]
    run_on(in_process(strategy, 2, told), train)
    for recorder in told:
        kinds = {span.kind for span in recorder.spans()}
        assert {"work", "run", "wait", "backward", "optimizer"} <= kinds
        assert len(recorder.spans("backward")) == len(recorder.spans("optimizer")) == STEPS
        labels = {span.label for span in recorder.spans("work")}
        assert any(label.startswith("bucket 0 (") and "scale" in label for label in labels)


# What is refused.


class Learned:
    """Attributes that nobody can be told of."""

    def __init__(self) -> None:
        self.history = np.ones(3)

    def update(self, weights: Any, gradient: Any, state: Any) -> None:
        """Never called."""


def of_the_whole(weights: Any, gradient: Any, state: dict[str, Any]) -> None:
    sgd(weights, gradient / np.linalg.norm(gradient), state)


def wants_more(weights: Any, gradient: Any, state: Any, lr: float) -> None:
    """No rule: nothing says what lr is."""


@pytest.mark.parametrize(
    ("weights", "rule", "options", "says"),
    [
        (model(), of_the_whole, {}, r"of_the_whole\(\) gives other weights for slices"),
        (model(), Learned(), {}, "the optimizer's 'history' is ndarray"),
        (model(), object(), {}, r"needs an optimizer with update\(weights, gradient, state\)"),
        (model(), None, {}, r"needs an optimizer with update\(weights, gradient, state\), or a function"),
        (model(), wants_more, {}, "wants_more must have the form update.weights, gradient, state., with defaults"),
        (model(), lambda *_, lr: lr, {}, "<lambda> must have the form update"),
        (model(), partial(sgd, lr=np.ones(2)), {}, "the optimizer's 'lr' is ndarray"),
        ({"a": np.zeros(3, np.int64)}, sgd, {}, "the model's 'a' is int64: give floating-point arrays"),
        ({"a": [1.0]}, sgd, {}, "the model's 'a' is list"),
        ({}, sgd, {}, "at least one array"),
        (model(), sgd, {"weight": 2}, "weight=2 is for models of PyTorch; here it is 1, or 'batch'"),
    ],
)
def test_what_cannot_be_trained_is_refused(group: Any, weights: Any, rule: Any, options: Any, says: str) -> None:
    def body(session: Session) -> None:
        with pytest.raises(UsageError, match=says):
            adapt(session, weights, rule, SILENT | options)

    group("ring", 2, body)


@pytest.mark.parametrize("schedule", ["delayed", "merged"])
def test_schedules_that_nothing_shows_the_times_for_are_refused(group: Any, schedule: str) -> None:
    with pytest.raises(
        UsageError, match=rf"schedule={schedule} .* does not support with NumPy yet: use schedule=fixed"
    ):
        group(f"ring schedule={schedule}", 2, train)


def test_models_that_differ_are_named(group: Any) -> None:
    with pytest.raises(MismatchError, match=r"rank 1 has another model than rank 0: 'bias' of shape \[6\]"):
        group("ring", 2, lambda session: prepare(session, model() | {"bias": np.zeros(7 - session.rank)}))


def test_a_model_of_no_framework_is_refused_by_name() -> None:
    assert adapter_of({"a": np.zeros(3)}) is adapt
    with pytest.raises(
        UsageError,
        match=r"the model is list, which belongs to no framework that Syncline supports \(jax, numpy, tensorflow, to",
    ):
        adapter_of([1.0])


@pytest.mark.parametrize("strategy", ["ps(servers=1)", "ps(servers=1, on=workers)"])
def test_owners_refuse_a_step_of_which_they_hear_nothing(
    group: Any, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bsp, "due", lambda _, step: step != 2)
    with pytest.raises(GradientError, match=r"sync=bsp exchanges nothing in step 2.* use ring"):
        group(strategy, 2, train)


def test_weights_that_others_hold_cannot_be_written(group: Any) -> None:
    def body(session: Session) -> None:
        handed = adapt(session, model(), sgd, SILENT)
        if handed is not None:
            with pytest.raises(ValueError, match="read-only"):
                handed.result[0]["first"] += 1
            handed.result[1].step(gradient(0, session.rank))

    group("ps(servers=1)", 2, body)


def test_other_weights_on_a_rank_are_refused_where_all_are_to_agree(group: Any) -> None:
    """Silently, what theirs differ by would be added to weights that it does not belong to."""

    def body(session: Session) -> None:
        found, optimizer = prepare(session, model())
        found["bias"] += session.rank
        for step in range(2):
            optimizer.step(gradient(step, session.rank))

    with pytest.raises(GradientError, match="different weights"):
        group("ring sync=local(steps=2)", 3, body)


# States.


def save(session: Session, steps: int = 4) -> Any:
    """The state after some steps that are the same on all workers."""
    handed = adapt(session, model(), sgd, SILENT)
    for step in range(steps if handed is not None else 0):
        assert handed is not None
        handed.result[1].step(gradient(step))
    return handed and handed.result[1].state_dict()


def go_on(session: Session, state: Any) -> Any:
    weights, optimizer = prepare(session, model())
    optimizer.load_state_dict(state)
    for step in range(4, 11):
        optimizer.step(gradient(step))
    return weights["first"].copy()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 2), (2, 1)])
def test_what_was_left_open_may_be_another_thing_after(group: Any, before: int, after: int) -> None:
    """Neither the transport nor an algorithm that nobody has asked for belongs to what is resumed."""
    state = group("auto", before, save)[0]
    elsewhere = state | {"strategy": state["strategy"].replace("transport=inproc", "") + " transport=tcp"}
    wanted = group("ring", before, partial(go_on, state=group("ring", before, save)[0]))
    for one in (state, elsewhere):
        for found in group("auto", after, partial(go_on, state=one)):
            np.testing.assert_allclose(found, wanted[0], rtol=1e-12)


@pytest.mark.parametrize("change", ["sync=local(steps=2)", "codec=int8", "ps(servers=1)"])
def test_what_was_asked_for_has_to_be_the_same(group: Any, change: str) -> None:
    state = group("auto", 2, save)[0]
    with pytest.raises(UsageError, match=r"this state belongs to a run with '.*give syncline.init"):
        group("auto", 2, partial(go_on, state=state | {"strategy": change}))
    with pytest.raises(UsageError, match="this state belongs to a run with 'tree"):
        group("ring", 2, partial(go_on, state=state | {"strategy": "tree"}))


@pytest.mark.parametrize(("strategy", "own"), [("ps(servers=1) sync=asp", True), ("ps(servers=1)", False)])
def test_states_are_the_same_but_for_steps_of_workers_that_go_by_themselves(
    group: Any, strategy: str, own: bool
) -> None:
    first, second = group(strategy, 2, lambda session: save(session, 3 + own * session.rank))[:2]
    assert (first["steps"], second["steps"]) == (3, 3 + own)
    np.testing.assert_array_equal(first["weights"]["first"], second["weights"]["first"])
    assert first.keys() == second.keys()


def test_a_state_of_another_model_is_refused(group: Any) -> None:
    def body(session: Session) -> None:
        _, optimizer = prepare(session, model())
        mine = optimizer.state_dict()
        with pytest.raises(UsageError, match="belongs to another model, with 'bias'"):
            optimizer.load_state_dict(mine | {"weights": {"bias": np.zeros(7)}})
        with pytest.raises(
            UsageError, match=r"its 'bias' is float64 of shape \(6,\), but this model's is float64 of shape \(7,\)"
        ):
            optimizer.load_state_dict(mine | {"weights": mine["weights"] | {"bias": np.zeros(6)}})

    group("ring", 2, body)


def test_a_codec_that_was_chosen_is_taken_up_and_one_without_its_state_warns(group: Any) -> None:
    state, _ = group("ring codec=topk(ratio=0.3)", 2, save)

    def body(session: Session) -> Any:
        session.chose_codec = True
        _, optimizer = prepare(session, model())
        optimizer.load_state_dict(state)
        known = {name: value for name, value in optimizer.state_dict().items() if name != "codec"}
        if session.rank == 0:  # whose warning is caught is not known between threads
            with pytest.warns(UserWarning, match=r"lacks the residuals of the codec in '.* codec=feedback\(topk"):
                optimizer.load_state_dict(known)
        session.barrier()
        if session.rank == 1:
            with pytest.warns(UserWarning, match="lacks the residuals"):
                optimizer.load_state_dict(known)
        return str(session.strategy), str(optimizer._steps.exchange.compression._codec)

    for strategy, codec in group("ring codec=int8", 2, body):
        assert "codec=feedback(topk(ratio=0.3))" in strategy
        assert codec == "Feedback(codec=TopK(ratio=0.3), warmup=0)"
