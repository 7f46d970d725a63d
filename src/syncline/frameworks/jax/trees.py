"""Trees of JAX arrays as the weights of ``_flat``, and an optimizer of optax on slices of them at their owners.

JAX arrays are immutable, and the optimizer's state is a value in the script. A model's weights and state are therefore
those that a call received or returns; between two calls there are none. The state is stored by tensor: a leaf with a
parameter's path and shape belongs to that parameter, and a scalar belongs to all.

An owner gives each slice to optax as a model of its own, so the state belongs to that slice. An elementwise optimizer
computes the same there as on the whole tree; ``probe`` refuses others. An owner may run the optimizer while a worker's
computation in the same process waits for it. That computation occupies a thread of XLA that other computations of its
devices need; on one core it is the only thread. Owners beside workers therefore have a device of their own, of a second
XLA client that computes in the calling thread.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...errors import UsageError
from ...nouns import Spec
from ...serving.records import Elements, State
from ...serving.shard import Groups, Holding
from ...session.session import Session
from .._computations import RATE, TYPES, WeightsOfCall, broadcast_into, check_like_root
from .._flat import Array, OnHoldings, flat_elements

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
    """The value of a leaf. Raises UsageError for an array on an unsupported device, or a leaf that is not an array."""
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable:
            raise UsageError(
                f"{name or 'the array'} lies on devices of several processes (jax.distributed): Syncline averages"
                " between processes, so give each of them its own arrays, and do not call"
                " jax.distributed.initialize()"
            )
        platforms = platforms_of(leaf)
        if platforms != ["cpu"]:
            raise UsageError(
                f"{name or 'the array'} lies on a device of kind {', '.join(platforms)}: syncline.jax supports CPU"
                " devices; run with JAX_PLATFORMS=cpu"
            )
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise UsageError(f"{name or 'the array'} is {leaf.dtype}: give jax.random.key_data(key) instead")
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
        raise UsageError("this tree has no parameters: give init() the parameters of the model")
    for name, leaf in leaves:
        if str(getattr(leaf, "dtype", type(leaf).__name__)) not in TYPES:
            raise UsageError(
                f"the parameter {name or 'that is given'} is {getattr(leaf, 'dtype', type(leaf).__name__)}: Syncline"
                f" trains {', '.join(TYPES)}; keep parameters in one of these types, and convert them in the model"
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
    """Syncline's part of an optimizer's state: the step, the number of the run in this process, and the inner state."""

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
                raise UsageError(
                    f"this state belongs to another optimizer: it has no {name!r} of shape {np.shape(leaf)}"
                )
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
            f"this optimizer state has {len(found)} parts of Syncline: give the state of a single transformation of"
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


def of_run(values: Any, run: int) -> Any:
    """Values with Syncline's state of that run of this process."""

    def own(one: Any) -> Any:
        return one._replace(run=placed(np.array(run), one.run)) if _is_ours(one) else one

    return jax.tree.map(own, values, is_leaf=_is_ours)


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


# At owners of weights.


class OptaxSlices(OnHoldings):
    """An optimizer on the slices that this process owns; it computes on ``device``."""

    def __init__(self, optimizer: Any, device: Any, holdings: Sequence[Holding]) -> None:
        super().__init__(holdings)
        self._device = device
        states = [optimizer.init(self._there(held.weights)) for held in holdings]
        # including values that init() made elsewhere
        self._states = jax.block_until_ready(jax.device_put(states, self._device))
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
        # of a copy, since the device may use the array's own memory
        return jax.device_put(np.array(array), self._device)


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
    except Exception:  # the script's own call raises it, with the missing argument
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
            f"jaxlib {version} cannot give owners of weights on workers their own device ({error}): use"
            " ps(servers=1), with servers in separate processes, or ps(on=workers, update=worker)"
        ) from error
