"""A Keras optimizer on flat slices of weights, at their owners, and the test whether it supports slices.

An owner creates the optimizer from its configuration, for variables that are its slices. The learning rate, which
schedules and callbacks change, is sent with every push; all other settings stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...errors import UsageError
from ...nouns import Spec
from ...serving.records import State
from ...serving.shard import Groups, Holding
from .._computations import RATE
from .._flat import Array, OnHoldings
from .variables import Slots, assign, value

_REMEDY = "or ps(update=worker), ring or another allreduce"


class KerasSlices(OnHoldings):
    """An optimizer on the slices that this process owns.

    ``beside`` a worker it updates them without a graph, in the calling thread. A graph would need a thread of
    TensorFlow, and the only one may be executing the worker's step, which waits for this update.
    """

    def __init__(self, optimizer: Any, holdings: Sequence[Holding], *, beside: bool) -> None:
        super().__init__(holdings)
        self._variables = [_variable(held.weights, number) for number, held in enumerate(holdings)]
        self._optimizer = _fresh(optimizer, self._variables)
        self._slots = Slots(self._optimizer, self._variables)
        self._update = self._updated if beside else tf.function(self._updated, autograph=False)

    def apply(self, groups: Groups, scale: float) -> None:
        """Updates its own variables, because TensorFlow's memory is not the transport's."""
        assign(self._optimizer.learning_rate, np.array(groups[0][RATE]))
        for held, variable in zip(self._holdings, self._variables, strict=True):
            assign(variable, held.weights)
        gradients = [tf.constant(np.array(held.gradient)) for held in self._holdings]
        self._update(gradients, tf.constant(scale, tf.float64))
        for held, variable in zip(self._holdings, self._variables, strict=True):
            np.copyto(held.weights, value(variable))

    def _updated(self, gradients: Any, scale: Any) -> None:
        scaled = [one * tf.cast(scale, one.dtype) for one in gradients]
        self._optimizer.apply(scaled, self._variables)

    def state(self) -> list[State]:
        """By the names of ``Slots``."""
        return self._slots.read()

    def load(self, states: Sequence[State]) -> None:
        """Missing variables keep their present values."""
        self._slots.write(states)


def probe(optimizer: Any, variables: Sequence[Any], specs: Sequence[Spec]) -> bool:
    """Raise UsageError unless slices are updated like whole variables. Returns whether the optimizer has elementwise
    state.

    The test runs in float64 on small variables with the same numbers of dimensions. Each half of them has an optimizer
    of its own. One of the gradients is large, to trigger limits on norms.
    """
    _check_told(optimizer, variables)
    draw = np.random.default_rng(0)
    shapes = [tuple(min(length, 3) for length in spec.shape) for spec in specs]
    starts = [np.asarray(draw.standard_normal(shape)) for shape in shapes]
    whole, owners = [_variable(one, number) for number, one in enumerate(starts)], []
    for half in range(2):
        parts = [_variable(_half(one, half), number) for number, one in enumerate(starts)]
        owners.append((parts, _fresh(optimizer, parts)))
    alone = _fresh(optimizer, whole)
    for factor in (1.0, 1e4, 1.0):
        gradients = [np.asarray(factor * draw.standard_normal(shape)) for shape in shapes]
        alone.apply([tf.constant(one) for one in gradients], whole)
        for half, (parts, theirs) in enumerate(owners):
            theirs.apply([tf.constant(_half(one, half)) for one in gradients], parts)
    near = all(
        np.allclose(_half(value(one), half), value(parts[number]), rtol=1e-9, atol=1e-12)
        for half, (parts, _) in enumerate(owners)
        for number, one in enumerate(whole)
    )
    slots, kept = Slots(alone, whole), {id(one): one for one in alone.variables if len(one.shape)}
    if not near or not slots.elementwise.issuperset(kept):
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} gives other weights for slices of the variables than for all of"
            " them, and owners of the weights have slices: use one that treats every element by itself (SGD, Adam,"
            f" AdamW, ..., without clipnorm and global_clipnorm), {_REMEDY}"
        )
    return bool(kept)


def _check_told(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise UsageError for settings that are not sent to the owners of the weights."""
    what = ""
    if hasattr(optimizer, "inner_optimizer"):
        what = "scales the loss (LossScaleOptimizer)"
    elif int(optimizer.iterations):
        what = f"has made {int(optimizer.iterations)} steps already"
    elif optimizer.use_ema:
        what = "keeps means of weights (use_ema)"
    elif optimizer.gradient_accumulation_steps:
        what = "updates weights in some steps only (gradient_accumulation_steps)"
    elif any(vars(optimizer).get(f"_exclude_from_weight_decay{of}") for of in ("", "_pattern")):
        what = "excludes variables from weight decay"
    elif any(getattr(one, "constraint", None) is not None for one in variables):
        what = "is followed by constraints of variables"
    if what:
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} {what}, which owners of the weights do not support, because they"
            f" update slices: leave it out, {_REMEDY}"
        )


def _fresh(optimizer: Any, variables: Sequence[Any]) -> Any:
    """An optimizer of the same configuration for other variables. Its learning rate is a variable."""
    rate = float(np.asarray(optimizer.learning_rate))
    made = type(optimizer).from_config(optimizer.get_config() | {"learning_rate": rate})
    with keras.name_scope(made.name, caller=made):
        made.build(list(variables))
    return made


def _variable(array: Array, number: int) -> Any:
    return keras.Variable(np.array(array), dtype=str(array.dtype), name=f"slice_{number}")


def _half(array: Array, half: int) -> Array:
    flat = array.reshape(-1)
    middle = (flat.size + 1) // 2
    return flat[middle:] if half else flat[:middle]
