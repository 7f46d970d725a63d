"""A model's tensors in contiguous memory of the transport, cut into buckets, and laid out alike on all processes.

``Stored`` is what buckets need of such memory, ``Blocks`` is the memory of frameworks whose tensors are arrays of the
host. Where tensors live on a device, ``Staging`` copies buckets to the transport's memory and back. All processes begin
with rank 0's model: ``agree_on_model``, ``copy_from_rank_0``. Does not know what the tensors are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..engine.engine import Engine
from ..engine.order import Work
from ..errors import MismatchError
from ..nouns import Bucket, Layer, Spec, numpy_dtype
from ..session.communicator import Array
from ..session.layout import Layout, Placed, decide_layout, place_bucket, place_tensors
from ..session.session import MODEL_KEYS, Session
from ..session.tickets import BUCKET_KEYS

Allocate = Callable[[int, "np.dtype[Any]"], Array]
"""Gives memory of so many bytes, as an array of that type."""


class Stored(Protocol):
    """The tensors of a model in contiguous memory, one block per element type."""

    @property
    def arrays(self) -> Sequence[Array]:
        """The buckets in the transport's memory."""
        ...

    @property
    def placed(self) -> Sequence[Placed]:
        """Where each tensor lies in the block of its type."""
        ...

    def cut(self, buckets: Sequence[Bucket]) -> None:
        """Let ``arrays`` be these buckets of the same tensors; raises UsageError unless they lie together in one."""
        ...

    def pair(self, number: int) -> Any:
        """A bucket as ``Staging`` copies it."""
        ...


class Staging(Protocol):
    """How buckets get into the transport's memory and back; a ``pair`` is what ``Stored.pair`` gives."""

    device: Any
    """Where tensors live; None where that is the transport's memory, and nothing is copied."""

    def allocate(self, nbytes: int, dtype: np.dtype[Any]) -> Array:
        """Memory of the transport, fit for copies."""
        ...

    def down(self, pair: Any, gate: Work | None, label: str) -> Work | None:
        """Begin to copy down: the exchange may start when the returned work is done; it is also behind ``gate``."""
        ...

    def up(self, pair: Any, exchange: Work, label: str) -> Work:
        """Copy up when the exchange is done: the returned work is done when that has been ordered.

        What the training thread has computed with so far, in its own order, still sees the old values.
        """
        ...

    def join(self) -> None:
        """Once the works of ``up`` are done: let the training thread see what has come."""
        ...

    def synchronize(self) -> None:
        """Return when no copy is under way."""
        ...

    def close(self) -> None:
        """End; nothing may be under way."""
        ...


class InPlace:
    """Tensors lie in the transport's memory: nothing has to be copied."""

    device: Any = None

    def __init__(self, engine: Engine) -> None:
        self.allocate = engine.allocate

    def down(self, pair: Any, gate: Work | None, label: str) -> Work | None:  # noqa: ARG002
        """Nothing but the gate."""
        return gate

    def up(self, pair: Any, exchange: Work, label: str) -> Work:  # noqa: ARG002
        """The exchange itself."""
        return exchange

    def join(self) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Blocks:
    """The tensors of ``layers`` in the transport's memory, one block per element type, in the order of ``buckets``.

    ``flat`` are the tensors, and ``arrays`` the buckets, which begin at ``starts`` of their blocks.
    """

    def __init__(self, layers: Sequence[Layer], buckets: Sequence[Bucket], allocate: Allocate) -> None:
        self.placed = place_tensors([layer.spec.elements for layer in layers], buckets)
        sizes: dict[str, int] = {}
        for one in self.placed:
            sizes[one.dtype] = max(sizes.get(one.dtype, 0), one.stop)
        self.blocks = {
            dtype: allocate(size * numpy_dtype(dtype).itemsize, numpy_dtype(dtype)) for dtype, size in sizes.items()
        }
        self.flat = [self.blocks[one.dtype][one.start : one.stop] for one in self.placed]
        self.cut(buckets)

    def cut(self, buckets: Sequence[Bucket]) -> None:
        """As ``Stored.cut``."""
        starts = tuple(place_bucket(bucket, self.placed) for bucket in buckets)  # refused before anything is another
        self.buckets, self.starts = tuple(buckets), starts
        self.arrays: tuple[Array, ...] = tuple(
            self.blocks[bucket.dtype][start : start + bucket.elements]
            for bucket, start in zip(buckets, starts, strict=True)
        )

    def pair(self, number: int) -> Array:
        """The bucket itself."""
        return self.arrays[number]

    def take(self, other: Blocks) -> None:
        """Have the values of others of the same layout."""
        for mine, theirs in zip(self.arrays, other.arrays, strict=True):
            mine[...] = theirs


def agree_on_model(session: Session, key: int, specs: Sequence[Spec], rule: str = "") -> Layout:
    """The layout of these tensors; raises MismatchError, on all, where a process has others than rank 0.

    ``key`` is the model's first, and has to be everyone's, and so has ``rule``, the optimizer in words.
    """
    mine = [[spec.name, list(spec.shape), spec.dtype] for spec in specs]
    said = session.everyone.tell(json.dumps([key, mine, rule]).encode(), "comparing models")
    told, theirs, first_rule = json.loads(said)
    me, first = session.name(session.index), session.called(0)
    error: MismatchError | None = None
    if told != key:
        error = MismatchError(
            f"{me} prepares its model {key // MODEL_KEYS} where {first} prepares its model {told // MODEL_KEYS}:"
            " prepare the same models everywhere in the same order, and those that were prepared before everywhere or"
            " nowhere"
        )
    for number in range(max(len(mine), len(theirs))):
        here, there = ("nothing" if number >= len(of) else "{!r} of shape {} and type {}".format(*of[number])
                       for of in (mine, theirs))  # fmt: skip
        if here != there:
            error = error or MismatchError(f"{me} has another model than {first}: {here}, not {there}")
    if error is None and rule != first_rule:
        error = MismatchError(
            f"{me} updates with {rule or 'nothing'}, and {first} with {first_rule or 'nothing'}: give all processes the"
            " same optimizer, with the same values"
        )
    if error is not None:
        session.fail(error)
        raise error
    return decide_layout(session, [Layer(spec) for spec in specs])


def copy_from_rank_0(session: Session, arrays: Sequence[Array]) -> None:
    """Let buckets be rank 0's; all processes call it."""
    for number, array in enumerate(arrays):
        label = f"copying weights of bucket {number} from {session.called(0)}"
        session.engine.wait(session.everyone.broadcast(array, BUCKET_KEYS, label))
