"""A model's tensors as flat arrays in the transport's memory, laid out alike on all processes, servers too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from ..errors import MismatchError
from ..nouns import Layer, Spec, numpy_dtype
from ..session.keys import BUCKET_KEYS
from ..session.layout import Layout, decide_layout, place_bucket, place_tensors
from ..session.session import MODEL_KEYS, Session

Array = NDArray[Any]


class Blocks:
    """Tensors in contiguous memory, one block per element type; ``arrays`` are buckets, ``flat`` tensors."""

    def __init__(self, session: Session, layout: Layout) -> None:
        placed = place_tensors([layer.spec.elements for layer in layout.layers], layout.buckets)
        sizes = {one.dtype: max(other.stop for other in placed if other.dtype == one.dtype) for one in placed}
        blocks = {
            dtype: session.engine.allocate(size * numpy_dtype(dtype).itemsize, numpy_dtype(dtype))
            for dtype, size in sizes.items()
        }
        self.flat = [blocks[one.dtype][one.start : one.stop] for one in placed]
        self.arrays = []
        for bucket in layout.buckets:
            start = place_bucket(bucket, placed)
            self.arrays.append(blocks[bucket.dtype][start : start + bucket.elements])

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
