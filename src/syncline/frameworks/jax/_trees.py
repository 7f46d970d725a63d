"""Trees of JAX's arrays as lists of the host's: names, checks, and the way back to where the arrays were."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ...errors import MismatchError, UsageError
from ...nouns import Spec
from ...session.session import Session

Array = NDArray[Any]
_TYPES = ("float16", "float32", "float64")


def named(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths, as JAX writes them; a tree that is an array has one without a name."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def bare(name: str) -> str:
    """A path as messages have it and trees are compared by, without the Variable of flax around an array."""
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
    """Of how many devices' memory the arrays of a tree are."""
    return len({device for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) for device in leaf.devices()})


def specs_of(leaves: Sequence[tuple[str, Any]]) -> list[Spec]:
    """What there is to train; raises UsageError for what is not."""
    if not leaves:
        raise UsageError("there are no parameters in this tree: give init() those of the model")
    for name, leaf in leaves:
        if str(getattr(leaf, "dtype", type(leaf).__name__)) not in _TYPES:
            raise UsageError(
                f"the parameter {name or 'that is given'} is {getattr(leaf, 'dtype', type(leaf).__name__)}: Syncline"
                f" trains {', '.join(_TYPES)}; keep parameters in one of them, and convert them in the model"
            )
    return [Spec(name or "params", tuple(leaf.shape), str(leaf.dtype)) for name, leaf in leaves]


@contextmanager
def told_to_all(session: Session) -> Iterator[None]:
    """Whatever this process is refused inside, before it meets the others, ends the run for all, with its name."""
    try:
        yield
    except UsageError as error:
        if session.alone:
            raise
        named_error = UsageError(session.titled(f"{session.name(session.index)}: {error}"))
        session.fail(named_error)
        raise named_error from error


def broadcast(session: Session, tree: Any, root: int) -> Any:
    """A tree with the values of worker ``root``; all workers call it, with trees of the same shapes."""
    if session.alone or not session.is_worker:
        return tree
    leaves = named(tree)
    with told_to_all(session):
        values = [np.array(host(name, leaf), order="C") for name, leaf in leaves]
    mine = [[name, str(value.dtype), list(value.shape)] for (name, _), value in zip(leaves, values, strict=True)]
    theirs = json.loads(session.gather(json.dumps(mine).encode())[root])
    if mine != theirs:
        here, there = next(
            (one for one in zip(mine, theirs, strict=False) if one[0] != one[1]), (len(mine), len(theirs))
        )
        error = MismatchError(
            f"{session.name(session.index)} broadcasts another tree than rank {root}: {here}, not {there}"
        )
        session.fail(error)
        raise error
    for value in values:
        session.broadcast(value.reshape(-1).view(np.uint8), root)
    found = [placed(value, leaf) for value, (_, leaf) in zip(values, leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), found)
