"""TensorFlow: a compiled model of Keras 3, and the step that ``fit`` makes for each batch (``train_on_batch``).

Images are (n, height, width, channels), the only order that TensorFlow convolves on processors. Keras' momentum
includes the learning rate, so with a changing rate it trains differently from the blueprint; a custom optimizer of a
few lines replaces it. All batches are padded to one length with samples of weight 0, because Keras would trace the step
again for every other length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline.frameworks._supported import check_mode, check_schedule
from syncline.registry import register
from syncline.strategy.strategy import Strategy

from ..messages import Job
from ..sides import Side
from ..workloads import Workload
from ..workloads import _blueprint as plain
from . import KEEPS_FREED_MEMORY
from ._from_blueprint import FromBlueprint, InOneStep, filled, scores

_ENVIRON = {
    **KEEPS_FREED_MEMORY,
    "KERAS_BACKEND": "tensorflow",
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@register("frameworks", "tensorflow", needs=("tensorflow", "keras"), install="syncline[tensorflow]", environ=_ENVIRON)
class TensorflowTraining(InOneStep, FromBlueprint):
    """``keras.Sequential`` under ``compile`` and the function that ``fit`` trains with."""

    label_type = np.int32

    def __init__(self, workload: Workload, job: Job, process: int) -> None:  # noqa: ARG002
        assert workload.blueprint is not None
        self._workload, self._blueprint, self._job = workload, workload.blueprint, job
        self._rates = workload.blueprint.rates(job.iterations)
        self._model: Any = None
        self._spare: Any = None

    @staticmethod
    def loaded() -> str:
        import keras
        import tensorflow as tf

        return f"{tf.__version__}, Keras {keras.__version__}"

    @staticmethod
    def check(strategy: Strategy) -> None:
        """Refuses modes and schedules that cannot be part of a ``tf.function``."""
        check_schedule(strategy, "TensorFlow")
        check_mode(strategy, [{"lr": 1.0}], "the optimizer", True)

    def prepare(self, side: Side, weight: Any) -> None:  # noqa: ARG002
        """Ranks are weighed by their shares. Under a peer, variables are created in its ``scope``."""
        import keras

        self._longest = -(-self._job.batch // side.world_size())
        with getattr(side, "scope", nullcontext)():
            model = built(self._blueprint)
            assign(model, self._blueprint.start(self._job.seed))
            solver = optimizer_of(self._blueprint, self._rates[0])
            model.compile(solver, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        self._model, self._optimizer = side.prepare(model, solver, weight=1)

    def backward(self) -> None:
        """Weighs samples, so that the mean over ranks is the mean over the whole batch. Keras divides by the length."""
        images, labels, position, share = self._batch
        counts = np.full(len(labels), share * self._longest / len(labels), np.float32)
        self._optimizer.learning_rate = self._rates[position - 1]
        batch = [filled(array, self._longest) for array in (images, labels, counts)]
        self._loss = float(self._model.train_on_batch(*batch)) / share

    def consolidate(self, side: Side) -> None:
        side.consolidate()

    def copied(self) -> Mapping[str, NDArray[Any]]:
        """Weights by the blueprint's names, in its layout."""
        return weights_of(self._model)

    def evaluate(self, weights: Mapping[str, Any] | None = None) -> tuple[float, float]:
        """Evaluates with a second model that takes part in no run."""
        self._spare = self._spare or built(self._blueprint)
        assign(self._spare, self.copied() if weights is None else weights)
        parts = ((self.taken(part)[0], part[1]) for part in self._workload.tests())
        return scores([(np.asarray(self._spare.predict_on_batch(images)), labels) for images, labels in parts])


def built(blueprint: plain.Blueprint) -> Any:
    """A Keras model with the layers and names of a blueprint."""
    import keras
    from keras import layers

    makers: dict[type, Callable[[Any, str], list[Any]]] = {
        plain.Convolution: lambda one, name: [layers.Conv2D(one.outputs, one.side, padding="same", name=name)],
        plain.Dense: lambda one, name: [layers.Dense(one.outputs, name=name)],
        plain.Relu: lambda *_: [layers.ReLU()],
        plain.MaxPooling: lambda one, _: [layers.MaxPooling2D(one.side)],
        plain.Flatten: lambda *_: [layers.Permute((3, 1, 2)), layers.Flatten()],
    }
    channels, *sides = blueprint.image
    found: list[Any] = [layers.Input((*sides, channels))]
    for place, layer in enumerate(blueprint.layers):
        found += makers[type(layer)](layer, f"layer{place}")
    return keras.Sequential(found)


def assign(model: Any, weights: Mapping[str, NDArray[Any]]) -> None:
    """Set a model's weights, given by the blueprint's names in its layout."""
    for variable, array in zip(model.trainable_variables, weights.values(), strict=True):
        variable.assign(array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T)


def weights_of(model: Any) -> dict[str, NDArray[Any]]:
    """A model's weights by the blueprint's names, in its layout."""
    found = {}
    for variable in model.trainable_variables:
        layer, kind = variable.path.split("/")[-2:]
        array = np.array(variable)
        name = f"{layer.removeprefix('layer')}.{'bias' if kind == 'bias' else 'weight'}"
        found[name] = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T
    return found


def optimizer_of(blueprint: plain.Blueprint, rate: float) -> Any:
    """The SGD of blueprints."""
    import keras

    class Momentum(keras.optimizers.Optimizer):  # type: ignore[misc]
        """v <- momentum v + (g + decay w); w <- w - rate v."""

        def build(self, variables: Any) -> None:
            if not self.built:
                super().build(variables)
                self.velocities = self.add_optimizer_variables(variables, "velocity")

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            velocity = self.velocities[self._get_variable_index(variable)]
            moved = blueprint.momentum * velocity + (gradient + blueprint.weight_decay * variable)
            self.assign(velocity, moved)
            self.assign_sub(variable, learning_rate * moved)

    return Momentum(learning_rate=rate)
