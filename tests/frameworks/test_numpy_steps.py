"""Steps of models of NumPy: gradients one by one, rules of any kind, checkpoints, and what an observer is told."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from recorded import Recorder
from syncline.engine.step import BucketPhase
from syncline.errors import GradientError, UsageError
from syncline.frameworks.numpy import adapt
from syncline.launch.connecting import in_process
from syncline.session.session import Session

OPTIONS = {"unused": "error", "weight": 1, "ignore": (), "broadcast_buffers": True}
STEPS, WORKERS, BATCH = 6, 3, 4
REDUCED = ["ring", "direct schedule=wait_free", "tree schedule=fifo", "ps(servers=2, update=worker)"]
REDUCED += ["ring schedule=priority(slice=64B)", "direct schedule=split(slice=64B)"]
SERVED = ["ps(servers=1)", "ps(servers=2) schedule=wait_free", "ps(servers=2) schedule=priority(slice=64B)"]
SERVED += ["ps(servers=2, on=workers)"]
CODECS = [
    "ring codec=topk(ratio=0.3)",
    "ring codec=int8 schedule=priority(slice=64B)",
    "ps(servers=2) codec=int8",
    "ps(servers=1, on=workers) codec=int8",
]


def sgd(weights: Any, gradient: Any, state: dict[str, Any], *, lr: float = 0.1) -> None:  # noqa: ARG001
    weights -= lr * gradient


def momentum(weights: Any, gradient: Any, state: dict[str, Any], *, lr: float = 0.1, rate: float = 0.9) -> None:
    velocity = state.setdefault("velocity", np.zeros_like(weights))
    velocity *= rate
    velocity += gradient
    weights -= lr * velocity


def adam(weights: Any, gradient: Any, state: dict[str, Any], lr: float = 0.05) -> None:
    state["step"] = step = state.get("step", 0) + 1
    mean = state.setdefault("mean", np.zeros_like(weights))
    square = state.setdefault("square", np.zeros_like(weights))
    mean += 0.1 * (gradient - mean)
    square += 0.001 * (gradient**2 - square)
    weights -= lr * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)


RULES = [sgd, partial(sgd, lr=0.2), momentum, adam]


def model(seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {"first": draw.normal(size=(5, 7)) / 2, "bias": np.zeros(7), "last": draw.normal(size=(7, 1)) / 3}


def batch(step: int, rank: int) -> tuple[Any, Any]:
    draw = np.random.default_rng((step, rank))
    x = draw.normal(size=(BATCH, 5))
    return x, np.sin(x.sum(1, keepdims=True))


def union(step: int) -> tuple[Any, Any]:
    every = [batch(step, rank) for rank in range(WORKERS)]
    return np.concatenate([x for x, _ in every]), np.concatenate([y for _, y in every])


def backward(weights: dict[str, Any], x: Any, y: Any, told: Callable[[str, Any], None]) -> None:
    """Gradients of the mean squared error, told as they are made, in memory that is used again."""
    hidden = np.tanh(x @ weights["first"] + weights["bias"])
    error = (hidden @ weights["last"] - y) / len(x)
    scratch = hidden.T @ error
    told("last", scratch)
    scratch[:] = np.nan
    back = error @ weights["last"].T * (1 - hidden**2)
    told("bias", back.sum(0))
    told("first", x.T @ back)


def rate(step: int) -> float:
    return 0.1 / (1 + step)


def trained_alone(rule: Any, steps: int = STEPS) -> dict[str, Any]:
    """One worker on the union of the batches, by the rule alone."""
    weights, states = model(), {name: {} for name in model()}  # type: ignore[var-annotated]
    for step in range(steps):
        found: dict[str, Any] = {}
        backward(weights, *union(step), lambda name, array, found=found: found.update({name: array.copy()}))  # type: ignore[misc]
        for name, array in weights.items():
            rule(array.reshape(-1), found[name].reshape(-1), states[name], lr=rate(step))
    return weights


def train(session: Session, rule: Any = momentum) -> Any:
    handed = adapt(session, model(session.index), copy.copy(rule), OPTIONS)
    if handed is None:
        return None
    weights, optimizer = handed.result
    for step in range(STEPS):
        advance(session, weights, optimizer, step)
    return {name: array.copy() for name, array in weights.items()}


def advance(session: Session, weights: Any, optimizer: Any, step: int) -> None:
    optimizer.lr = rate(step)
    backward(weights, *batch(step, session.rank), optimizer.produced)
    optimizer.step()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strategy", REDUCED + SERVED)
def test_workers_train_as_one_on_the_union_of_their_batches(group: Any, strategy: str, rule: Any) -> None:
    """From rank 0's weights, with a learning rate that changes; all have the same weights bit for bit."""
    wanted, found = trained_alone(rule), group(strategy, WORKERS, partial(train, rule=rule))[:WORKERS]
    for name, array in wanted.items():
        np.testing.assert_allclose(found[0][name], array, rtol=1e-9, atol=1e-12, err_msg=name)
        assert all(np.array_equal(one[name], found[0][name]) for one in found)


def test_one_worker_needs_nobody(group: Any) -> None:
    (found,) = group("ring", 1, lambda session: (train(session), train(session, sgd)))
    for name in model():
        assert not np.array_equal(found[0][name], found[1][name])
        assert not np.array_equal(found[0][name], model()[name])


@pytest.mark.parametrize("strategy", ["ring schedule=wait_free", "ps(servers=1, update=worker) schedule=wait_free"])
def test_buckets_arrive_while_backward_goes_on(group: Any, strategy: str) -> None:
    """The mean of the last layer is there before any other gradient has been told of."""

    def body(session: Session) -> Any:
        handed = adapt(session, model(), sgd, OPTIONS)
        if handed is None:
            return
        _, optimizer = handed.result
        optimizer.produced("last", np.full((7, 1), float(session.rank)))
        made = optimizer._model
        session.engine.wait(made.trained._works[BucketPhase(0, 0, "allreduce")])
        assert (made.gradients.tensors[2] == 0.5).all()
        optimizer.step({"first": np.zeros((5, 7)), "bias": np.zeros(7)})

    group(strategy, 2, body)


def test_gradients_may_come_in_any_order(group: Any) -> None:
    def body(session: Session) -> Any:
        handed = adapt(session, model(), momentum, OPTIONS)
        assert handed is not None
        weights, optimizer = handed.result
        for step in range(STEPS):
            found: dict[str, Any] = {}
            backward(weights, *batch(step, session.rank), lambda name, array: found.update({name: array.copy()}))  # noqa: B023
            optimizer.lr = rate(step)
            names = list(found)[:: 1 if session.rank else -1]
            optimizer.produced(names[0], found.pop(names[0]))
            optimizer.step(found)
        return weights

    wanted = trained_alone(momentum)
    for found in group("ring schedule=wait_free", WORKERS, body):
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-9)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda o: [o.produced("bias", np.ones(7)) for _ in range(2)], "gradient of 'bias' was given twice"),
        (lambda o: o.produced("other", np.ones(7)), "'other', which the model does not have"),
        (lambda o: o.produced("bias", np.ones((7, 1))), r"'bias' of shape \(7, 1\) for weights of shape \(7,\)"),
        (lambda o: o.produced("bias", [1.0] * 7), "the gradient of 'bias' is list"),
        (lambda o: (o.produced("bias", np.ones(7)), o.step()), r"step\(\) without the gradients of 'first', 'last'"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_that_are_none_are_named(group: Any, workers: int, call: Callable[[Any], object], says: str) -> None:
    def body(session: Session) -> None:
        handed = adapt(session, model(), sgd, OPTIONS)
        assert handed is not None
        if session.rank == workers - 1:
            call(handed.result[1])
        else:
            optimizer = handed.result[1]
            backward(handed.result[0], *batch(0, 0), optimizer.produced)
            optimizer.step()

    with pytest.raises((GradientError, UsageError), match=says):
        group("ring", workers, body)


def test_nothing_else_is_called_in_the_middle_of_a_step(group: Any) -> None:
    def body(session: Session) -> None:
        handed = adapt(session, model(), sgd, OPTIONS)
        assert handed is not None
        handed.result[1].produced("bias", np.ones(7))
        handed.result[1].state_dict()

    with pytest.raises(GradientError, match=r"state_dict\(\) in the middle of a step, after some of its gradients"):
        group("ring", 2, body)


def wants_more(weights: Any, gradient: Any, state: Any, lr: float) -> None:
    """No rule: nothing says what lr is."""


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (wants_more, "wants_more must have the form update.weights, gradient, state., with defaults"),
        (lambda *_, lr: lr, "<lambda> must have the form update"),
        (partial(sgd, lr=np.ones(2)), "the optimizer's 'lr' is ndarray"),
        (3, r"needs an optimizer with update\(weights, gradient, state\), or a function"),
    ],
)
def test_rules_that_are_none_are_refused(group: Any, rule: Any, says: str) -> None:
    def body(session: Session) -> None:
        with pytest.raises(UsageError, match=says):
            adapt(session, model(), rule, OPTIONS)

    group("ring", 2, body)


@pytest.mark.parametrize("schedule", ["delayed", "merged"])
def test_schedules_that_nothing_shows_the_times_for_are_refused(group: Any, schedule: str) -> None:
    with pytest.raises(
        UsageError, match=rf"schedule={schedule} .* does not support with NumPy yet: use schedule=fixed"
    ):
        group(f"ring schedule={schedule}", 2, train)


# Checkpoints.


def resumed(session: Session, state: bytes, *, until: int) -> Any:
    """Train on from a state, whatever the model began with."""
    handed = adapt(session, model(session.index + 5), adam, OPTIONS)
    if handed is None:
        return None
    weights, optimizer = handed.result
    optimizer.load_state_dict(pickle.loads(state))
    begun = pickle.loads(state)["steps"]
    for step in range(begun, until):
        advance(session, weights, optimizer, step)
    return pickle.dumps(optimizer.state_dict()), {name: array.copy() for name, array in weights.items()}


PERIODIC = ["ring sync=local(steps=3)", "ring sync=diloco(steps=3) codec=int8", "ring sync=easgd(steps=3)"]
PERIODIC += ["tree sync=post_local(after=3, steps=3)", "ring sync=gossip(graph=exponential, steps=3)"]
EVERY = [*REDUCED, *SERVED, *CODECS, *PERIODIC, "ring codec=randomk(ratio=0.3)"]


@pytest.mark.parametrize("strategy", EVERY)
def test_a_run_that_is_resumed_goes_on_with_the_same_bits(group: Any, strategy: str) -> None:
    (state, _), *_ = group(strategy, WORKERS, partial(trained, until=4))[:WORKERS]
    through = group(strategy, WORKERS, partial(trained, until=STEPS))[:WORKERS]
    again = group(strategy, WORKERS, partial(resumed, state=state, until=STEPS))[:WORKERS]
    for (_, wanted), (_, found) in zip(through, again, strict=True):
        assert all(np.array_equal(found[name], array) for name, array in wanted.items())
    assert "torch" not in str({type(value) for value in pickle.loads(state).values()})


def trained(session: Session, until: int) -> Any:
    """From the weights of ``model()``."""
    handed = adapt(session, model(), adam, OPTIONS)
    if handed is None:
        return None
    weights, optimizer = handed.result
    for step in range(until):
        advance(session, weights, optimizer, step)
    return pickle.dumps(optimizer.state_dict()), {name: array.copy() for name, array in weights.items()}


@pytest.mark.parametrize("strategy", [*REDUCED, *SERVED[:-1], "ps(servers=1, on=workers)"])
@pytest.mark.parametrize("before", [1, 2, 4])
def test_a_checkpoint_of_other_numbers_of_workers_resumes(group: Any, strategy: str, before: int) -> None:
    """With the mathematics of those that go on from it: states of the rules are the same for all."""

    def begin(session: Session) -> Any:
        """Every worker has the same batches, so that their number does not matter."""
        handed = adapt(session, model(), adam, OPTIONS)
        if handed is None:
            return None
        weights, optimizer = handed.result
        for step in range(3):
            optimizer.lr = rate(step)
            backward(weights, *union(step), optimizer.produced)
            optimizer.step()
        return pickle.dumps(optimizer.state_dict())

    state = group(strategy, before, begin)[0]
    wanted = trained_alone(adam)
    for _, found in group(strategy, WORKERS, partial(resumed, state=state, until=STEPS))[:WORKERS]:
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", [*CODECS, *PERIODIC])
def test_what_workers_had_of_their_own_is_shared_out(group: Any, strategy: str) -> None:
    """Under other numbers of workers too; replicas stay equal where the mode leaves them so."""
    (state, _), *_ = group(strategy, WORKERS, partial(trained, until=4))[:WORKERS]
    found = group(strategy, 2, partial(resumed, state=state, until=9))[:2]
    if "easgd" not in strategy and "gossip" not in strategy:
        assert all(np.array_equal(array, found[1][1][name]) for name, array in found[0][1].items())
    kept = pickle.loads(state)
    assert any(name in kept for name in ("codec", "agreed"))
    assert found[0][0] != state


@pytest.mark.parametrize("sync", ["asp", "ssp(staleness=2)"])
@pytest.mark.parametrize("place", ["ps(servers=2)", "ps(servers=1, on=workers)"])
def test_pushes_by_themselves_resume(group: Any, place: str, sync: str) -> None:
    """All that was pushed before and after is in the weights."""

    def body(session: Session, states: list[bytes]) -> Any:
        handed = adapt(session, {"w": np.ones(9)}, partial(sgd, lr=0.25), OPTIONS)
        if handed is None:
            return None
        weights, optimizer = handed.result
        if states:
            optimizer.load_state_dict(pickle.loads(states[0]))
        for step in range(4):
            optimizer.step({"w": np.full(9, 1.0 + step)})
        state = optimizer.state_dict()
        return pickle.dumps(state), weights["w"].copy()

    state, first = group(f"{place} sync={sync}", 2, partial(body, states=[]))[0]
    np.testing.assert_allclose(first, 1 - 0.25 * 10)
    for _, found in group(f"{place} sync={sync}", 2, partial(body, states=[state]))[:2]:
        np.testing.assert_allclose(found, 1 - 0.5 * 10)


def test_a_state_of_something_else_is_refused(group: Any) -> None:
    ((state, _),) = group("ring", 1, partial(trained, until=1))
    of_ring = pickle.loads(state)

    def body(session: Session) -> None:
        handed = adapt(session, model(), sgd, OPTIONS)
        assert handed is not None
        with pytest.raises(UsageError, match="this state belongs to a run with 'tree"):
            handed.result[1].load_state_dict(of_ring | {"strategy": "tree"})
        mine = of_ring | {"strategy": str(session.strategy)}
        with pytest.raises(UsageError, match="belongs to another model, with 'bias'"):
            handed.result[1].load_state_dict(mine | {"weights": {"bias": np.zeros(7)}})
        with pytest.raises(
            UsageError, match=r"its 'bias' is float64 of shape \(6,\), but this model's is float64 of shape \(7,\)"
        ):
            handed.result[1].load_state_dict(mine | {"weights": mine["weights"] | {"bias": np.zeros(6)}})

    group("ring", 2, body)


def test_a_codec_that_was_chosen_is_taken_up_and_one_without_its_state_warns(group: Any) -> None:
    (state, _), *_ = group("ring codec=topk(ratio=0.3)", 2, partial(trained, until=2))

    def body(session: Session) -> Any:
        session.chose_codec = True
        handed = adapt(session, model(), adam, OPTIONS)
        assert handed is not None
        handed.result[1].load_state_dict(pickle.loads(state))
        known = pickle.loads(pickle.dumps(handed.result[1].state_dict()))
        del known["codec"]
        if session.rank == 0:  # whose warning is caught is not known between threads
            with pytest.warns(UserWarning, match=r"lacks the residuals of the codec in '.* codec=feedback\(topk"):
                handed.result[1].load_state_dict(known)
        session.barrier()
        if session.rank == 1:
            with pytest.warns(UserWarning, match="lacks the residuals"):
                handed.result[1].load_state_dict(known)
        return str(session.strategy), str(handed.result[1]._model.exchange.compression._codec)

    for strategy, codec in group("ring codec=int8", 2, body):
        assert "codec=feedback(topk(ratio=0.3))" in strategy
        assert codec == "Feedback(codec=TopK(ratio=0.3), warmup=0)"


# What is seen of a run.


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
        assert any(label.startswith("bucket 0 (") and "last" in label for label in labels)
