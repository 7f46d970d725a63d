"""One training step under each framework, as ``bench steps`` times it.

A loop trains ``tensors`` weights of ``elements`` float32 each by plain SGD on one thread, from gradients that exist
already. It makes the framework's plain step, and the step of a model that Syncline has prepared. Each class imports its
framework when it is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from syncline import api
from syncline.errors import UsageError
from syncline.strategy.grammar import nearest

LEARNING_RATE: Final = 2.0**-20
"""Of all loops. Gradients are 1, so the sums are exact for a long time."""

Array = NDArray[Any]


class Loop(Protocol):
    """The steps of one framework. Weights are 1 at first, gradients always."""

    def bare(self) -> None:
        """Make one step of the framework alone, and return when the new weights are complete."""
        ...

    def step(self) -> None:
        """Make one step of the model that Syncline has prepared. All ranks call it."""
        ...

    def first(self) -> float:
        """One element of the weights that ``step`` updates."""
        ...


class NumpySteps:
    """A dictionary of arrays, and an update rule in Python."""

    def __init__(self, tensors: int, elements: int) -> None:
        names = [f"tensor{number}" for number in range(tensors)]
        self._weights = [np.ones(elements, np.float32) for _ in names]
        self._gradients = {name: np.ones(elements, np.float32) for name in names}
        self._own = [np.ones(elements, np.float32) for _ in names]
        model = {name: np.ones(elements, np.float32) for name in names}
        self._model, self._trainer = api.prepare(model, _sgd)

    def bare(self) -> None:
        for weights, gradient in zip(self._weights, self._own, strict=True):
            _sgd(weights, gradient, {})

    def step(self) -> None:
        self._trainer.step(self._gradients)

    def first(self) -> float:
        return float(self._model["tensor0"][0])


def _sgd(weights: Array, gradient: Array, state: dict[str, Any]) -> None:  # noqa: ARG001
    gradient *= LEARNING_RATE
    weights -= gradient


class JaxSteps:
    """One compiled computation, with an optimizer of optax."""

    def __init__(self, tensors: int, elements: int) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        from syncline import jax as ours

        self._ready = jax.block_until_ready
        params = {f"tensor{number:06}": jnp.ones(elements, jnp.float32) for number in range(tensors)}
        self._gradients = jax.tree.map(jnp.ones_like, params)
        plain, shared = optax.sgd(LEARNING_RATE), ours.distributed(optax.sgd(LEARNING_RATE))
        self._bare, self._bare_params, self._bare_state = _compiled(plain, params)
        self._shared, self._params, self._state = _compiled(shared, params)

    def bare(self) -> None:
        self._bare_params, self._bare_state = self._bare(self._gradients, self._bare_state, self._bare_params)
        self._ready(self._bare_params)

    def step(self) -> None:
        self._params, self._state = self._shared(self._gradients, self._state, self._params)
        self._ready(self._params)

    def first(self) -> float:
        return float(self._params["tensor000000"][0])


def _compiled(optimizer: Any, params: Any) -> tuple[Any, Any, Any]:
    import jax
    import optax

    state = optimizer.init(params)

    def step(gradients: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step), params, state


class TensorflowSteps:
    """One ``tf.function``, with an optimizer of Keras."""

    def __init__(self, tensors: int, elements: int) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # its log would appear between the rows
        from syncline import tensorflow as ours

        self._bare, _ = _traced(tensors, elements, lambda variables, optimizer: (variables, optimizer))
        self._shared, self._variables = _traced(tensors, elements, ours.prepare)

    def bare(self) -> None:
        self._bare()

    def step(self) -> None:
        self._shared()

    def first(self) -> float:
        return float(self._variables[0][0])


def _traced(tensors: int, elements: int, prepared: Callable[[Any, Any], Any]) -> tuple[Callable[[], None], Any]:
    import keras
    import tensorflow as tf

    gradients = [tf.ones(elements) for _ in range(tensors)]
    variables, optimizer = prepared(
        [tf.Variable(tf.ones(elements)) for _ in range(tensors)], keras.optimizers.SGD(LEARNING_RATE)
    )
    optimizer.build(variables)

    def update(gradients: Any) -> Any:
        optimizer.apply(gradients, variables)
        return variables[-1][0]

    step = tf.function(update)
    return lambda: step(gradients).numpy(), variables


class TorchSteps:
    """A network whose backward pass returns gradients that exist already."""

    def __init__(self, tensors: int, elements: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._bare = _scattered(tensors, elements)
        self._model, self._optimizer = api.prepare(*_scattered(tensors, elements))

    def bare(self) -> None:
        _torch_step(*self._bare)

    def step(self) -> None:
        _torch_step(self._model, self._optimizer)

    def first(self) -> float:
        return float(next(iter(self._model.parameters())).detach()[0])


def _scattered(tensors: int, elements: int) -> tuple[Any, Any]:
    import torch

    from ..gradients.iterations import Scattered

    gradients, weights = ([torch.ones(elements) for _ in range(tensors)] for _ in range(2))
    model = Scattered(gradients, weights)
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def _torch_step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model().backward()
    optimizer.step()


FRAMEWORKS: Final[dict[str, tuple[str, ...]]] = {
    "numpy": ("numpy",),
    "jax": ("jax", "optax"),
    "tensorflow": ("tensorflow", "keras"),
    "torch": ("torch",),
}
"""The frameworks with the packages that each needs."""
LOOPS: Final[dict[str, Callable[[int, int], Loop]]] = {
    "numpy": NumpySteps,
    "jax": JaxSteps,
    "tensorflow": TensorflowSteps,
    "torch": TorchSteps,
}
"""The loops' classes, which take numbers of tensors and of elements in each. They are made within a run."""


def check_framework(name: str) -> None:
    """Raise UsageError for a framework that is unknown or not installed."""
    if name not in FRAMEWORKS:
        hint = nearest(name, FRAMEWORKS) or "; there are " + ", ".join(FRAMEWORKS)
        raise UsageError(f"unknown framework {name!r}{hint}")
    if missing := [package for package in FRAMEWORKS[name] if find_spec(package) is None]:
        raise UsageError(
            f"{name} cannot be measured: {', '.join(missing)} is not installed; name others by --frameworks"
        )


def installed() -> list[str]:
    """The frameworks that can be measured here."""
    return [name for name, packages in FRAMEWORKS.items() if all(map(find_spec, packages))]
