"""One toy problem that every framework trains under every strategy, in terms of NumPy, and what comes of it by hand.

A ``Run`` says how it is trained; a framework's module (``in_numpy``, ``in_torch``, ``in_jax``, ``in_tensorflow``)
begins a ``Trainer`` for it, whose loss has the gradient that ``pushed`` tells. ``cells`` has runs made, ``test_matrix``
has the laws. Nothing here knows a framework.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from syncline.nouns import Group
from syncline.strategy.strategy import Strategy

Arrays = dict[str, Any]
Flat = Any
SHAPES = {"first": (5, 7), "bias": (7,), "last": (7, 1), "scale": ()}
WORKERS, STEPS = 3, 6


def start(rank: int = 0) -> Arrays:
    """What a rank begins with; a training begins with rank 0's."""
    draw = np.random.default_rng(rank)
    return {name: np.asarray(draw.normal(size=shape)) for name, shape in SHAPES.items()}


def flat(arrays: Arrays) -> Flat:
    """All elements, in the order of ``SHAPES``."""
    assert {name: array.shape for name, array in arrays.items()} == SHAPES
    return np.concatenate([np.ravel(arrays[name]) for name in SHAPES])


def named(elements: Flat) -> Arrays:
    """The arrays with these elements."""
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])
    parts = zip(SHAPES.items(), np.split(elements, ends[:-1]), strict=True)
    return {name: part.reshape(shape) for (name, shape), part in parts}


# Gradients and rules.

Push = Literal["own", "alike", "constant"]
"""Workers' gradients: of each its own, the same on all, or the same and whatever the weights are."""


def pushed(run: Run, number: int, rank: int) -> tuple[Arrays, float]:
    """A loss of ``sum(weights * these) + this / 2 * sum(weights ** 2)`` has the gradient ``these + this * weights``."""
    if run.push == "constant":
        return named(np.full(flat(start()).size, 1.0 + number)), 0.0
    return named(np.sin(flat(start(7)) + number + 10 * rank * (run.push == "own"))), 0.25


def rate(rule: str, number: Any) -> Any:
    """The learning rate of a step: one that changes, where all frameworks have the same formulas for that."""
    return 0.25 / (1 + number) if rule == "adam" else 0.1


PART, SQUARES = 1 - 2**-3, 1 - 2**-10
"""What momentum and Adam keep. Keras has them in single precision, so they are numbers that this holds exactly."""
TINY = 1e-15
"""Added to Adam's root, where frameworks add it differently."""


def sgd(weights: Any, gradient: Any, state: dict[str, Any], *, lr: float = 0.1) -> None:  # noqa: ARG001
    weights -= weights.dtype.type(lr) * gradient


def momentum(weights: Any, gradient: Any, state: dict[str, Any], *, lr: float = 0.1, part: float = PART) -> None:
    velocity = state.setdefault("velocity", np.zeros_like(weights))
    velocity *= part
    velocity += gradient
    weights -= weights.dtype.type(lr) * velocity


def adam(weights: Any, gradient: Any, state: dict[str, Any], lr: float = 0.1) -> None:
    state["step"] = step = state.get("step", 0) + 1
    mean = state.setdefault("mean", np.zeros_like(weights))
    square = state.setdefault("square", np.zeros_like(weights))
    mean += weights.dtype.type(1 - PART) * (gradient - mean)
    square += weights.dtype.type(1 - SQUARES) * (gradient**2 - square)
    root = np.sqrt(square / (1 - SQUARES**step)) + TINY
    weights -= weights.dtype.type(lr / (1 - PART**step)) * mean / root


RULES: dict[str, Callable[..., None]] = {"sgd": sgd, "momentum": momentum, "adam": adam}


# A run.


@dataclass(frozen=True)
class Run:
    """How to train: up to step ``last``, from the beginning, or from the state that another run has ``saved``.

    After so many steps its state is saved, of which nothing else follows. ``given_up`` steps are made before a state is
    loaded; ``again`` tells runs apart that are otherwise the same.
    """

    strategy: str
    rule: str = "adam"
    workers: int = WORKERS
    last: int = STEPS
    push: Push = "own"
    dtype: str = "float64"
    saved: int = 0
    after: Run | None = None
    given_up: int = 0
    again: int = 0

    @property
    def processes(self) -> int:
        """Workers and servers."""
        return self.workers + Strategy.parse(self.strategy).resolve(Group(self.workers)).servers

    @property
    def depth(self) -> int:
        """The number of runs before it."""
        return 0 if self.after is None else 1 + self.after.depth


@dataclass
class Result:
    """What a worker has: weights as it begins, in the end, and when all are brought together; and what it has saved."""

    begun: Flat = None
    weights: Flat = None
    together: Flat = None
    saved: tuple[Flat, Any] | None = None


class Trainer(Protocol):
    """A prepared model of a framework."""

    rank: int

    def step(self, number: int, pushed: Arrays, pull: float) -> None:
        """Train by the gradient of ``pushed``."""
        ...

    def weights(self) -> Arrays: ...

    def consolidate(self) -> None: ...

    def state(self) -> Any: ...

    def load(self, states: Sequence[Any]) -> None:
        """``states`` are those of all workers that have saved one."""
        ...

    def close(self) -> None: ...


def trained(framework: str, place: Any, run: Run, states: Sequence[Any]) -> Result | None:
    """Be a process of a run; None on a server."""
    begin: Callable[[Any, Run], Trainer | None] = importlib.import_module(f"in_{framework}").begin
    made = begin(place, run)
    if made is None:
        return None
    result = Result()
    try:
        for number in range(100, 100 + run.given_up):
            made.step(number, *pushed(run, number, made.rank))
        if run.after is not None:
            made.load(states)
        result.begun = flat(made.weights())
        for number in range(0 if run.after is None else run.after.saved, run.last):
            made.step(number, *pushed(run, number, made.rank))
            if number + 1 == run.saved:
                result.saved = flat(made.weights()), made.state()
        result.weights = flat(made.weights())
        made.consolidate()
        result.together = flat(made.weights())
        return result
    finally:
        made.close()


# The same by hand.


Agree = Callable[[Any, Flat, dict[str, Any]], tuple[Any, Flat]]
"""From the weights of all workers, a row each, what all have agreed on, and a memory: the next of the first two."""


@dataclass(frozen=True)
class Mode:
    """So many steps ``together``; then all ``agree`` whenever ``period`` steps have been made."""

    together: int = 1 << 30
    agree: Agree = lambda rows, agreed, _: (rows, agreed)
    period: int = 1


def by_hand(run: Run, mode: Mode = Mode()) -> tuple[Any, Flat]:
    """The weights of all workers, a row each, and what they have agreed on last."""
    agreed, update = flat(start()), RULES[run.rule]
    rows, memory = np.tile(agreed, (run.workers, 1)), {}  # type: ignore[var-annotated]
    states: list[dict[str, Any]] = [{} for _ in rows]
    for number in range(run.last):
        told = [pushed(run, number, rank) for rank in range(run.workers)]
        each = [flat(arrays) + pull * row for row, (arrays, pull) in zip(rows, told, strict=True)]
        if number < mode.together:
            each = [np.mean(each, axis=0)] * run.workers
        for row, gradient, state in zip(rows, each, states, strict=True):
            update(row, gradient, state, lr=rate(run.rule, number))
        if number < mode.together:
            agreed = rows[0].copy()
        elif (number - mode.together) % mode.period == mode.period - 1:
            rows, agreed = mode.agree(rows, agreed, memory)
    return rows, agreed
