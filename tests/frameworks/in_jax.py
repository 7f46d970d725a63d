"""The toy problem in JAX, in a process of its own: each step is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matrix import PART, SQUARES, TINY, Arrays, Run, rate, start

import syncline
import syncline.jax

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(rate("sgd", 0)),
    "momentum": lambda: optax.sgd(rate("momentum", 0), momentum=PART),
    "adam": lambda: optax.adam(lambda number: rate("adam", number), b1=PART, b2=SQUARES, eps=TINY),
}


def loss(params: Any, pushed: Any, pull: Any) -> Any:
    return sum((params[name] * pushed[name]).sum() + pull / 2 * (params[name] ** 2).sum() for name in params)


class Trainer:
    def __init__(self, params: Any, optimizer: Any) -> None:
        self.rank, self._params, self._state = syncline.rank(), params, optimizer.init(params)

        def step(params: Any, state: Any, pushed: Any, pull: Any) -> Any:
            gradients = jax.grad(loss)(params, pushed, pull)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        self._step = jax.jit(step)

    def step(self, number: int, pushed: Arrays, pull: float) -> None:  # noqa: ARG002 - optax counts them
        kind = self._params["first"].dtype
        told = {name: array.astype(kind) for name, array in pushed.items()}
        self._params, self._state = self._step(self._params, self._state, told, np.asarray(pull, kind))

    def weights(self) -> Arrays:
        return {name: np.asarray(array) for name, array in self._params.items()}

    def consolidate(self) -> None:
        self._params = syncline.jax.consolidate(self._params, self._state)

    def state(self) -> Any:
        return syncline.jax.state_dict(self._params, self._state)

    def load(self, states: Sequence[Any]) -> None:
        self._params, self._state = syncline.jax.load_state_dict(states[0], self._params, self._state)

    def close(self) -> None:
        """The session forgets it by itself."""


def begin(_: Any, run: Run) -> Trainer:
    """From parameters that are rank 0's, whatever this one's were."""
    arrays = {name: jnp.asarray(array, run.dtype) for name, array in start(syncline.rank()).items()}
    optimizer = syncline.jax.distributed(OPTIMIZERS[run.rule]())
    return Trainer(syncline.jax.broadcast(arrays), optimizer)
