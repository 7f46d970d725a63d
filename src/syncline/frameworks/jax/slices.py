"""An optimizer of optax on flat slices of weights, at their owners, and the test whether it supports slices.

An owner gives each slice to optax as a model of its own, so the state belongs to that slice. An elementwise optimizer
computes the same there as on the whole tree; ``probe`` refuses others.

An owner may run the optimizer while a worker's computation in the same process waits for it. That computation occupies
a thread of XLA that other computations of its devices need, on one core the only one. Owners beside workers therefore
have a device of their own, of a second XLA client that computes in the calling thread.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...errors import UsageError
from ...serving.records import Elements, State
from ...serving.shard import Groups, Holding
from .._computations import RATE
from .._flat import Array, OnHoldings, flat_elements
from .trees import named


class OptaxSlices(OnHoldings):
    """An optimizer on the slices that this process owns; it computes on ``device``."""

    def __init__(self, optimizer: Any, device: Any, holdings: Sequence[Holding]) -> None:
        super().__init__(holdings)
        self._device = device
        states = [optimizer.init(self._there(held.weights)) for held in holdings]
        self._states = jax.block_until_ready(jax.device_put(states, self._device))  # also what init() made elsewhere
        self._update = jax.jit(_updates(optimizer))

    def apply(self, groups: Groups, scale: float) -> None:
        """Updates copies, because optax may keep the arrays that it receives."""
        weights = [self._there(held.weights) for held in self._holdings]
        gradients = [self._there(held.gradient) for held in self._holdings]
        found, self._states = self._update(weights, gradients, self._states, scale, groups[0][RATE])
        for held, one in zip(self._holdings, found, strict=True):
            np.copyto(held.weights, np.asarray(one))

    def state(self) -> list[State]:
        """By the paths in optax's state."""
        return [{key: flat_elements(np.array(leaf)) for key, leaf in named(state)} for state in self._states]

    def load(self, states: Sequence[State]) -> None:
        """Missing values keep their present state."""
        self._states = [self._taken(old, told) for old, told in zip(self._states, states, strict=True)]

    def _taken(self, state: Any, told: State) -> Any:
        found = []
        for key, leaf in named(state):
            value = told.get(key)
            found.append(self._there(value.array.reshape(leaf.shape)) if isinstance(value, Elements) else leaf)
        return jax.tree.unflatten(jax.tree.structure(state), found)

    def _there(self, array: Array) -> Any:
        return jax.device_put(np.array(array), self._device)  # of a copy, since it may read memory where it lies


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
    """Raise UsageError unless slices are updated like whole arrays. Returns whether the state has elementwise values.

    The test runs in float64 on a small tree of the same structure, because an optimizer may treat leaves by their names
    or dimensions. One of the gradients is large, to trigger limits on norms.
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
    """The keys of an optimizer's state, and the sums of its updates on a small tree: workers compare both.

    A transformation of optax consists of functions that show nothing else. There are no sums for an optimizer that
    needs more than gradients and parameters.
    """
    small = partial(_small, params, np.random.default_rng(0), 2, jnp.float32)
    whole = small()
    state = optimizer.init(whole)
    keeps = str([(name, np.shape(leaf)) for name, leaf in named(state)])
    found = []
    try:
        for _ in range(2):
            changes, state = optimizer.update(small(), state, whole)
            found += [float(np.abs(np.asarray(leaf, np.float64)).sum()) for leaf in jax.tree.leaves(changes)]
    except Exception:  # the script's own call will say what it wants
        found = []
    return keeps, found


def _agrees(optimizer: Any, params: Any) -> bool:
    small = partial(_small, params, np.random.default_rng(0), 3, jnp.float64)
    whole = small()
    parts = [part for leaf in jax.tree.leaves(whole) for part in _parts(leaf)]
    state, states = optimizer.init(whole), [optimizer.init(part) for part in parts]
    both, sliced = jax.jit(optimizer.update), jax.jit(_updates(optimizer))
    for factor in (1.0, 1e4, 1.0):
        gradients = jax.tree.map(lambda leaf, factor=factor: factor * leaf, small())
        changes, state = both(gradients, state, whole)
        whole = optax.apply_updates(whole, changes)
        flat = [part for leaf in jax.tree.leaves(gradients) for part in _parts(leaf)]
        parts, states = sliced(parts, flat, states, 1.0, 1.0)
    wanted = [part for leaf in jax.tree.leaves(whole) for part in _parts(leaf)]
    return all(np.allclose(one, other, rtol=1e-12, atol=1e-13) for one, other in zip(wanted, parts, strict=True))


def _small(tree: Any, draw: np.random.Generator, longest: int, dtype: Any) -> Any:
    """Random numbers in the structure of a tree, with at most ``longest`` elements per dimension."""
    return jax.tree.map(lambda of: jnp.array(draw.standard_normal([min(n, longest) for n in of.shape]), dtype), tree)


def _parts(leaf: Any) -> list[Any]:
    flat = leaf.reshape(-1)
    return [flat[: flat.size // 2], flat[flat.size // 2 :]] if flat.size > 1 else [flat]


def device_of_owners(*, beside: bool) -> Any:
    """The device on which owners compute, ``beside`` a worker or in a process of their own."""
    return _device_apart() if beside else jax.local_devices(backend="cpu")[0]


@cache
def _device_apart() -> Any:
    try:
        made: Any = importlib.import_module("jaxlib.xla_client").make_cpu_client(asynchronous=False, num_devices=1)
        return made.local_devices()[0]
    except (ImportError, AttributeError, TypeError) as error:
        version = importlib.import_module("jaxlib").__version__
        raise UsageError(
            f"jaxlib {version} does not give owners of weights on workers a device of their own ({error}): use"
            " ps(servers=1), servers that are processes of their own, or ps(on=workers, update=worker)"
        ) from error
