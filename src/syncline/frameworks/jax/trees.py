"""Trees of JAX arrays as the weights of ``_flat``: names, checks, and the conversion back to the original places.

JAX arrays are immutable, and the optimizer's state is a value in the script. A model's weights and state are therefore
those that a call received or returns; between two calls there are none. The state is stored by tensor: a leaf with a
parameter's path and shape belongs to that parameter, and a scalar belongs to all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UsageError
from ...nouns import Spec
from ...serving.records import Elements, State
from ...serving.shard import Groups
from ...session.session import Session
from .._computations import RATE, TYPES, WeightsOfCall, broadcast_into, check_like_root
from .._flat import Array, flat_elements

_OUTER = "outer"
"""The prefix for the state of transformations outside Syncline's."""


def named(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths, as JAX writes them. A tree that is a single array has an empty path."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def bare(name: str) -> str:
    """A path without the flax Variable around an array, for errors and comparisons."""
    return re.sub(r"(\.value|\.raw_value|\.get_value\(\))$", "", name) or "params"


def is_traced(tree: Any) -> bool:
    """Whether some leaves have only shapes, as under ``jit`` or ``eval_shape``."""
    return any(isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def host(name: str, leaf: Any) -> Array:
    """The value of a leaf. Raises UsageError for an array on an unsupported device, or a leaf that is no array."""
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable:
            raise UsageError(
                f"{name or 'the array'} lies on devices of several processes (jax.distributed): Syncline averages"
                " between processes, so give each of them its own arrays, and leave jax.distributed.initialize() out"
            )
        platforms = platforms_of(leaf)
        if platforms != ["cpu"]:
            raise UsageError(
                f"{name or 'the array'} lies on a device of kind {', '.join(platforms)}: syncline.jax serves CPU"
                " devices; run with JAX_PLATFORMS=cpu"
            )
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise UsageError(f"{name or 'the array'} is {leaf.dtype}: give jax.random.key_data(key), which is numbers")
    found = np.asarray(leaf)
    if found.dtype.kind == "O":
        raise UsageError(f"{name or 'the value'} is {type(leaf).__name__}: give arrays and numbers")
    return found


def platforms_of(leaf: jax.Array) -> list[str]:
    """The kinds of devices that hold an array."""
    return sorted({device.platform for device in leaf.devices()})


def placed(value: Array, like: Any) -> Any:
    """A copy of a value in the form of the leaf ``like``: on its devices, or as a NumPy array or number."""
    if isinstance(like, jax.Array):
        return jax.device_put(np.array(value, like.dtype).reshape(like.shape), like.sharding)
    return np.array(value) if isinstance(like, np.ndarray) else type(like)(value.item())


def devices_of(tree: Any) -> int:
    """The number of devices that hold the arrays of a tree."""
    return len({device for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) for device in leaf.devices()})


def specs_of(leaves: Sequence[tuple[str, Any]]) -> list[Spec]:
    """The specs of the parameters. Raises UsageError for types that Syncline does not train."""
    if not leaves:
        raise UsageError("there are no parameters in this tree: give init() those of the model")
    for name, leaf in leaves:
        if str(getattr(leaf, "dtype", type(leaf).__name__)) not in TYPES:
            raise UsageError(
                f"the parameter {name or 'that is given'} is {getattr(leaf, 'dtype', type(leaf).__name__)}: Syncline"
                f" trains {', '.join(TYPES)}; keep parameters in one of them, and convert them in the model"
            )
    return [Spec(name or "params", tuple(leaf.shape), str(leaf.dtype)) for name, leaf in leaves]


@contextmanager
def told_to_all(session: Session) -> Iterator[None]:
    """Let a UsageError in the block, before processes meet, end the run for all, with this process's name."""
    try:
        yield
    except UsageError as error:
        if session.alone:
            raise
        text = session.titled(f"{session.name(session.index)}: {error}")
        raise session.fail(UsageError(text)) from error


def broadcast(session: Session, tree: Any, root: int) -> Any:
    """A tree with the values of worker ``root``; all workers must call it with trees of the same shapes."""
    if session.alone or not session.is_worker:
        return tree
    leaves = named(tree)
    with told_to_all(session):
        values = [(name, np.array(host(name, leaf), order="C")) for name, leaf in leaves]
    check_like_root(session, "another tree", values, root)
    broadcast_into(session, (value for _, value in values), root)
    found = [placed(value, leaf) for (_, value), (_, leaf) in zip(values, leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), found)


class SynclineState(NamedTuple):
    """Syncline's part of an optimizer's state: the step, the run's number in this process, and the inner optimizer's
    state."""

    step: Any
    run: Any
    inner: Any


class TreeWeights(WeightsOfCall):
    """The weights and optimizer state of one model during a call."""

    def __init__(self, names: Sequence[str], specs: Sequence[Spec]) -> None:
        super().__init__()
        self._names, self._specs = list(names), list(specs)
        self.states: list[State] = []

    def values(self) -> Groups:
        """A factor for the updates; every other setting is inside optax's functions."""
        return [{RATE: 1.0}]

    def kept(self) -> list[State]:
        """The state that ``take_state`` has read."""
        return [dict(state) for state in self.states]

    def keep(self, states: Sequence[State]) -> None:
        """``give_state`` returns it to the script."""
        self.states = list(states)

    def take_state(self, state: Any) -> None:
        """Read the optimizer's state from the script's value."""
        self.states = [{} for _ in self._names]
        for name, leaf in _leaves(state):
            value = flat_elements(np.array(host(name, leaf)))
            for tensor, key in self._places(name, leaf):
                self.states[tensor][key] = value

    def give_state(self, like: Any, step: int, run: int) -> Any:
        """The state for the script, in the structure of ``like``. Raises UsageError for a missing leaf."""

        def found(name: str, leaf: Any) -> Any:
            tensor, key = self._places(name, leaf)[0]
            value = self.states[tensor].get(key)
            if not isinstance(value, Elements) or value.array.size != np.size(leaf):
                raise UsageError(f"this state is of another optimizer: it has no {name!r} of shape {np.shape(leaf)}")
            return placed(value.array.reshape(np.shape(leaf)), leaf)

        return given(like, found, step, run)

    def _places(self, name: str, leaf: Any) -> list[tuple[int, str]]:
        mine = [
            (len(own), number)
            for number, (own, spec) in enumerate(zip(self._names, self._specs, strict=True))
            if name.endswith(own) and spec.shape == np.shape(leaf)
        ]
        if mine:
            length, number = max(mine)
            return [(number, name[: len(name) - length])]
        return [(number, name) for number in range(len(self._names) if np.shape(leaf) == () else 1)]


def state_of(state: Any) -> SynclineState:
    """Syncline's part of an optimizer's state. Raises UsageError if there is not exactly one."""
    found = [one for one in jax.tree.leaves(state, is_leaf=_is_ours) if _is_ours(one)]
    if len(found) != 1:
        raise UsageError(
            f"this optimizer state has {len(found)} parts of Syncline's: give that of one transformation of"
            " syncline.jax.distributed() or average()"
        )
    return found[0]  # type: ignore[no-any-return]


def given(like: Any, found: Any, step: int, run: int) -> Any:
    """A state with new leaves, which ``found`` returns for a name and an old leaf, and with this step and run."""

    def new(path: Any, one: Any) -> Any:
        if not _is_ours(one):
            return found(_OUTER + jax.tree_util.keystr(path), one)
        inner = jax.tree.unflatten(jax.tree.structure(one.inner), [found(*leaf) for leaf in named(one.inner)])
        return SynclineState(placed(np.array(step), one.step), placed(np.array(run), one.run), inner)

    return jax.tree_util.tree_map_with_path(new, like, is_leaf=_is_ours)


def _leaves(state: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for path, one in jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_ours)[0]:
        found += named(one.inner) if _is_ours(one) else [(_OUTER + jax.tree_util.keystr(path), one)]
    return found


def _is_ours(value: Any) -> bool:
    return isinstance(value, SynclineState)


def fresh(run: int, inner: Any) -> SynclineState:
    """The state before the first step."""
    return SynclineState(jnp.int32(0), jnp.int32(run), inner)
