"""What ranks of JAX do, by name, in processes of ``jax_ranks``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import syncline
import syncline.jax

Place = tuple[int, int, str]
BATCH = 12

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(optax.exponential_decay(0.1, 2, 0.7)),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.05),
    "adamw": lambda: optax.adamw(0.02, weight_decay=0.1),
}


@contextmanager
def joined(place: Place, strategy: str) -> Iterator[None]:
    """A run inside; a server serves until it is over."""
    index, processes, address = place
    syncline.init(strategy, rank=index, world_size=processes, address=address)
    try:
        yield
    except SystemExit as end:
        assert not end.code
    finally:
        syncline.shutdown()


def model(seed: int = 0, dtype: Any = None) -> Any:
    draw = np.random.default_rng(seed)
    shapes = {"first": {"w": (5, 7), "b": (7,)}, "last": {"w": (7, 1)}, "scale": ()}
    made = {
        name: {key: draw.normal(size=shape) / 2 for key, shape in of.items()} if isinstance(of, dict) else draw.normal()
        for name, of in shapes.items()
    }
    return jax.tree.map(lambda value: jnp.asarray(value, dtype), made)


def batch(step: int, rank: int, workers: int) -> tuple[Any, Any]:
    """A worker's share of the batch of a step, which is the same whatever their number."""
    draw = np.random.default_rng(step)
    x = draw.normal(size=(BATCH, 5))
    mine = slice(rank * BATCH // workers, (rank + 1) * BATCH // workers)
    return x[mine], np.sin(x.sum(1, keepdims=True))[mine]


def loss(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    return ((hidden @ params["last"]["w"] * params["scale"] - y) ** 2).mean()


def step_of(optimizer: Any) -> Any:
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        gradients = jax.grad(loss)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


def plain(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def alone(optimizer: str, steps: int, seed: int = 0) -> Any:
    """One worker without Syncline, on the union of the batches."""
    params, made = model(seed), OPTIMIZERS[optimizer]()
    state, step = made.init(params), step_of(made)
    for number in range(steps):
        params, state = step(params, state, *batch(number, 0, 1))
    return plain(params)


def begin(optimizer: str) -> tuple[Any, Any, Any]:
    """From parameters that are rank 0's, whatever this one's were."""
    params = syncline.jax.broadcast(model(syncline.rank()))
    made = syncline.jax.distributed(OPTIMIZERS[optimizer]())
    return params, made, made.init(params)


def advance(made: Any, params: Any, state: Any, first: int, last: int) -> tuple[Any, Any]:
    step = step_of(made)
    for number in range(first, last):
        params, state = step(params, state, *batch(number, syncline.rank(), syncline.world_size()))
    return params, state


def train(place: Place, strategies: list[str], steps: int) -> list[Any]:
    """Every optimizer under every strategy: what a worker has in the end, and one alone."""
    found = []
    for strategy in strategies:
        for optimizer in OPTIMIZERS:
            with joined(place, strategy):
                params, made, state = begin(optimizer)
                params, state = advance(made, params, state, 0, steps)
                found.append((strategy, optimizer, plain(params), int(state.step), alone(optimizer, steps)))
    return found


def chained(place: Place, strategies: list[str], steps: int) -> list[Any]:
    """``average()`` before an optimizer that couples elements."""
    found = []
    for strategy in strategies:
        with joined(place, strategy):
            params = syncline.jax.broadcast(model(syncline.rank()))
            made = optax.chain(syncline.jax.average(), optax.clip_by_global_norm(0.3), optax.adam(0.05))
            params, _ = advance(made, params, made.init(params), 0, steps)
            found.append(plain(params))
    params, made = model(), optax.chain(optax.clip_by_global_norm(0.3), optax.adam(0.05))
    state, step = made.init(params), step_of(made)
    for number in range(steps):
        params, state = step(params, state, *batch(number, 0, 1))
    return [*found, plain(params)]
