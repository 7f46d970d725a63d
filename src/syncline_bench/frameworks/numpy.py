"""NumPy: layers and their gradients written by hand, and an update rule of a few lines.

Images are (n, height, width, channels) inside. A convolution is one product of a matrix, with a row per patch of all
images, and the kernels (im2col: Chellapilla, Puri and Simard, "High performance convolutional neural networks for
document processing", 2006). Backward reports gradients one by one, the last layer's first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from syncline.frameworks._supported import check_mode, check_schedule
from syncline.registry import register
from syncline.strategy.strategy import Strategy

from ..batches import Batch
from ..messages import Job
from ..sides import Side
from ..workloads import Workload
from ..workloads import _blueprint as plain
from . import KEEPS_FREED_MEMORY
from ._from_blueprint import FromBlueprint, scores

Array = NDArray[Any]
Told = Callable[[str, Array], None]


class Layer(Protocol):
    """A layer. ``forward`` keeps what ``backward`` needs of its input."""

    def forward(self, x: Array) -> Array:
        """The output for an input."""
        ...

    def backward(self, back: Array, told: Told) -> Array:
        """The gradient of the input from that of the output. Reports the gradients of the weights, the bias's first."""
        ...


class Convolution:
    """A convolution as one matrix product with the patches of its input."""

    def __init__(self, weights: Mapping[str, Array], name: str) -> None:
        self._kernel, self._bias, self._name = weights[f"{name}.weight"], weights[f"{name}.bias"], name
        self._side = self._kernel.shape[-1]
        self._rows: Array = np.empty(0)

    def forward(self, x: Array) -> Array:
        edge, side = self._side // 2, self._side
        padded = np.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
        patches = sliding_window_view(padded, (side, side), axis=(1, 2))  # n, y, x, channel, side, side
        self._rows = patches.reshape(-1, x.shape[-1] * side * side)
        out = self._rows @ self._kernel.reshape(len(self._kernel), -1).T
        out += self._bias
        return out.reshape(*x.shape[:3], -1)

    def backward(self, back: Array, told: Told) -> Array:
        """Adds the gradient of each patch at the place of the patch (col2im)."""
        count, height, width, outputs = back.shape
        rows, side, edge = back.reshape(-1, outputs), self._side, self._side // 2
        told(f"{self._name}.bias", rows.sum(0))
        told(f"{self._name}.weight", (rows.T @ self._rows).reshape(self._kernel.shape))
        kernel = self._kernel.transpose(2, 3, 0, 1)  # y, x, output, input
        padded = np.zeros((count, height + 2 * edge, width + 2 * edge, self._kernel.shape[1]), back.dtype)
        for y in range(side):
            for x in range(side):
                part = (rows @ kernel[y, x]).reshape(count, height, width, -1)
                padded[:, y : y + height, x : x + width] += part
        return padded[:, edge : edge + height, edge : edge + width]


class Dense:
    """A fully connected layer."""

    def __init__(self, weights: Mapping[str, Array], name: str) -> None:
        self._matrix, self._bias, self._name = weights[f"{name}.weight"], weights[f"{name}.bias"], name
        self._x: Array = np.empty(0)

    def forward(self, x: Array) -> Array:
        self._x = x
        return x @ self._matrix.T + self._bias

    def backward(self, back: Array, told: Told) -> Array:
        told(f"{self._name}.bias", back.sum(0))
        told(f"{self._name}.weight", back.T @ self._x)
        return back @ self._matrix


class Relu:
    """max(x, 0)."""

    def __init__(self) -> None:
        self._positive: Array = np.empty(0)

    def forward(self, x: Array) -> Array:
        self._positive = x > 0
        return x * self._positive

    def backward(self, back: Array, told: Told) -> Array:  # noqa: ARG002
        return back * self._positive


class MaxPooling:
    """Max pooling. Of several equal maxima the first one counts."""

    def __init__(self, side: int) -> None:
        self._side = side
        self._largest: Array = np.empty(0)

    def forward(self, x: Array) -> Array:
        count, height, width, channels = x.shape
        side = self._side
        squares = x.reshape(count, height // side, side, width // side, side, channels).transpose(0, 1, 3, 5, 2, 4)
        rows = squares.reshape(*squares.shape[:4], side * side)
        self._largest = rows.argmax(-1)[..., None]
        return np.take_along_axis(rows, self._largest, -1)[..., 0]

    def backward(self, back: Array, told: Told) -> Array:  # noqa: ARG002
        count, height, width, channels = back.shape
        side = self._side
        rows = np.zeros((*back.shape, side * side), back.dtype)
        np.put_along_axis(rows, self._largest, back[..., None], -1)
        squares = rows.reshape(count, height, width, channels, side, side).transpose(0, 1, 4, 2, 5, 3)
        return squares.reshape(count, height * side, width * side, channels)


class Flatten:
    """Flatten images, channels first, as in the blueprint."""

    def __init__(self) -> None:
        self._shape: tuple[int, ...] = ()

    def forward(self, x: Array) -> Array:
        moved = x.transpose(0, 3, 1, 2)
        self._shape = moved.shape
        return moved.reshape(len(x), -1)

    def backward(self, back: Array, told: Told) -> Array:  # noqa: ARG002
        return back.reshape(self._shape).transpose(0, 2, 3, 1)


class Momentum:
    """The SGD of blueprints. ``lr`` is set before every step."""

    def __init__(self, momentum: float, weight_decay: float, lr: float) -> None:
        self.momentum, self.weight_decay, self.lr = momentum, weight_decay, lr

    def update(self, weights: Array, gradient: Array, state: dict[str, Any]) -> None:
        gradient = gradient + weights.dtype.type(self.weight_decay) * weights
        velocity = state.get("velocity")
        if velocity is None:
            velocity = state["velocity"] = gradient.copy()
        else:
            velocity *= weights.dtype.type(self.momentum)
            velocity += gradient
        weights -= weights.dtype.type(self.lr) * velocity


class _Bare:
    """The plain loop of a single worker, behind the calls of Syncline's optimizer."""

    def __init__(self, weights: Mapping[str, Array], rule: Momentum) -> None:
        self._weights, self._rule = weights, rule
        self._states: dict[str, dict[str, Any]] = {name: {} for name in weights}
        self._gradients: dict[str, Array] = {}

    def produced(self, name: str, gradient: Array) -> None:
        self._gradients[name] = gradient

    def step(self) -> None:
        for name, weights in self._weights.items():
            self._rule.update(weights.reshape(-1), self._gradients.pop(name).reshape(-1), self._states[name])


@register(
    "frameworks",
    "numpy",
    needs=("numpy",),
    install="syncline",
    environ={
        **dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "BLIS_NUM_THREADS"), "1"),
        **KEEPS_FREED_MEMORY,
    },
)
class NumpyTraining(FromBlueprint):
    """Trains a network of these layers."""

    fused = False

    def __init__(self, workload: Workload, job: Job, process: int) -> None:  # noqa: ARG002
        assert workload.blueprint is not None
        self._workload, self._blueprint = workload, workload.blueprint
        self._rates = self._blueprint.rates(job.iterations)
        self.weights: dict[str, Array] = dict(self._blueprint.start(job.seed))
        self._rule = Momentum(self._blueprint.momentum, self._blueprint.weight_decay, self._rates[0])

    @staticmethod
    def loaded() -> str:
        return np.__version__

    @staticmethod
    def check(strategy: Strategy) -> None:
        """Refuses modes and schedules that arrays or this update rule do not support."""
        check_schedule(strategy, "NumPy")
        rule = Momentum(0.9, 0.0, 0.1)
        check_mode(strategy, [vars(rule)], "SGD with momentum", True)

    def prepare(self, side: Side, weight: Any) -> None:  # noqa: ARG002
        self.weights, made = side.prepare(self.weights, self._rule, weight=1)
        self._optimizer: Any = _Bare(self.weights, self._rule) if made is self._rule else made
        self._layers = layers(self._blueprint, self.weights)

    def forward(self, batch: Batch) -> None:
        said = through(self._layers, batch.inputs)
        grown = np.exp(said - said.max(1, keepdims=True))
        probable = grown / grown.sum(1, keepdims=True)
        right = np.arange(len(batch.target)), batch.target
        self._loss = -float(np.log(probable[right]).mean())
        probable[right] -= 1
        self._back = probable * np.float32(batch.share / len(batch.target))

    def backward(self) -> None:
        """Reports each gradient as soon as it is complete."""
        back = self._back
        for layer in reversed(self._layers):
            back = layer.backward(back, self._optimizer.produced)

    def update(self, position: int) -> float:
        self._rule.lr = self._rates[position - 1]
        self._optimizer.step()
        return self._loss

    def consolidate(self, side: Side) -> None:
        side.consolidate()

    def copied(self) -> Mapping[str, Array]:
        return {name: array.copy() for name, array in self.weights.items()}

    def evaluate(self, weights: Mapping[str, Any] | None = None) -> tuple[float, float]:
        """A second network evaluates, so that the first keeps what its backward pass needs."""
        made = layers(self._blueprint, self.weights if weights is None else weights)
        parts = ((self.taken(part)[0], part[1]) for part in self._workload.tests())
        return scores([(through(made, images), labels) for images, labels in parts])


def layers(blueprint: plain.Blueprint, weights: Mapping[str, Array]) -> list[Layer]:
    """A network with these weights."""
    makers: dict[type, Callable[[Any, str], Layer]] = {
        plain.Convolution: lambda _, name: Convolution(weights, name),
        plain.Dense: lambda _, name: Dense(weights, name),
        plain.Relu: lambda *_: Relu(),
        plain.MaxPooling: lambda layer, _: MaxPooling(layer.side),
        plain.Flatten: lambda *_: Flatten(),
    }
    return [makers[type(layer)](layer, str(place)) for place, layer in enumerate(blueprint.layers)]


def through(layers: Sequence[Layer], x: Array) -> Array:
    """The output of the last layer."""
    for layer in layers:
        x = layer.forward(x)
    return x
