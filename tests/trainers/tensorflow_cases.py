"""What models, layers and optimizers ask for beyond plain steps, and what is refused, for ranks of TensorFlow."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from array_bodies import BATCH, Place, batch, joined, said
from tensorflow_bodies import advance, begin, looped, loss_of, model

import syncline
import syncline.errors
import syncline.tensorflow
from syncline.process import process

STEPS = 4
keras.config.set_floatx("float64")


def _compiled(layers: list[Any], optimizer: Any, shape: tuple[int, ...] = (5,), **options: Any) -> Any:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(syncline.rank())
    made = keras.Sequential([keras.Input(shape), *layers])
    made.set_weights([np.random.default_rng(1).normal(size=one.shape) for one in made.weights])
    made.compile(optimizer, "mse", **options)
    return made


def _with(optimizer: Any, **options: Any) -> Any:
    return _compiled([keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(1)], optimizer, **options)


class Unused(keras.layers.Layer):
    """Has a variable that nothing depends on."""

    def build(self, _: Any) -> None:
        self.w = self.add_weight(shape=(3,))

    def call(self, x: Any) -> Any:
        return x


def _words() -> Any:
    words = keras.layers.Embedding(6, 3)
    layers = [keras.layers.Lambda(lambda x: tf.cast(tf.abs(x) * 2, tf.int32) % 6), words, keras.layers.Flatten()]
    return _compiled([*layers, keras.layers.Dense(1)], keras.optimizers.SGD(0.05))


LIKE_ONE: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "embedding": (_words, {}),
    "global_clipnorm": (lambda: _with(keras.optimizers.SGD(0.5, global_clipnorm=0.1)), {}),
    "clipnorm": (lambda: _with(keras.optimizers.Adam(0.05, clipnorm=0.1)), {}),
    "ema": (lambda: _with(keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3)), {}),
    "accumulated": (lambda: _with(keras.optimizers.Adam(0.05, gradient_accumulation_steps=2)), {}),
    "constraint": (
        lambda: _compiled([keras.layers.Dense(1, kernel_constraint="max_norm")], keras.optimizers.SGD(0.5)), {}
    ),
    "unused": (lambda: _compiled([Unused(), keras.layers.Dense(1)], keras.optimizers.SGD(0.1)), {"unused": "zeros"}),
}  # fmt: skip
"""Models, and options of ``prepare``, that train as on one worker."""


def like_one(place: Place, names: list[str]) -> list[Any]:
    """The weights of workers, and, from rank 0, of one alone."""
    found = []
    with joined(place, "ring"):
        for name in names:
            make, options = LIKE_ONE[name]
            single, made = make(), make()
            if syncline.rank() == 0:
                advance(single, None, "fit", 0, STEPS, 0, 1)
            made.set_weights([one * (1 + syncline.rank()) for one in made.get_weights()])
            syncline.prepare(made, **options)
            advance(made, None, "fit", 0, STEPS, syncline.rank(), syncline.world_size())
            found.append((made.get_weights(), single.get_weights()))
    return found


def _normed(**options: Any) -> Any:
    """A prepared model with moving means, after some steps."""
    layers = [keras.layers.Dense(7), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    made = _compiled(layers, keras.optimizers.SGD(0.1))
    syncline.prepare(made, **options)
    advance(made, None, "fit", 0, STEPS, syncline.rank(), syncline.world_size())
    return made


def alike(place: Place) -> dict[str, Any]:
    """What all workers have alike at the end: moving means, scales of losses, models that are prepared again."""
    found: dict[str, Any] = {}
    rank, workers = syncline_place(place)
    with joined(place, "ring"):
        found["moving means"] = _normed().get_weights()
        for name in ("mixed_float16", "mixed_bfloat16"):
            keras.config.set_floatx("float32")
            keras.config.set_dtype_policy(name)
            made = keras.Sequential([keras.Input((5,)), keras.layers.Dense(7), keras.layers.Dense(1)])
            keras.config.set_dtype_policy("float64")
            keras.config.set_floatx("float64")
            made.compile("sgd", "mse")
            syncline.prepare(made)
            advance(made, None, "fit", 0, STEPS, rank, workers)
            found[name] = [*made.get_weights(), *(one.numpy() for one in made.optimizer.variables)]
        made, used = begin("adam", "fit")
        advance(made, used, "fit", 0, 2, rank, workers)
        made.layers[0].trainable = False
        again = keras.optimizers.SGD(0.1)
        made.compile(again, "mse")
        syncline.prepare(made)
        advance(made, again, "fit", 2, 4, rank, workers)
        found["again"] = made.get_weights()
        made, used = model(rank), keras.optimizers.SGD(0.1)
        made.compile(used, "mse")
        advance(made, used, "fit", 0, 1, rank, workers)  # traces a step that exchanges nothing
        for count in (1, 2):
            syncline.prepare(made)
            advance(made, used, "fit", count, count + 1, rank, workers)
        found["fitted before"] = made.get_weights()
        made = _normed(broadcast_buffers=False)
        before = [one.numpy() for one in made.layers[1].non_trainable_variables]
        saved = syncline.tensorflow.state_dict(made)
        assert all(map(np.array_equal, before, [one.numpy() for one in made.layers[1].non_trainable_variables]))
        found["saved means"] = list(saved["untrained"].values())
        group = syncline.new_group([0, 1])
        made, used = syncline.tensorflow.prepare(model(syncline.rank()), keras.optimizers.SGD(0.1), group=group)
        advance(made, used, "loop", 0, 2, rank, workers)
        found["group"] = made.get_weights()
    with joined(place, "ring sync=local(steps=2)"):
        found["mean of moving means"] = _normed().get_weights()
    return found


def syncline_place(place: Place) -> tuple[int, int]:
    return place[0], place[1]


def few_threads(place: Place, threads: int) -> list[float]:
    """Two models in one graph, and steps in a loop of it, on so many threads and one core."""
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found = []
    one_model = "ps(servers=2, on=workers)"
    for strategy in ("ring schedule=fixed(bucket=1MiB)", "ring sync=local(steps=2)", one_model):
        with joined(place, strategy):
            models = [
                [tf.Variable(tf.ones((500, 300))) for _ in range(4)] for _ in range(1 if strategy == one_model else 2)
            ]
            optimizers = [keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.1)][: len(models)]
            for variables, optimizer in zip(models, optimizers, strict=True):
                syncline.tensorflow.prepare(variables, optimizer)

            def make(models: Any, optimizers: Any) -> Any:
                @tf.function
                def steps(factor: Any) -> None:
                    for _ in tf.range(3):  # gradients that wait for nothing
                        for variables, optimizer in zip(models, optimizers, strict=True):
                            optimizer.apply([factor * tf.ones((500, 300))] * 4, variables)

                return steps

            run = make(models, optimizers)
            for _ in range(2):
                run(tf.constant(1.0 + syncline.rank()))
            syncline.consolidate()
            found += [float(tf.reduce_sum(one)) for variables in models for one in variables]
    return found


def callbacks(place: Place, path: str, epochs: int, strategy: str) -> Any:
    """``fit`` with metrics of all, a checkpoint after every epoch, and a callback that ends early."""
    with joined(place, strategy):
        made, _ = begin("adam", "fit")
        keep, rank, workers = syncline.tensorflow.Checkpoint(path), syncline.rank(), syncline.world_size()
        x, y = (np.concatenate(of) for of in zip(*(batch(one, rank, workers) for one in range(4)), strict=True))
        first = keep.resume(made)
        stop = keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=2)
        fit = made.fit(
            x, y * (1 + rank), batch_size=BATCH // workers, shuffle=False, verbose=0, epochs=epochs,
            initial_epoch=first, callbacks=[syncline.tensorflow.MeanMetrics(), keep, stop],
        )  # fmt: skip
        return first, fit.epoch, fit.history["loss"], made.get_weights()
    return None


# What is refused.


def refused(place: Place, cases: list[tuple[str, str]]) -> list[str]:
    """What each call says."""
    return said(place, cases, REFUSED)


def _prepared(optimizer: Any = None) -> Any:
    return syncline.prepare(model(), optimizer or keras.optimizers.SGD(0.1))


def _scoped() -> None:
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        _prepared()


def _one_step(prepared_with: Any, **options: Any) -> None:
    made = _with(prepared_with, **options)
    syncline.prepare(made)
    advance(made, None, "fit", 0, 1, syncline.rank(), syncline.world_size())


def _compiled_anew() -> None:
    made, _ = begin("sgd", "fit")
    made.compile("sgd", "mse")
    advance(made, None, "fit", 0, 1, syncline.rank(), syncline.world_size())


def _compiled_by_xla() -> None:
    made, used = _prepared()
    step = tf.function(looped(made, used).python_function, jit_compile=True)
    step(*map(tf.constant, batch(0, syncline.rank(), 2)))


def _half_of_it() -> None:
    made, used = _prepared()
    used.apply([tf.zeros(one.shape, one.dtype) for one in made.trainable_variables[:2]], made.trainable_variables[:2])


def _of_another_shape() -> None:
    made, used = _prepared()
    used.apply([tf.zeros((2, *one.shape), one.dtype) for one in made.trainable_variables], made.trainable_variables)


def _of_another_model() -> None:
    syncline.tensorflow.load_state_dict(model(), {})


def _written() -> None:
    made = _with("sgd")
    syncline.prepare(made)
    advance(made, None, "fit", 0, 1, syncline.rank(), syncline.world_size())
    made.set_weights([one + 1 for one in made.get_weights()])
    advance(made, None, "fit", 1, 2, syncline.rank(), syncline.world_size())


def _elsewhere() -> None:
    variable = tf.Variable(tf.ones(3))
    place = "/job:localhost/replica:0/task:0/device:GPU:0"
    with mock.patch.object(type(variable), "device", new_callable=mock.PropertyMock, return_value=place):
        syncline.tensorflow.prepare([variable], keras.optimizers.SGD(0.1))


def _cut_file() -> None:
    made, _ = _prepared()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.npz"
        np.savez(path, tree=np.zeros(1000))
        path.write_bytes(path.read_bytes()[:500])
        syncline.tensorflow.Checkpoint(path).resume(made)


def _lasting_average() -> None:
    """As ``syncline.elastic`` asks."""
    syncline.tensorflow.average(model())
    (lasting,) = process.session.lasting
    lasting.check_lasting(process.session.strategy)


def _excluding() -> Any:
    made = keras.optimizers.AdamW(0.1)
    made.exclude_from_weight_decay(var_names=["bias"])
    return made


REFUSED: dict[str, Callable[[], Any]] = {
    "sgd": _prepared,
    "not built": lambda: syncline.prepare(keras.Sequential([keras.layers.Dense(1)]), keras.optimizers.SGD(0.1)),
    "not compiled": lambda: syncline.prepare(model()),
    "no optimizer": lambda: syncline.prepare(model(), tf.Module()),
    "another's optimizer": lambda: _prepared(_built()),
    "scope": _scoped,
    "frozen": lambda: syncline.tensorflow.prepare([], keras.optimizers.SGD(0.1)),
    "bfloat16": lambda: syncline.tensorflow.prepare([tf.Variable(tf.ones(3, tf.bfloat16))], keras.optimizers.SGD(0.1)),
    "integers": lambda: syncline.tensorflow.prepare([tf.Variable(tf.ones(3, tf.int32))], keras.optimizers.SGD(0.1)),
    "no model": lambda: syncline.tensorflow.prepare(3, keras.optimizers.SGD(0.1)),
    "weight": lambda: syncline.prepare(model(), keras.optimizers.SGD(0.1), weight=2),
    "average": lambda: syncline.tensorflow.average(model()),
    "elastic average": _lasting_average,
    "jit fit": lambda: _one_step("sgd", jit_compile=True),
    "jit loop": _compiled_by_xla,
    "compiled anew": _compiled_anew,
    "unused": lambda: syncline.prepare(_compiled([Unused(), keras.layers.Dense(1)], "sgd")).fit(
        *batch(0, 0, 1), verbose=0
    ),
    "many unused": lambda: syncline.prepare(
        _compiled([Unused() for _ in range(9)] + [keras.layers.Dense(1)], "sgd")
    ).fit(*batch(0, 0, 1), verbose=0),
    "device": _elsewhere,
    "half": _half_of_it,
    "shapes": _of_another_shape,
    "not prepared": _of_another_model,
    "clipnorm": lambda: _prepared(keras.optimizers.SGD(0.1, clipnorm=1.0)),
    "global_clipnorm": lambda: _prepared(keras.optimizers.SGD(0.1, global_clipnorm=1.0)),
    "lamb": lambda: _prepared(keras.optimizers.Lamb(0.1)),
    "adafactor": lambda: _prepared(keras.optimizers.Adafactor(0.1)),
    "ema": lambda: _prepared(keras.optimizers.SGD(0.1, use_ema=True)),
    "accumulated": lambda: _prepared(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
    "scaled": lambda: _prepared(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))),
    "excluding": lambda: _prepared(_excluding()),
    "constraint": lambda: syncline.prepare(_compiled([keras.layers.Dense(1, kernel_constraint="max_norm")], "sgd")),
    "stepped": lambda: _stepped(model()),
    "written": _written,
    "no such root": lambda: syncline.tensorflow.broadcast(model(), root=2),
    "no state": lambda: syncline.tensorflow.load_state_dict(_prepared()[0], {}),
    "no epochs": lambda: syncline.tensorflow.Checkpoint("run.npz", epochs=0),
    "cut file": _cut_file,
}


def _stepped(made: Any) -> None:
    syncline.prepare(made, _built(made, 1))


def _built(of: Any = None, steps: int = 0) -> Any:
    made = keras.optimizers.SGD(0.1)
    made.build([keras.Variable(np.ones(3))] if of is None else of.trainable_variables)
    made.iterations.assign(steps)
    return made


# What goes wrong on one rank.


def other_models(place: Place) -> None:
    with joined(place, "ring"):
        rank = syncline.rank()
        made = keras.Sequential([keras.Input((5,)), keras.layers.Dense(7 + rank)])
        syncline.prepare(made, keras.optimizers.SGD(0.1))


def other_variables(place: Place) -> None:
    with joined(place, "ring"):
        syncline.tensorflow.broadcast([tf.Variable(tf.ones(3 + syncline.rank()))])


def other_shapes(place: Place) -> None:
    """One rank traces its step anew, with gradients of another shape."""
    with joined(place, "ring"):
        variables, used = syncline.tensorflow.prepare([tf.Variable(tf.ones(3))], keras.optimizers.SGD(0.1))
        step = tf.function(lambda gradient: used.apply([gradient], variables))
        step(tf.ones(3))
        step(tf.ones(3) if syncline.rank() == 0 else tf.ones((1, 3)))


def dies(place: Place) -> None:
    with joined(place, "ring transport=tcp"):
        made, used = begin("sgd", "loop")
        advance(made, used, "loop", 0, 2, *syncline_place(place))
        if syncline.rank() == 1:
            os._exit(3)
        advance(made, used, "loop", 2, 4, *syncline_place(place))


def killed_in_a_graph(place: Place) -> None:
    """In a call of the script's own, in the middle of a step."""
    with joined(place, "ring transport=tcp"):
        made, used = begin("sgd", "loop")
        x, y = map(tf.constant, batch(0, *syncline_place(place)))
        steps: list[None] = []

        def look(loss: Any) -> Any:
            steps.append(None)
            if len(steps) == 3 and syncline.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss

        @tf.function
        def looked(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(made, x, y)
            with tf.control_dependencies([tf.numpy_function(look, [loss], loss.dtype)]):
                used.apply(tape.gradient(loss, made.trainable_variables), made.trainable_variables)

        for _ in range(5):
            looked(x, y)


def raises_at_the_start(place: Place) -> None:
    with joined(place, "ring"):
        if syncline.rank() == 1:
            raise ValueError("the data of this rank are spoilt")
        advance(*begin("sgd", "fit"), "fit", 0, 2, *syncline_place(place))


def shared_variables(place: Place) -> None:
    """Two optimizers of the same variables: the first one was let go."""
    with joined(place, "ring"):
        made, used = begin("sgd", "loop")
        syncline.tensorflow.prepare(made, keras.optimizers.Adam(0.1))
        advance(made, used, "loop", 0, 1, *syncline_place(place))


def traced_before(place: Place) -> None:
    with joined(place, "ring"):
        made, used = model(), keras.optimizers.SGD(0.1)
        used.build(made.trainable_variables)
        step = looped(made, used)
        step(*map(tf.constant, batch(0, *syncline_place(place))))
        syncline.prepare(made, used)
        step(*map(tf.constant, batch(1, *syncline_place(place))))
    raise SystemExit(1)  # the warning comes at the end


def other_optimizers(place: Place) -> None:
    with joined(place, "ring"):
        syncline.prepare(model(), keras.optimizers.SGD(0.1, momentum=0.5 * syncline.rank()))


def other_metrics(place: Place) -> None:
    with joined(place, "ring"):
        made = _compiled([keras.layers.Dense(1)], "sgd", metrics=["mae" if syncline.rank() else "mape"])
        syncline.prepare(made)
        made.fit(*batch(0, *syncline_place(place)), verbose=0, callbacks=[syncline.tensorflow.MeanMetrics()])


def fewer_batches(place: Place) -> None:
    with joined(place, "ring"):
        made, used = begin("sgd", "fit")
        advance(made, used, "fit", 0, 3 - syncline.rank(), *syncline_place(place))
        syncline.barrier()


def raises(place: Place) -> None:
    """In the middle of a graph, in a layer of one rank's."""
    with joined(place, "ring"):
        made, used = begin("sgd", "loop")
        x, y = map(tf.constant, batch(0, *syncline_place(place)))
        step = looped(made, used)
        step(x, y)
        bad = float("nan") if syncline.rank() == 1 else 0.0

        @tf.function
        def checked(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.debugging.check_numerics(loss_of(made, x, y), "the loss")
            used.apply(tape.gradient(loss, made.trainable_variables), made.trainable_variables)

        checked(x + bad, y)
