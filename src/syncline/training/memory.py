"""Owns a model's tensors in contiguous memory of the transport, cut into buckets in the same layout on all processes.

``Blocks`` is such memory. ``Staging`` copies the buckets of tensors on a device to it and back. All processes start
with rank 0's model: ``agree_on_model`` compares the models, ``copy_from_rank_0`` broadcasts the weights. Nothing here
depends on whether the tensors are weights or gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np

from ..compression.reducers import Device, Reducer
from ..engine.engine import Engine
from ..engine.order import Work
from ..errors import MismatchError, UsageError
from ..nouns import Bucket, Layer, Spec, numpy_dtype
from ..session.communicator import Array
from ..session.layout import Layout, decide_layout, place_bucket, place_tensors
from ..session.session import MODEL_KEYS, Session
from ..session.tickets import BUCKET_KEYS

Allocate = Callable[[int, "np.dtype[Any]"], Array]
"""Allocates memory of the given size in bytes, as an array of the given element type."""


class DeviceSummed(Protocol):
    """Makes the reducers that add the gradients of a bucket where the device has them."""

    def reducers(self, place: int, number: int) -> Callable[[], Sequence[Callable[[], Reducer]]]:
        """A call that makes the reducers of a bucket in the storage at ``place``."""
        ...


class Staging:
    """Copies buckets to the transport's memory and back. A ``pair`` is a result of ``Blocks.pair``.

    This class serves tensors that are in that memory, and copies nothing. A device has a subclass.
    """

    device: Any = None
    """The device of the tensors; None if they are in the transport's memory."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def coder(self) -> Device | None:
        """Encodes and decodes on the device, if the device can. Buckets then need neither ``down`` nor ``up``."""
        return None

    def sums(self, session: Session, storages: Sequence[Any]) -> DeviceSummed:  # noqa: ARG002
        """Adds gradients in the device's memory. All ranks call it. Buckets then need neither ``down`` nor ``up``."""
        text = "direct(on=device) adds gradients in the memory of GPUs, and this model is not on one: use direct"
        raise session.fail(UsageError(text))

    def mark(self) -> Any:
        """The present point in the training thread's queue."""

    def follow(self) -> Callable[[], None]:
        """A function that lets ``coder`` decode after the training thread's work enqueued before this call."""
        return lambda: None

    def hand_over(self, pair: Any, mark: Any, share: float) -> None:
        """Let ``coder`` encode a bucket that is complete at ``mark``, and weigh it by ``share`` before."""

    def allocate(self, nbytes: int, dtype: np.dtype[Any]) -> Array:
        """Allocate memory of the transport that the device can copy to and from."""
        return self._engine.allocate(nbytes, dtype)

    def down(self, pair: Any, gate: Work | None, label: str) -> Work | None:  # noqa: ARG002
        """Start a copy to the host. After it and ``gate``, the returned work is done and the exchange may start."""
        return gate

    def up(self, pair: Any, exchange: Work, label: str) -> Work:  # noqa: ARG002
        """Copy to the device once the exchange is done. The returned work is done when the copy has been enqueued.

        Everything that the training thread has enqueued before this call still reads the old values.
        """
        return exchange

    def join(self) -> None:
        """Make the new values visible to the training thread. Call it once the works of ``up`` are done."""

    def synchronize(self) -> None:
        """Block until no copy is in flight."""

    def close(self) -> None:
        """Release all resources. No exchange may be in flight."""


class Blocks:
    """The tensors of ``layers`` in the transport's memory, one block per element type, in the order of ``buckets``.

    ``tensors`` has the tensors, flat, and ``arrays`` the buckets; ``starts`` has each bucket's offset in its block.
    """

    def __init__(self, layers: Sequence[Layer], buckets: Sequence[Bucket], allocate: Allocate) -> None:
        self.placed = place_tensors([layer.spec.elements for layer in layers], buckets)
        sizes: dict[str, int] = {}
        for one in self.placed:
            sizes[one.dtype] = max(sizes.get(one.dtype, 0), one.stop)
        self.blocks = {
            dtype: allocate(size * numpy_dtype(dtype).itemsize, numpy_dtype(dtype)) for dtype, size in sizes.items()
        }
        self.tensors = [self.blocks[one.dtype][one.start : one.stop] for one in self.placed]
        self.cut(buckets)

    def cut(self, buckets: Sequence[Bucket]) -> None:
        """Set ``arrays`` to other buckets of the same tensors. UsageError if one would not be contiguous."""
        starts = tuple(place_bucket(bucket, self.placed) for bucket in buckets)  # may raise: before any change
        self.buckets, self.starts = tuple(buckets), starts
        self.arrays: tuple[Array, ...] = tuple(
            self.blocks[bucket.dtype][start : start + bucket.elements]
            for bucket, start in zip(buckets, starts, strict=True)
        )

    def bring_all_down(self) -> None:
        """Copy all tensors to ``blocks``, if they are on a device."""

    def pair(self, number: int) -> Any:
        """The bucket with this number in the form that ``Staging`` copies."""
        return self.arrays[number]

    def take(self, other: Blocks) -> None:
        """Copy the values of blocks with the same layout."""
        for mine, theirs in zip(self.arrays, other.arrays, strict=True):
            mine[...] = theirs


def check_same_model(session: Session, key: int, tensors: Sequence[str], *said: tuple[str, str]) -> None:
    """Raise MismatchError on all processes if one differs from rank 0, naming the first difference.

    ``key`` is the model's first key, and ``tensors`` describe its tensors. Each of ``said`` is a text that must be the
    same on all processes, and the remedy if it is not.
    """
    remedy = "prepare the same models everywhere in the same order, and models that were prepared before everywhere or"
    said = (f"prepares its model {key // MODEL_KEYS}", f"{remedy} nowhere"), *said
    if session.decided is not None:  # owners and workers apply a push alike
        kept = f"has an optimizer with which sync={session.strategy.sync.name} has momentum={session.decided}"
        said = *said, (kept, "give all processes the same optimizer, with the same values")
    mine = [what for what, _ in said], tensors
    theirs = json.loads(session.everyone.tell(json.dumps(mine).encode(), "comparing models"))
    me, first = session.name(session.index), session.called(0)
    for (here, remedy), there in zip(said, theirs[0], strict=False):
        if here != there:
            raise session.fail(MismatchError(f"{me} {here}, and {first} {there}: {remedy}"))
    if len(said) != len(theirs[0]):
        raise session.fail(
            MismatchError(f"{me} has a model of another framework than {first}: use the same framework everywhere")
        )
    for here, there in zip_longest(tensors, theirs[1], fillvalue="nothing"):
        if here != there:
            raise session.fail(MismatchError(f"{me} has another model than {first}: {here} here, {there} there"))


def agree_on_model(session: Session, key: int, specs: Sequence[Spec], rule: str = "") -> Layout:
    """The layout of these tensors, once all processes have compared them with rank 0's; all processes call it.

    ``key`` and ``rule``, which describes the optimizer, must be the same on all processes too.
    """
    tensors = [f"{spec.name!r} of shape {list(spec.shape)} and type {spec.dtype}" for spec in specs]
    remedy = "give all processes the same optimizer, with the same values"
    check_same_model(session, key, tensors, (f"updates with {rule or 'nothing'}", remedy))
    return decide_layout(session, [Layer(spec) for spec in specs])


def copy_from_rank_0(session: Session, arrays: Sequence[Array]) -> None:
    """Overwrite the buckets with rank 0's; all processes call it."""
    for number, array in enumerate(arrays):
        label = f"copying weights of bucket {number} from {session.called(0)}"
        session.engine.wait(session.everyone.broadcast(array, BUCKET_KEYS, label))
