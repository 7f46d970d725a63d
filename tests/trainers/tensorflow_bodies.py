"""What ranks of TensorFlow do, by name, in processes of ``array_ranks``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from array_bodies import BATCH, Place, batch, joined, train_all

import syncline
import syncline.errors
import syncline.tensorflow

tf.config.threading.set_intra_op_parallelism_threads(1)

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.7)),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "adamw": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1),
}

train_matrix = partial(train_all, "tensorflow")


def model(seed: int = 0, dtype: str = "float64") -> Any:
    """In double precision, Keras' own variables too."""
    keras.config.set_floatx(dtype)
    draw = np.random.default_rng(seed)
    layers = [keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(1)]
    made = keras.Sequential([keras.Input((5,)), *layers])
    made.set_weights([draw.normal(size=one.shape) / 2 for one in made.weights])
    return made


def loss_of(made: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean((made(x, training=True) - y) ** 2)


def looped(made: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
    """A step as TensorFlow's guide writes it."""

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(made, x, y)
        gradients = tape.gradient(loss, made.trainable_variables)
        optimizer.apply_gradients(zip(gradients, made.trainable_variables, strict=True))

    return step


def advance(made: Any, optimizer: Any, way: str, first: int, last: int, rank: int, workers: int) -> None:
    """Some steps, by ``fit``, which may be eager, or by a loop."""
    if way == "loop":
        step = looped(made, optimizer)
        for number in range(first, last):
            step(*map(tf.constant, batch(number, rank, workers)))
        return
    x, y = (np.concatenate(of) for of in zip(*(batch(one, rank, workers) for one in range(first, last)), strict=True))
    made.fit(x, y, batch_size=BATCH // workers, shuffle=False, verbose=0)


def begin(optimizer: str, way: str) -> tuple[Any, Any]:
    """From weights that are rank 0's, whatever this one's were."""
    made, used = model(syncline.rank()), OPTIMIZERS[optimizer]()
    if way == "loop":
        return syncline.prepare(made, used)
    made.compile(used, "mse", run_eagerly=way == "eager", steps_per_execution=3 if way == "several" else 1)
    return syncline.prepare(made), used


def alone(optimizer: str, steps: int) -> list[Any]:
    """One worker without Syncline, on the union of the batches."""
    made, used = model(), OPTIMIZERS[optimizer]()
    advance(made, used, "loop", 0, steps, 0, 1)
    return made.get_weights()


def train(place: Place, cases: list[tuple[str, str, str]], steps: int) -> list[Any]:
    """What a worker has in the end under a strategy with an optimizer and a way, and, from rank 0, one alone."""
    optimizers = {optimizer for _, optimizer, _ in cases}
    wanted = {optimizer: alone(optimizer, steps) if place[0] == 0 else None for optimizer in optimizers}
    found = []
    for strategy, optimizer, way in cases:
        with joined(place, strategy):
            made, used = begin(optimizer, way)
            advance(made, used, way, 0, steps, syncline.rank(), syncline.world_size())
            found.append((made.get_weights(), int(used.iterations.numpy()), wanted[optimizer]))
    return found


def averaged(place: Place, steps: int) -> list[Any]:
    """Means for an optimizer of the script's, by a tape and by hand, that are clipped by their common norm."""
    found = []
    with joined(place, "ring"):
        for way in ("tape", "call", "alone"):
            made = model(0 if way == "alone" else syncline.rank())
            means = None if way == "alone" else syncline.tensorflow.average(made)
            step = _clipped(made, means, way)
            for number in range(steps):
                mine = (0, 1) if way == "alone" else (syncline.rank(), syncline.world_size())
                step(*map(tf.constant, batch(number, *mine)))
            found.append(made.get_weights())
            if means is not None:
                saved = syncline.tensorflow.state_dict(made)
                made.set_weights([one * 0 for one in made.get_weights()])
                syncline.tensorflow.load_state_dict(made, saved)
                assert all(map(np.array_equal, made.get_weights(), found[-1]))
    return found


def eager_means(place: Place, steps: int) -> list[list[Any]]:
    """Of gradients that are the rank and ten times the step, all asked for before any is looked at."""
    with joined(place, "ring"):
        variables = [tf.Variable(tf.zeros(size)) for size in (3, 4096)]
        means = syncline.tensorflow.average(variables)
        found = [
            means([tf.fill(one.shape, 10.0 * step + syncline.rank()) for one in variables]) for step in range(steps)
        ]
        return [[one.numpy() for one in each] for each in found]


def _clipped(made: Any, means: Any, way: str) -> Callable[[Any, Any], Any]:
    @tf.function
    def step(x: Any, y: Any) -> None:
        with means.tape() if way == "tape" else tf.GradientTape() as tape:
            loss = loss_of(made, x, y)
        gradients = tape.gradient(loss, [one.value for one in made.trainable_variables])
        clipped, _ = tf.clip_by_global_norm(means(gradients) if way == "call" else gradients, 0.3)
        for one, gradient in zip(made.trainable_variables, clipped, strict=True):
            one.assign_sub(0.2 * gradient)

    return step


def periodic(place: Place, strategies: list[str], steps: int) -> list[Any]:
    """The weights that workers go on with, and those that all have in the end, by ``fit`` and eager."""
    found = []
    for strategy in strategies:
        with joined(place, strategy):
            each = []
            for way in ("fit", "eager"):
                made, used = begin("momentum", way)
                advance(made, used, way, 0, steps, syncline.rank(), syncline.world_size())
                each.append(made.get_weights())
            syncline.consolidate()
            found.append((*each, made.get_weights()))
    return found
