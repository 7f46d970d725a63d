"""Trains elastically with a framework of arrays, and loses workers: the script of ``test_elastic_arrays``.

Its arguments: the framework, the strategy, a folder, the workers that kill themselves (NUMBER:STEP,...), and the number
of the worker that must have joined before the training ends. The variable EPOCHS fixes the number of epochs instead.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import syncline

SAMPLES, BATCH, STEPS = 40, 12, 4  # parts of different sizes, as is the last batch of an epoch
MOST_EPOCHS = 500
PAUSE_S = 0.01
Step = Callable[[Any, int], None]


def problem() -> tuple[Any, Any]:
    """Data of a regression."""
    numbers = np.random.default_rng(1)
    return numbers.standard_normal((SAMPLES, 5)), numbers.standard_normal((SAMPLES, 2))


def start() -> dict[str, Any]:
    """The first weights."""
    numbers = np.random.default_rng(2)
    return {"first": numbers.standard_normal((5, 3)), "last": numbers.standard_normal((3, 2))}


def in_numpy() -> tuple[Step, Callable[[], list[Any]]]:
    """A step, and a call with the final weights."""
    x, y = problem()
    weights, optimizer = syncline.prepare(start(), Momentum(), weight="batch")

    def step(batch: Any, now: int) -> None:
        hidden = np.tanh(x[batch] @ weights["first"])
        error = 2 * (hidden @ weights["last"] - y[batch]) / len(batch)
        optimizer.produced("last", hidden.T @ error)
        die(1, now)
        back = (error @ weights["last"].T) * (1 - hidden**2)
        optimizer.step({"first": x[batch].T @ back})
        optimizer.lr *= 0.999

    return step, lambda: [one.tolist() for one in weights.values()]


def in_jax() -> tuple[Step, Callable[[], list[Any]]]:
    """A compiled step in float32, whose values the script keeps."""
    import jax
    import optax

    import syncline.jax

    x, y = (array.astype(np.float32) for array in problem())
    params = jax.tree.map(lambda array: jax.numpy.array(array, np.float32), start())
    params = syncline.jax.broadcast(params)
    optimizer = syncline.jax.distributed(optax.adam(optax.exponential_decay(0.1, 1, 0.999)), weight="batch")
    kept = syncline.jax.keep((params, optimizer.init(params)))

    def loss(params: Any, x: Any, y: Any) -> Any:
        return ((jax.numpy.tanh(x @ params["first"]) @ params["last"] - y) ** 2).mean()

    @jax.jit
    def learn(params: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    def step(batch: Any, now: int) -> None:
        found = learn(*kept.values, x[np.array(batch)], y[np.array(batch)])
        die(1, now)
        kept.update(found)

    return step, lambda: [np.asarray(one).tolist() for one in kept.values[0].values()]


def in_tensorflow() -> tuple[Step, Callable[[], list[Any]]]:
    """A step of Keras in a graph, with moving means of a BatchNorm, and a rate that the script lowers."""
    import keras
    import tensorflow as tf

    import syncline.tensorflow

    keras.utils.set_random_seed(3)
    x, y = (tf.constant(array, tf.float32) for array in problem())
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    )
    optimizer = keras.optimizers.Adam(0.05)
    syncline.tensorflow.prepare(model, optimizer, weight="batch")

    @tf.function
    def learn(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    def step(batch: Any, now: int) -> None:
        die(1, now)
        learn(tf.gather(x, batch), tf.gather(y, batch))
        optimizer.learning_rate.assign(optimizer.learning_rate * 0.999)

    return step, lambda: [one.numpy().tolist() for one in model.trainable_variables]


class Momentum:
    """Gradient descent with momentum, whose rate the script lowers."""

    def __init__(self) -> None:
        self.lr = 0.1

    def update(self, weights: Any, gradient: Any, state: dict[str, Any]) -> None:
        """A step."""
        state["velocity"] = 0.9 * state.get("velocity", np.zeros_like(weights)) + gradient
        weights -= self.lr * state["velocity"]


def die(place: int, step: int) -> None:
    """End this process at once if it is to die at this step, in the middle of it or before it."""
    if "EPOCHS" in os.environ:
        return
    number = syncline.stats().members[syncline.rank()]
    if place == number % 2 and f"{number}:{step}" in sys.argv[4].split(","):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train, and leave the weights in a file of the folder."""
    framework, strategy, folder, _, joined = sys.argv[1:]
    fixed = int(os.environ.get("EPOCHS", "0"))
    syncline.init(strategy)
    step, weights = {"numpy": in_numpy, "jax": in_jax, "tensorflow": in_tensorflow}[framework]()
    sampler = syncline.sampler(SAMPLES, global_batch=BATCH, seed=4)
    calls = 0

    def train() -> None:
        nonlocal calls
        calls += 1
        come = max(syncline.stats().members) >= int(joined)
        end = fixed or (sampler.epoch + 2 if come else MOST_EPOCHS)
        while sampler.epoch < end:
            for batch in sampler:
                now = sampler.epoch * STEPS + sampler.step
                die(0, now)
                step(batch, now)
                sampler.commit()
                time.sleep(0.0 if fixed else PAUSE_S)

    syncline.elastic(train)
    stats = syncline.stats()
    found = {
        "weights": weights(),
        "calls": calls,
        "members": stats.members,
        "repairs": stats.repairs,
        "epochs": sampler.epoch,
    }
    Path(folder, f"{stats.members[syncline.rank()]}.json").write_text(json.dumps(found))
    syncline.shutdown()


if __name__ == "__main__":
    main()
