"""An optimizer of optax on flat slices of weights, at their owners; whether that is the same, and what it keeps.

The owner gives optax each slice as a model of its own, so that its state is of that slice: what counts elements for
themselves does the same there as in the whole tree, and ``probe`` refuses what does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from ...errors import UsageError
from ...serving.records import Elements, State
from ...serving.shard import Groups, Holding
from ._trees import named

Array = NDArray[Any]
RATE = "lr"
"""The value of the optimizer's group: what updates are multiplied by."""


class OptaxSlices:
    """An optimizer on the slices that this process owns; ``device`` is where it computes."""

    def __init__(self, optimizer: Any, device: Any, holdings: Sequence[Holding]) -> None:
        self._holdings, self._device = holdings, device
        states = [optimizer.init(self._there(held.weights)) for held in holdings]
        self._states = jax.block_until_ready(jax.device_put(states, self._device))  # also what init() made elsewhere
        self._update = jax.jit(_updates(optimizer))

    def squared_norm(self) -> float:
        """In float64."""
        return float(sum(np.square(held.gradient, dtype=np.float64).sum() for held in self._holdings))

    def apply(self, groups: Groups, scale: float) -> None:
        """Of copies: what optax keeps may be what it was given."""
        weights = [self._there(held.weights) for held in self._holdings]
        gradients = [self._there(held.gradient) for held in self._holdings]
        found, self._states = self._update(weights, gradients, self._states, scale, groups[0][RATE])
        for held, one in zip(self._holdings, found, strict=True):
            np.copyto(held.weights, np.asarray(one))

    def advanced(self) -> Groups:
        """Nothing: such an optimizer is refused before."""
        return []

    def state(self) -> list[State]:
        """By the paths of optax's own state."""
        return [{key: elements(leaf) for key, leaf in named(state)} for state in self._states]

    def load(self, states: Sequence[State]) -> None:
        """What is not told begins anew."""
        self._states = [self._taken(old, told) for old, told in zip(self._states, states, strict=True)]

    def _taken(self, state: Any, told: State) -> Any:
        found = []
        for key, leaf in named(state):
            value = told.get(key)
            found.append(self._there(value.array.reshape(leaf.shape)) if isinstance(value, Elements) else leaf)
        return jax.tree.unflatten(jax.tree.structure(state), found)

    def _there(self, array: Array) -> Any:
        return jax.device_put(np.array(array), self._device)  # of a copy, since it may read memory where it lies


def elements(leaf: Any) -> Elements:
    """A leaf of an optimizer's state as owners tell it: flat, but for what has no dimensions."""
    array = np.array(leaf)
    return Elements.of(array.reshape(-1) if array.ndim else array)


def _updates(optimizer: Any) -> Any:
    def update(weights: Any, gradients: Any, states: Any, scale: Any, rate: Any) -> Any:
        found, kept = [], []
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            change, state = optimizer.update(gradient * scale, state, weight)
            found.append(optax.apply_updates(weight, jax.tree.map(lambda of: of * rate, change)))
            kept.append(state)
        return found, kept

    return update


def probe(optimizer: Any, params: Any) -> bool:
    """Raise UsageError unless slices are updated as the whole is; whether anything is kept of elements.

    It is tried in float64 on a small tree of the same structure, since an optimizer may treat leaves by their names or
    dimensions; one of the gradients is large, for what limits a norm.
    """
    shapes = {leaf.shape for leaf in jax.tree.leaves(params)}
    kept = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, params))]
    with jax.enable_x64(True):
        near = _agrees(optimizer, params)
    if not near or any(shape and shape not in shapes for shape in kept):
        raise UsageError(
            "the optimizer gives other weights for slices of the parameters than for all of them, and owners of the"
            " weights have slices: use one that treats every element by itself (sgd, adam, adamw, ...), or"
            " ps(update=worker), ring or another allreduce"
        )
    return any(shape in shapes and shape for shape in kept)


def outline(optimizer: Any, params: Any) -> tuple[str, list[float]]:
    """What an optimizer keeps, and does to a small tree of this structure, by which processes can compare theirs.

    A transformation of optax is functions that show nothing else of themselves. Of one that wants more than gradients
    and parameters there are no numbers.
    """
    draw = np.random.default_rng(0)

    def small(leaf: Any) -> Any:
        return jnp.array(draw.standard_normal([min(length, 2) for length in leaf.shape]), jnp.float32)

    whole = jax.tree.map(small, params)
    state = optimizer.init(whole)
    keeps = str([(name, np.shape(leaf)) for name, leaf in named(state)])
    found = []
    try:
        for _ in range(2):
            changes, state = optimizer.update(jax.tree.map(small, params), state, whole)
            found += [float(np.abs(np.asarray(leaf, np.float64)).sum()) for leaf in jax.tree.leaves(changes)]
    except Exception:  # the script's own call will say what it wants
        found = []
    return keeps, found


def _agrees(optimizer: Any, params: Any) -> bool:
    draw = np.random.default_rng(0)

    def small(leaf: Any) -> Any:
        return jnp.array(draw.standard_normal([min(length, 3) for length in leaf.shape]))

    whole = jax.tree.map(small, params)
    parts = [part for leaf in jax.tree.leaves(whole) for part in _parts(leaf)]
    state, states = optimizer.init(whole), [optimizer.init(part) for part in parts]
    both, sliced = jax.jit(optimizer.update), jax.jit(_updates(optimizer))
    for factor in (1.0, 1e4, 1.0):
        gradients = jax.tree.map(lambda leaf, factor=factor: factor * small(leaf), params)
        changes, state = both(gradients, state, whole)
        whole = optax.apply_updates(whole, changes)
        flat = [part for leaf in jax.tree.leaves(gradients) for part in _parts(leaf)]
        parts, states = sliced(parts, flat, states, 1.0, 1.0)
    wanted = [part for leaf in jax.tree.leaves(whole) for part in _parts(leaf)]
    return all(np.allclose(one, other, rtol=1e-12, atol=1e-13) for one, other in zip(wanted, parts, strict=True))


def _parts(leaf: Any) -> list[Any]:
    flat = leaf.reshape(-1)
    return [flat[: flat.size // 2], flat[flat.size // 2 :]] if flat.size > 1 else [flat]
