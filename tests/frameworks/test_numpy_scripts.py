"""What scripts do with gradients, rules and optimizers under NumPy: the same whatever the number of workers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from syncline.errors import ClosedError, GradientError, MismatchError, ProtocolError, SynclineError, UsageError
from syncline.frameworks.numpy import adapt
from syncline.session.session import Session

OPTIONS = {"unused": "error", "weight": 1, "ignore": (), "broadcast_buffers": True}


def prepare(session: Session, arrays: Any, rule: Any) -> Any:
    handed = adapt(session, arrays, rule, OPTIONS)
    assert handed is not None
    return handed.result


def overwrites(weights: Any, gradient: Any, state: dict[str, Any]) -> None:
    """A rule with memory, which uses the gradient's as well."""
    velocity = state.setdefault("velocity", np.zeros_like(gradient))
    velocity *= 0.9
    gradient *= 0.1
    velocity += gradient
    weights -= velocity


class OfTheClass:
    """Attributes that are the class's until a script sets them, and one that it sets no more."""

    name, momentum, lr = "mine", 0.5, 0.25
    betas = (0.9, 0.99)

    def update(self, weights: Any, gradient: Any, state: Any) -> None:  # noqa: ARG002
        weights -= self.lr * gradient


class Slots:
    __slots__ = ("_hidden", "lr")

    def __init__(self) -> None:
        self.lr, self._hidden = 0.25, 1.0

    def update(self, weights: Any, gradient: Any, state: Any) -> None:  # noqa: ARG002
        weights -= self.lr * self._hidden * gradient


@dataclass
class Both(Slots, OfTheClass):
    """A slot hides what a class beside it has."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        Slots.__init__(self)


@dataclass(frozen=True)
class Frozen:
    lr: float = 0.25

    def update(self, weights: Any, gradient: Any, state: Any) -> None:  # noqa: ARG002
        weights -= self.lr * gradient


def read_only(values: Any) -> Any:
    values.flags.writeable = False
    return values


GRADIENTS: dict[str, Callable[[], Any]] = {
    "floats": lambda: np.arange(4, dtype=np.float32) / 3,
    "read-only": lambda: read_only(np.arange(4, dtype=np.float32) / 3),
    "doubles": lambda: np.arange(4.0) / 3,
    "halves": lambda: np.arange(4, dtype=np.float16) / 3,
    "for integers": lambda: np.arange(4),
}


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_one_worker_and_two_have_the_same_bits_and_leave_gradients_alone(group: Any, kind: str, told: bool) -> None:
    def body(session: Session) -> Any:
        weights, optimizer = prepare(session, {"a": np.ones(4, np.float32)}, overwrites)
        given = GRADIENTS[kind]()
        for _ in range(3):
            if told:
                optimizer.produced("a", given)
            optimizer.step({} if told else {"a": given})
        np.testing.assert_array_equal(given, GRADIENTS[kind]())
        state = optimizer.state_dict()["optimizer"]["a"]["velocity"]
        assert state.dtype == np.float32
        return weights["a"], state

    (one,), two = group("ring", 1, body), group("ring", 2, body)
    for found in two:
        np.testing.assert_array_equal(found, one)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", [complex, bool])
def test_gradients_that_are_no_real_numbers_are_refused(group: Any, workers: int, kind: Any) -> None:
    def body(session: Session) -> None:
        _, optimizer = prepare(session, {"a": np.ones(4)}, overwrites)
        optimizer.step({"a": np.ones(4, kind)})

    with pytest.raises(
        GradientError, match=r"the gradient of 'a' has type (complex128|bool), but its weights have float64"
    ):
        group("ring", workers, body)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_optimizer_can_be_copied(group: Any, workers: int) -> None:
    def body(session: Session) -> Any:
        weights, optimizer = prepare(session, {"a": np.ones(4)}, overwrites)
        copy.copy(optimizer).step({"a": np.ones(4)})
        assert not hasattr(optimizer, "_missing")
        return weights["a"]

    for found in group("ring", workers, body):
        np.testing.assert_allclose(found, 0.9)


@pytest.mark.parametrize("strategy", ["ring", "tree sync=local(steps=2)"])
def test_a_run_whose_rule_has_failed_says_so_again(group: Any, strategy: str) -> None:
    """A script that catches what its rule raises and goes on hears of that, and of no gradient given twice."""
    heard: list[BaseException] = []
    fails: list[threading.Thread] = []

    def rule(weights: Any, gradient: Any, state: Any) -> None:  # noqa: ARG001
        if threading.current_thread() in fails and weights.size == 3:
            raise FloatingPointError("mine")
        weights -= gradient

    def body(session: Session) -> None:
        _, optimizer = prepare(session, {"a": np.ones(4), "b": np.ones(3)}, rule)
        gradients = {"a": np.ones(4), "b": np.ones(3)}
        optimizer.step(gradients)
        if session.rank == 0:
            fails.append(threading.current_thread())
            with pytest.raises(FloatingPointError):
                optimizer.step(gradients)
            try:
                optimizer.step(gradients)
            except BaseException as error:
                heard.append(error)
                raise
        else:
            optimizer.step(gradients)
            optimizer.step(gradients)

    with pytest.raises(SynclineError):
        group(strategy, 2, body)
    assert [type(error) for error in heard] == [ClosedError]
    assert "interrupted by FloatingPointError" in str(heard[0])


def test_a_pass_that_was_given_up_is_dropped_with_the_state_that_is_loaded(group: Any) -> None:
    def alone(session: Session) -> None:
        weights, optimizer = prepare(session, {"a": np.ones(4), "b": np.ones(3)}, overwrites)
        state = optimizer.state_dict()
        optimizer.produced("b", np.full(3, 100.0))
        with pytest.raises(GradientError, match=r"twice: call step\(\) after each pass, or drop\(\)"):
            optimizer.produced("b", np.ones(3))
        optimizer.load_state_dict(state)
        optimizer.produced("b", np.ones(3))
        optimizer.step({"a": np.ones(4)})
        np.testing.assert_allclose(weights["b"], 0.9)

    def several(session: Session) -> None:
        _, optimizer = prepare(session, {"a": np.ones(4), "b": np.ones(3)}, overwrites)
        for _ in range(2):
            optimizer.produced("b", np.ones(3))

    group("ring", 1, alone)
    with pytest.raises(
        GradientError, match=r"in step \d: call step\(\) after each pass; .* call drop\(\).* restart the run"
    ):
        group("ring", 2, several)


DROPPING = ["ring schedule=fifo", "ring schedule=wait_free", "ps(servers=1, on=workers) schedule=fifo"]
DROPPING += ["ring sync=local(steps=2)", "ps(servers=1, on=workers) sync=asp(rate=own) schedule=fifo"]


@pytest.mark.parametrize("strategy", DROPPING)
def test_a_pass_that_was_given_up_can_be_dropped_while_no_bucket_has_gone(group: Any, strategy: str) -> None:
    """On one rank, in every step; under wait_free the last layer, which goes first, is not there yet."""

    def body(session: Session) -> Any:
        weights, optimizer = prepare(session, {"a": np.ones(4), "b": np.ones(3)}, overwrites)
        optimizer.drop()  # of nothing
        for _ in range(4):
            if session.rank == 0:
                for value in (np.nan, 5.0):
                    optimizer.produced("a", np.full(4, value))
                    optimizer.drop()
            optimizer.step({"a": np.ones(4), "b": np.ones(3)})
        for consolidate in session.consolidates.values():
            consolidate()
        return {name: array.copy() for name, array in weights.items()}

    (wanted,) = group("ring", 1, body)
    for found in group(strategy, 2, body):
        for name, array in found.items():
            assert np.isfinite(array).all()
            if "asp" not in strategy:
                np.testing.assert_allclose(array, wanted[name])


def test_a_pass_cannot_be_dropped_once_a_bucket_has_gone(group: Any) -> None:
    def body(session: Session) -> None:
        _, optimizer = prepare(session, {"a": np.ones(4), "b": np.ones(3)}, overwrites)
        optimizer.produced("b", np.ones(3))
        if session.rank == 1:
            optimizer.drop()
        optimizer.step({"a": np.ones(4)})

    with pytest.raises(GradientError, match=r"rank 1.*: drop\(\) in step 0 after gradients were sent to the other"):
        group("ring schedule=wait_free", 2, body)


@dataclass
class Twin:
    lr: float = 0.25
    factor: float = 1.0

    def update(self, weights: Any, gradient: Any, state: Any) -> None:  # noqa: ARG002
        weights -= self.lr * self.factor * gradient


@dataclass
class Other(Twin):
    """Another name, and the same values."""


DIFFERENT = [
    (
        Twin(),
        Other(),
        r"rank 1.* updates with Other\.update\(factor=1\.0, lr=0\.25\), and rank 0.* with Twin\.update\(",
    ),
    (Twin(), Twin(lr=0.5), r"rank 1.* updates with Twin\.update\(factor=1\.0, lr=0\.5\), and rank 0.* lr=0\.25\)"),
    (overwrites, Twin(), r"rank 1.* updates with Twin\.update\(.*, and rank 0.* with overwrites\(\)"),
]


@pytest.mark.parametrize("strategy", ["ring", "ring sync=local(steps=2)", "ps(servers=1, on=workers)"])
@pytest.mark.parametrize(("one", "other", "says"), DIFFERENT)
def test_rules_that_differ_are_named_before_the_first_step(
    group: Any, strategy: str, one: Any, other: Any, says: str
) -> None:
    def body(session: Session) -> None:
        prepare(session, {"a": np.ones(4)}, other if session.rank == 1 else one)

    with pytest.raises(MismatchError, match=says):
        group(strategy, 2, body)


def test_a_server_with_another_rule_is_named(group: Any) -> None:
    def body(session: Session) -> None:
        adapt(session, {"a": np.ones(4)}, Twin() if session.is_worker else Other(), OPTIONS)

    with pytest.raises(MismatchError, match=r"updates with Other\.update.* and rank 0.* with Twin\.update"):
        group("ps(servers=1)", 2, body)


def test_values_that_part_in_a_later_step_are_named(group: Any) -> None:
    """Under an allreduce, where every worker updates by itself."""
    steps: list[int] = []

    def body(session: Session) -> None:
        _, optimizer = prepare(session, {"a": np.ones(4)}, Twin())
        for step in range(4):
            optimizer.lr = 0.5 / (step + 1 + (step == 2) * session.rank)
            optimizer.step({"a": np.ones(4)})
            steps.append(step)

    with pytest.raises(MismatchError, match=r"rank \d.* has other optimizer values in step 2 than rank \d.*lr=0\.1"):
        group("ring", 2, body)
    assert max(steps) == 1


OWNED = ["ring", "ps(servers=1)", "ps(servers=2, on=workers)"]


@pytest.mark.parametrize("strategy", OWNED)
@pytest.mark.parametrize("rule", [OfTheClass, Slots, Both, Frozen])
def test_owners_know_attributes_wherever_they_are(group: Any, strategy: str, rule: Any) -> None:
    """A learning rate that changes changes for them too."""

    def body(session: Session) -> Any:
        handed = adapt(session, {"a": np.ones(4)}, rule(), OPTIONS)
        if handed is None:
            return None
        weights, optimizer = handed.result
        optimizer.step({"a": np.ones(4)})
        if rule is not Frozen:
            optimizer.lr = 0.5
        optimizer.step({"a": np.ones(4)})
        return weights["a"]

    for found in group(strategy, 2, body)[:2]:
        np.testing.assert_allclose(found, 0.5 if rule is Frozen else 0.25)


def test_attributes_that_owners_do_not_know_are_named(group: Any) -> None:
    def body(session: Session) -> None:
        weights, optimizer = prepare(session, {"a": np.ones(4)}, OfTheClass())
        optimizer.decay = 0.5
        optimizer.step({"a": np.ones(4)})
        del weights

    with pytest.raises(
        UsageError, match=r"the optimizer's 'decay' were added or removed after prepare.* before prepare\(\)"
    ):
        group("ps(servers=2, on=workers)", 2, body)


def test_a_rule_that_fails_at_an_owner_is_the_fault_of_no_rank(group: Any) -> None:
    def fails(weights: Any, gradient: Any, state: Any, *, lr: float = 0.1) -> None:  # noqa: ARG001
        if lr > 1:
            raise FloatingPointError("mine")

    def body(session: Session) -> None:
        handed = adapt(session, {"a": np.ones(4)}, fails, OPTIONS)
        if handed is not None:
            handed.result[1].lr = 2.0
            handed.result[1].step({"a": np.ones(4)})

    with pytest.raises(ProtocolError, match=r"all workers have pushed fails \(FloatingPointError: mine\)") as caught:
        group("ps(servers=2, on=workers)", 2, body)
    assert caught.value.rank == -1


def with_rates_of_their_own(session: Session) -> Any:
    weights, optimizer = prepare(session, {"a": np.ones(4)}, OfTheClass())
    optimizer.lr = 0.25 * (1 + session.rank)
    optimizer.step({"a": np.ones(4)})
    return weights["a"]


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=2, on=workers)"])
def test_values_that_differ_are_refused(group: Any, strategy: str) -> None:
    with pytest.raises(MismatchError):
        group(strategy, 2, with_rates_of_their_own)
