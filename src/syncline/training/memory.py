"""Owns a model's tensors in contiguous memory of the transport, cut into buckets in the same layout on all processes.

``Stored`` is the interface of such memory; ``Blocks`` implements it for frameworks whose tensors are arrays on the
host. ``Staging`` copies the buckets of tensors on a device to the transport's memory and back. All processes start with
rank 0's model: ``agree_on_model`` compares the models, ``copy_from_rank_0`` broadcasts the weights. Nothing here
depends on whether the tensors are weights or gradients.
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
"""Allocates memory of the given size in bytes, as an array of the given element type."""


class Stored(Protocol):
    """The tensors of a model in contiguous memory, one block per element type."""

    @property
    def arrays(self) -> Sequence[Array]:
        """The buckets in the transport's memory."""
        ...

    @property
    def placed(self) -> Sequence[Placed]:
        """The place of each tensor in the block of its element type."""
        ...

    def cut(self, buckets: Sequence[Bucket]) -> None:
        """Set ``arrays`` to other buckets of the same tensors. UsageError if one would not be contiguous."""
        ...

    def pair(self, number: int) -> Any:
        """The bucket with this number in the form that ``Staging`` copies."""
        ...


class Staging(Protocol):
    """Copies buckets to the transport's memory and back. A ``pair`` is a result of ``Stored.pair``."""

    device: Any
    """The device of the tensors; None if they are in the transport's memory, where nothing is copied."""

    def allocate(self, nbytes: int, dtype: np.dtype[Any]) -> Array:
        """Allocate memory of the transport that the device can copy to and from."""
        ...

    def down(self, pair: Any, gate: Work | None, label: str) -> Work | None:
        """Start a copy to the host. The exchange may start once the returned work is done, which follows ``gate``."""
        ...

    def up(self, pair: Any, exchange: Work, label: str) -> Work:
        """Copy to the device once the exchange is done. The returned work is done when the copy has been enqueued.

        Everything that the training thread has enqueued before this call still reads the old values.
        """
        ...

    def join(self) -> None:
        """Make the new values visible to the training thread. Call it once the works of ``up`` are done."""
        ...

    def synchronize(self) -> None:
        """Block until no copy is in flight."""
        ...

    def close(self) -> None:
        """Release all resources. No exchange may be in flight."""
        ...


class InPlace:
    """The staging of tensors that are in the transport's memory: it copies nothing."""

    device: Any = None

    def __init__(self, engine: Engine) -> None:
        self.allocate = engine.allocate

    def down(self, pair: Any, gate: Work | None, label: str) -> Work | None:  # noqa: ARG002
        """Returns the gate."""
        return gate

    def up(self, pair: Any, exchange: Work, label: str) -> Work:  # noqa: ARG002
        """Returns the exchange."""
        return exchange

    def join(self) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class Blocks:
    """The tensors of ``layers`` in the transport's memory, one block per element type, in the order of ``buckets``.

    ``flat`` contains the tensors and ``arrays`` the buckets; ``starts`` has the offset of each bucket in its block.
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
        starts = tuple(place_bucket(bucket, self.placed) for bucket in buckets)  # may raise: before any change
        self.buckets, self.starts = tuple(buckets), starts
        self.arrays: tuple[Array, ...] = tuple(
            self.blocks[bucket.dtype][start : start + bucket.elements]
            for bucket, start in zip(buckets, starts, strict=True)
        )

    def pair(self, number: int) -> Array:
        """The bucket itself: nothing is copied."""
        return self.arrays[number]

    def take(self, other: Blocks) -> None:
        """Copy the values of blocks with the same layout."""
        for mine, theirs in zip(self.arrays, other.arrays, strict=True):
            mine[...] = theirs


def agree_on_model(session: Session, key: int, specs: Sequence[Spec], rule: str = "") -> Layout:
    """The layout of these tensors, once all processes have compared them with rank 0's; all processes call it.

    ``key`` is the model's first key and ``rule`` describes the optimizer. Both must be the same on all processes, like
    the tensors. MismatchError on all processes if one of them differs from rank 0.
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
    """Overwrite the buckets with rank 0's; all processes call it."""
    for number, array in enumerate(arrays):
        label = f"copying weights of bucket {number} from {session.called(0)}"
        session.engine.wait(session.everyone.broadcast(array, BUCKET_KEYS, label))
