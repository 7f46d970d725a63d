"""JAX's side of a model as the steps of flat arrays ask for it: values come and go with each call.

JAX's arrays do not change, and an optimizer's state is a value of the script's. So the weights and the state are those
that a call has been given, or that it hands back; between two calls there are none. What an optimizer keeps is told by
tensor: a leaf that bears a parameter's path and shape is that one's, a number everyone's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...nouns import Spec
from ...serving.records import Elements, State
from ...serving.shard import Groups
from ._slices import RATE, elements
from ._trees import host, named, placed

Array = NDArray[Any]


class SynclineState(NamedTuple):
    """Syncline's part of an optimizer's state: the step, the run's number in this process, what the optimizer keeps."""

    step: Any
    run: Any
    inner: Any


class TreeWeights:
    """The weights of one model during a call."""

    def __init__(self, names: Sequence[str], specs: Sequence[Spec]) -> None:
        self._names, self._specs = list(names), list(specs)
        self.now: Sequence[Array] = []
        self.after: Sequence[Array] = []
        """What the present step makes of them, where the worker has made it by itself."""
        self.states: list[State] = []

    def read(self, into: Sequence[Array]) -> None:
        """Element by element."""
        for array, flat in zip(self.now, into, strict=True):
            np.copyto(flat.reshape(array.shape), array)

    def write(self, values: Sequence[Array]) -> None:
        """They are handed back by who has asked."""
        self.now = values

    def update(self, gradients: Sequence[Array]) -> None:  # noqa: ARG002 - the computation has updated them, or will
        """Only of a worker's own step something is known here."""
        if self.after:
            self.now, self.after = self.after, []

    def values(self) -> Groups:
        """What the owner's updates are multiplied by; all else is in optax's functions."""
        return [{RATE: 1.0}]

    def kept(self) -> list[State]:
        """What ``take_state`` was given."""
        return [dict(state) for state in self.states]

    def keep(self, states: Sequence[State]) -> None:
        """For ``give_state``."""
        self.states = list(states)

    def take_state(self, state: Any) -> None:
        """Have what a script's optimizer keeps, whose state this is."""
        self.states = [{} for _ in self._names]
        for name, leaf in _leaves(state):
            value = elements(host(name, leaf))
            for tensor, key in self._places(name, leaf):
                self.states[tensor][key] = value

    def give_state(self, like: Any, step: int, run: int) -> Any:
        """The other way round, for a script whose state has this structure; raises UsageError for what is not there."""

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
    """A state with new leaves, ``found`` by name and old leaf, and Syncline's own."""
    leaves = []
    for path, one in jax.tree_util.tree_flatten_with_path(like, is_leaf=_is_ours)[0]:
        if _is_ours(one):
            inner = [found(name, leaf) for name, leaf in named(one.inner)]
            inner = jax.tree.unflatten(jax.tree.structure(one.inner), inner)
            leaves.append(SynclineState(placed(np.array(step), one.step), placed(np.array(run), one.run), inner))
        else:
            leaves.append(found(_OUTER + jax.tree_util.keystr(path), one))
    return jax.tree.unflatten(jax.tree.structure(like, is_leaf=_is_ours), leaves)


_OUTER = "outer"
"""Before the paths of what transformations beside Syncline's keep."""


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
