"""Steps under JAX: one compiled computation, with an optimizer of optax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from syncline import jax as ours

from .loops import LEARNING_RATE


class Steps:
    """As ``Loop``."""

    def __init__(self, tensors: int, elements: int) -> None:
        params = {f"tensor{number:06}": jnp.ones(elements, jnp.float32) for number in range(tensors)}
        self._gradients = jax.tree.map(jnp.ones_like, params)
        self._bare, self._bare_params, self._bare_state = _compiled(optax.sgd(LEARNING_RATE), params)
        self._shared, self._params, self._state = _compiled(ours.distributed(optax.sgd(LEARNING_RATE)), params)

    def bare(self) -> None:
        """With the optimizer as it is."""
        self._bare_params, self._bare_state = self._bare(self._gradients, self._bare_state, self._bare_params)
        jax.block_until_ready(self._bare_params)

    def step(self) -> None:
        """With Syncline's around it."""
        self._params, self._state = self._shared(self._gradients, self._state, self._params)
        jax.block_until_ready(self._params)

    def first(self) -> float:
        """Of the first tensor."""
        return float(self._params["tensor000000"][0])


def _compiled(optimizer: Any, params: Any) -> tuple[Any, Any, Any]:
    state = optimizer.init(params)

    def step(gradients: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step), params, state
