"""Runs codecs that alternate between computing and sums over the ranks; all tensors of a bucket share each sum."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import zip_longest

import numpy as np

from ...codecs import Codec, Floats, Rounds
from ...errors import UsageError
from . import Operand, Participant, Reducer, Sum, Summed, Traffic, Way
from .summed import computing


def pieces(parts: Sequence[Operand], me: Participant) -> list[Callable[[], Reducer]]:
    """One reducer for all parts."""
    return [partial(reduce, parts, me)]


def traffic(parts: Sequence[Operand], workers: int, owners: Sequence[int]) -> list[Traffic]:  # noqa: ARG001
    """One sum per round of the codec with the most rounds."""
    elements = [_in_rounds(part.codec).rounds(part.state.spec) for part in parts]
    return [[Summed(4 * sum(together)) for together in zip_longest(*elements, fillvalue=0)]]


def reduce(parts: Sequence[Operand], me: Participant) -> Reducer:
    """Run all tensors' rounds together, with one sum per round."""
    going = [(part.name, _begun(part, me)) for part in parts]
    while True:
        asked: list[Floats] = []
        for name, one in list(going):
            try:
                asked.append(next(one))
            except StopIteration as end:
                going.remove((name, one))
                if not end.value:
                    me.report(name)
        if not asked:
            return
        buffer = me.room.take(4 * sum(array.size for array in asked))
        together = buffer[: 4 * sum(array.size for array in asked)].view(np.float32)
        np.concatenate([array.reshape(-1) for array in asked], out=together)
        yield Sum(together)
        at = 0
        for array in asked:
            array.reshape(-1)[:] = together[at : at + array.size]
            at += array.size
        me.room.give(buffer)


def _begun(part: Operand, me: Participant) -> Generator[Floats, None, bool]:
    return _in_rounds(part.codec).average(part.array, part.state, me.workers)


def _in_rounds(codec: Codec) -> Rounds:
    if not isinstance(codec, Rounds):
        raise UsageError(f"{codec} declares combine='rounds': give it average() and rounds()")
    return codec


WAY = Way(pieces, traffic, computing, "factors are summed by {architecture}", servable=False)
