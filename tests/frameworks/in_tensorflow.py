"""The toy problem in TensorFlow, by an optimizer of Keras, in a process of its own: each step is one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from matrix import PART, SHAPES, SQUARES, TINY, Arrays, Run, rate, start

import syncline
import syncline.tensorflow

tf.config.threading.set_intra_op_parallelism_threads(1)


class Rate(keras.optimizers.schedules.LearningRateSchedule):
    """The rate of each step."""

    def __init__(self, rule: str) -> None:
        self._rule = rule

    def __call__(self, step: Any) -> Any:
        return rate(self._rule, tf.cast(step, "float64"))

    def get_config(self) -> dict[str, Any]:
        return {"rule": self._rule}


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(rate("sgd", 0)),
    "momentum": lambda: keras.optimizers.SGD(rate("momentum", 0), momentum=PART),
    "adam": lambda: keras.optimizers.Adam(Rate("adam"), beta_1=PART, beta_2=SQUARES, epsilon=TINY),
}


class Trainer:
    def __init__(self, variables: list[Any], optimizer: Any) -> None:
        self.rank, self._variables = syncline.rank(), variables
        syncline.tensorflow.prepare(variables, optimizer)

        @tf.function
        def step(pushed: Any, pull: Any) -> None:
            with tf.GradientTape() as tape:
                parts = zip(variables, pushed, strict=True)
                loss = tf.add_n([tf.reduce_sum(one * told) + pull / 2 * tf.reduce_sum(one**2) for one, told in parts])
            optimizer.apply(tape.gradient(loss, variables), variables)

        self._step = step

    def step(self, number: int, pushed: Arrays, pull: float) -> None:  # noqa: ARG002 - the optimizer counts them
        kind = self._variables[0].dtype
        told = [tf.constant(array, kind) for array in pushed.values()]
        self._step(told, tf.constant(pull, kind))

    def weights(self) -> Arrays:
        return {name: one.numpy().reshape(SHAPES[name]) for name, one in zip(SHAPES, self._variables, strict=True)}

    def consolidate(self) -> None:
        syncline.consolidate()

    def state(self) -> Any:
        return syncline.tensorflow.state_dict(self._variables)

    def load(self, states: Sequence[Any]) -> None:
        syncline.tensorflow.load_state_dict(self._variables, states[0])

    def close(self) -> None:
        """The session forgets it by itself."""


def begin(_: Any, run: Run) -> Trainer:
    """From weights that are rank 0's, whatever this one's were."""
    keras.config.set_floatx(run.dtype)
    arrays = [array.astype(run.dtype) for array in start(syncline.rank()).values()]
    variables = [tf.Variable(array) for array in arrays]
    return Trainer(variables, OPTIMIZERS[run.rule]())
