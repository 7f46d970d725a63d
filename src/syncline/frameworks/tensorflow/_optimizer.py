"""An optimizer of Keras whose ``apply`` exchanges: what ``fit`` calls, and loops that a script has written.

The optimizer stays the script's object, with its class and its state; only this call is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ...errors import UsageError
from ._matching import Matching
from ._run import Run
from ._slots import innermost
from ._variables import resource


def check_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise UsageError for what is no optimizer of Keras, or one of other variables; it is built here if it is not."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"the optimizer is {type(optimizer).__name__}: give one of Keras, as keras.optimizers.Adam(1e-3), or keep"
            " your own and say syncline.tensorflow.average(model)"
        )
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
    built = {id(resource(one)) for one in innermost(optimizer)._trainable_variables}
    if built != {id(resource(one)) for one in variables}:
        raise UsageError(
            "the optimizer was built for other variables than those of the model that are trainable now: freeze layers"
            " before compile() and prepare(), and give each model an optimizer of its own"
        )


def exchange_in(optimizer: Any, run: Run) -> None:
    """Let the optimizer's ``apply`` exchange, and then do what it did before, or what owners of the weights leave."""
    original = type(optimizer).apply.__get__(optimizer)

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        gradients = list(grads)
        if not gradients:
            return
        given = innermost(optimizer)._trainable_variables if trainable_variables is None else trainable_variables
        _apply(run, optimizer, original, run.matched(gradients, list(given)))

    optimizer.apply = tf.autograph.experimental.do_not_convert(apply)


def match_in(optimizer: Any, matching: Matching) -> None:
    """Let the ``apply`` of one worker's optimizer ask of gradients what those of several workers do."""
    original = type(optimizer).apply.__get__(optimizer)

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        if gradients := list(grads):
            given = innermost(optimizer)._trainable_variables if trainable_variables is None else trainable_variables
            original(matching.matched(gradients, list(given)), matching.variables)

    optimizer.apply = tf.autograph.experimental.do_not_convert(apply)


def _apply(run: Run, optimizer: Any, original: Callable[..., None], gradients: Sequence[Any]) -> None:
    if run.held:
        rate = tf.cast(tf.convert_to_tensor(optimizer.learning_rate), tf.float64)
        for variable, weights in zip(run.variables, run.exchange(gradients, rate), strict=True):
            resource(variable).assign(weights)
        innermost(optimizer)._iterations.assign_add(1)
        return
    if run.periodic:
        run.train(gradients, lambda those: original(those, run.variables))
        return
    run.apply(gradients, lambda means: original(means, run.variables), lent=_keeps_none(optimizer, run.variables))


def _keeps_none(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Whether no variable becomes a gradient itself, whose memory it would keep: none of Keras' own optimizers does."""
    of_keras = all(type(one).__module__.startswith("keras.src.") for one in (optimizer, innermost(optimizer)))
    return of_keras and not any(getattr(one, "overwrite_with_gradient", False) for one in variables)
