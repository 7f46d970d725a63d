"""Trees of JAX's arrays as the steps of flat arrays ask for them: names, checks, and the way back to where they were.

JAX's arrays do not change, and an optimizer's state is a value of the script's. So a model's weights and the state are
those that a call was given, or hands back; between two calls there are none. What an optimizer keeps is told by tensor:
a leaf with a parameter's path and shape belongs to that one, a number to all.
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
from .._computations import RATE, TYPES, WeightsOfCall, broadcast_into, check_like_root, ends_run
from .._weights import Array, flat_elements

_OUTER = "outer"
"""Before the paths of what transformations beside Syncline's keep."""


def named(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths, as JAX writes them; a tree that is an array has one without a name."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def bare(name: str) -> str:
    """A path without the Variable of flax around an array, for errors and comparisons."""
    return re.sub(r"(\.value|\.raw_value|\.get_value\(\))$", "", name) or "params"


def is_traced(tree: Any) -> bool:
    """Whether some of it has shapes only, as inside of ``jit`` or ``eval_shape``."""
    return any(isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def host(name: str, leaf: Any) -> Array:
    """The value of a leaf; raises UsageError for what lies on devices that are not served, or is no array."""
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable:
            raise UsageError(
                f"{name or 'the array'} lies on devices of several processes (jax.distributed): Syncline averages"
                " between processes, so give each of them arrays of its own, and leave jax.distributed.initialize() out"
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
    """The kinds of devices that an array lies on."""
    return sorted({device.platform for device in leaf.devices()})


def placed(value: Array, like: Any) -> Any:
    """A copy of a value as what a leaf was: on its devices, or as a NumPy array or number."""
    if isinstance(like, jax.Array):
        return jax.device_put(np.array(value, like.dtype).reshape(like.shape), like.sharding)
    return np.array(value) if isinstance(like, np.ndarray) else type(like)(value.item())


def devices_of(tree: Any) -> int:
    """The number of devices that the arrays of a tree lie on."""
    return len({device for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) for device in leaf.devices()})


def specs_of(leaves: Sequence[tuple[str, Any]]) -> list[Spec]:
    """The specs of the parameters; raises UsageError for what Syncline does not train."""
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
    """Let a UsageError inside, before processes meet, end the run for all, with the name of this one."""
    try:
        yield
    except UsageError as error:
        if session.alone:
            raise
        text = session.titled(f"{session.name(session.index)}: {error}")
        raise ends_run(session, UsageError(text)) from error


def broadcast(session: Session, tree: Any, root: int) -> Any:
    """A tree with the values of worker ``root``; all workers call it, with trees of the same shapes."""
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
    """Syncline's part of an optimizer's state: the step, the run's number in this process, what the optimizer keeps."""

    step: Any
    run: Any
    inner: Any


class TreeWeights(WeightsOfCall):
    """The weights of one model, and what its optimizer keeps of each, during a call."""

    def __init__(self, names: Sequence[str], specs: Sequence[Spec]) -> None:
        super().__init__()
        self._names, self._specs = list(names), list(specs)
        self.states: list[State] = []

    def values(self) -> Groups:
        """What the owner's updates are multiplied by; all else is in optax's functions."""
        return [{RATE: 1.0}]

    def kept(self) -> list[State]:
        """What ``take_state`` has read."""
        return [dict(state) for state in self.states]

    def keep(self, states: Sequence[State]) -> None:
        """``give_state`` hands it out."""
        self.states = list(states)

    def take_state(self, state: Any) -> None:
        """Read what the script's optimizer keeps from its state."""
        self.states = [{} for _ in self._names]
        for name, leaf in _leaves(state):
            value = flat_elements(np.array(host(name, leaf)))
            for tensor, key in self._places(name, leaf):
                self.states[tensor][key] = value

    def give_state(self, like: Any, step: int, run: int) -> Any:
        """The state for a script, in the structure of ``like``; raises UsageError for a leaf that is not there."""

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
    """Syncline's part of an optimizer's state; raises UsageError where there is none, or more than one."""
    found = [one for one in jax.tree.leaves(state, is_leaf=_is_ours) if _is_ours(one)]
    if len(found) != 1:
        raise UsageError(
            f"this optimizer state has {len(found)} parts of Syncline's: give that of one transformation of"
            " syncline.jax.distributed() or average()"
        )
    return found[0]  # type: ignore[no-any-return]


def given(like: Any, found: Any, step: int, run: int) -> Any:
    """A state with new leaves, which ``found`` gives for a name and an old leaf, and Syncline's step and run."""

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
