"""Models that are dictionaries of NumPy arrays, whose gradients a script computes by itself."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest

from syncline.engine.step import Steps
from syncline.errors import GradientError, MismatchError, SynclineError, UsageError
from syncline.frameworks import adapter_of
from syncline.frameworks.numpy import adapt
from syncline.session.session import Session
from syncline.sync.bsp import Bsp

OPTIONS = {"unused": "error", "weight": 1, "ignore": (), "broadcast_buffers": True}
STEPS, WORKERS = 6, 3
REDUCED = ["ring", "direct schedule=wait_free", "tree schedule=fifo", "ps(servers=2, update=worker)"]
SERVED = ["ps(servers=1)", "ps(servers=2) schedule=wait_free", "ps(servers=2, on=workers)"]
CODECS = ["ring codec=topk(ratio=0.2)", "ring codec=bf16", "ps(servers=2) codec=int8"]
CODECS += ["ps(servers=2, on=workers) codec=int8", "ps(servers=1, update=worker) codec=int8"]


class Momentum:
    def __init__(self, lr: float = 0.05, momentum: float = 0.9) -> None:
        self.lr, self.momentum = lr, momentum

    def update(self, weights: Any, gradient: Any, state: dict[str, Any]) -> None:
        velocity = state.setdefault("velocity", np.zeros_like(weights))
        velocity *= self.momentum
        velocity += gradient
        weights -= weights.dtype.type(self.lr) * velocity


def model(seed: int = 0, dtype: str = "float64") -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    shapes = {"first": (5, 7), "bias": (7,), "last": (7, 1), "scale": ()}
    return {name: np.asarray(draw.standard_normal(shape), dtype) for name, shape in shapes.items()}


def gradient(step: int, rank: int) -> dict[str, Any]:
    """Something that depends on both."""
    return {name: np.sin(array + step + 10 * rank).astype(array.dtype) for name, array in model(7).items()}


def trained_alone(mean: bool = True) -> dict[str, Any]:
    weights, optimizer = model(), Momentum()
    states: dict[str, Any] = {name: {} for name in weights}
    for step in range(STEPS):
        optimizer.lr = 0.05 / (1 + step)
        each = [gradient(step, rank) for rank in range(WORKERS if mean else 1)]
        for name, array in weights.items():
            found = sum(one[name] for one in each) / len(each)
            optimizer.update(array.reshape(-1), np.reshape(found, -1), states[name])
    return weights


def train(session: Session) -> Any:
    handed = adapt(session, model(session.index), Momentum(), OPTIONS)
    if handed is None:
        return None
    weights, optimizer = handed.result
    for step in range(STEPS):
        optimizer.lr = 0.05 / (1 + step)
        assert optimizer.lr == optimizer._optimizer.lr
        optimizer.step(gradient(step, session.rank))
    return {name: array.copy() for name, array in weights.items()}


@pytest.mark.parametrize("strategy", REDUCED + SERVED)
def test_workers_train_as_one_that_has_the_mean(group: Any, strategy: str) -> None:
    """Also from rank 0's weights, with a learning rate that changes, which the owners are told."""
    wanted = trained_alone()
    for found in group(strategy, WORKERS, train)[:WORKERS]:
        assert list(found) == list(wanted)
        for name, array in wanted.items():
            assert found[name].shape == array.shape
            np.testing.assert_allclose(found[name], array, rtol=1e-12, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("strategy", CODECS)
def test_codecs_give_all_workers_the_same_weights_near_those_without(group: Any, strategy: str) -> None:
    first, *others = group(strategy, WORKERS, train)[:WORKERS]
    wanted, start = trained_alone(), model()
    for name in wanted:
        assert all((other[name] == first[name]).all() for other in others)
        assert np.abs(first[name] - wanted[name]).max() < 0.6 * max(0.1, np.abs(start[name] - wanted[name]).max())


def test_one_worker_needs_nobody(group: Any) -> None:
    (found,) = group("ring", 1, train)
    for name, array in trained_alone(mean=False).items():
        np.testing.assert_array_equal(found[name], array)


def test_weights_that_others_hold_cannot_be_written(group: Any) -> None:
    def body(session: Session) -> None:
        handed = adapt(session, model(), Momentum(), OPTIONS)
        if handed is not None:
            weights, optimizer = handed.result
            with pytest.raises(ValueError, match="read-only"):
                weights["first"] += 1
            optimizer.step(gradient(0, session.rank))

    group("ps(servers=1)", 2, body)


class OfTheWhole(Momentum):
    def update(self, weights: Any, gradient: Any, state: dict[str, Any]) -> None:
        super().update(weights, gradient / np.linalg.norm(gradient), state)


class Learned(Momentum):
    def __init__(self) -> None:
        super().__init__()
        self.history = np.ones(3)


@pytest.mark.parametrize(
    ("weights", "optimizer", "options", "says"),
    [
        (model(), OfTheWhole(), {}, "OfTheWhole.update.. gives other weights for slices"),
        (model(), Learned(), {}, "the optimizer's 'history' is ndarray"),
        (model(), object(), {}, r"needs an optimizer with update\(weights, gradient, state\)"),
        (model(), None, {}, r"needs an optimizer with update\(weights, gradient, state\)"),
        ({"a": np.zeros(3, np.int64)}, Momentum(), {}, "the model's 'a' is int64: give floating-point arrays"),
        ({"a": [1.0]}, Momentum(), {}, "the model's 'a' is list"),
        ({}, Momentum(), {}, "at least one array"),
        (model(), Momentum(), {"weight": "batch"}, "weight= is for models of PyTorch"),
    ],
)
def test_what_cannot_be_trained_is_refused(group: Any, weights: Any, optimizer: Any, options: Any, says: str) -> None:
    def body(session: Session) -> None:
        with pytest.raises(UsageError, match=says):
            adapt(session, weights, optimizer, OPTIONS | options)

    group("ring", 2, body)


def test_models_that_differ_are_named(group: Any) -> None:
    def body(session: Session) -> None:
        weights = model()
        if session.rank == 1:
            weights["bias"] = np.zeros(6)
        adapt(session, weights, Momentum(), OPTIONS)

    with pytest.raises(MismatchError, match=r"rank 1 has another model than rank 0: 'bias' of shape \[6\]"):
        group("ring", 2, body)


def test_gradients_of_another_shape_are_named(group: Any) -> None:
    def body(session: Session) -> None:
        handed = adapt(session, model(), Momentum(), OPTIONS)
        assert handed is not None
        found = gradient(0, session.rank)
        if session.rank == 1:
            found["bias"] = np.zeros((7, 1))
        handed.result[1].step(found)

    with pytest.raises(GradientError, match=r"rank 1: the gradients have 'bias' of shape \(7, 1\) for"):
        group("ring", 2, body)


def test_gradients_of_another_shape_are_named_by_one_worker_alone(group: Any) -> None:
    def body(session: Session) -> None:
        handed = adapt(session, model(), Momentum(), OPTIONS)
        assert handed is not None
        with pytest.raises(GradientError, match=r"the gradients have 'more', which the model does not have"):
            handed.result[1].step(gradient(0, 0) | {"more": np.zeros(1)})
        with pytest.raises(GradientError, match=r"step\(\) without the gradients of 'last'$"):
            handed.result[1].step({name: array for name, array in gradient(0, 0).items() if name != "last"})

    group("ring", 1, body)


@pytest.mark.parametrize("strategy", ["ps(servers=1)", "ps(servers=1, on=workers)"])
def test_owners_refuse_a_step_of_which_they_hear_nothing(
    group: Any, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bsp, "due", lambda _, step: step != 2)
    with pytest.raises(GradientError, match=r"sync=bsp exchanges nothing in step 2.* use ring"):
        group(strategy, 2, train)


def test_an_interrupt_in_the_middle_of_a_step_is_not_forgotten(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that catches it and goes on gets an error from its next call, and so do the others."""
    ended = Steps.backward_ended

    def interrupted(self: Steps) -> Any:
        if self.begun == 2 and threading.current_thread() in struck:
            raise KeyboardInterrupt
        return ended(self)

    struck: list[threading.Thread] = []
    monkeypatch.setattr(Steps, "backward_ended", interrupted)

    def body(session: Session) -> None:
        if session.rank == 0:
            struck.append(threading.current_thread())
        handed = adapt(session, model(), Momentum(), OPTIONS)
        assert handed is not None
        _, optimizer = handed.result
        optimizer.step(gradient(0, session.rank))
        with contextlib.suppress(KeyboardInterrupt):
            optimizer.step(gradient(1, session.rank))
        optimizer.step(gradient(2, session.rank))

    with pytest.raises((SynclineError, KeyboardInterrupt)):
        group("ring schedule=fifo", 2, body)


def test_a_model_of_no_framework_is_refused_by_name() -> None:
    assert adapter_of({"a": np.zeros(3)}) is adapt
    with pytest.raises(
        UsageError,
        match=r"the model is list, which belongs to no framework that Syncline supports \(jax, numpy, tensorflow, to",
    ):
        adapter_of([1.0])
