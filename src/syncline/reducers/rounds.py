"""Codecs that alternate between computing and sums over the ranks: the sums of all tensors of a bucket go together."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from ..codecs import Floats, Rounds
from ..errors import UsageError
from . import Part, Place, Reducer, Sum


def reduce(parts: Sequence[Part], place: Place) -> Reducer:
    """All tensors step by step together, one sum for each step."""
    open_ones: list[Generator[Floats, None, None]] = []
    for part in parts:
        if not isinstance(part.codec, Rounds):
            raise UsageError(f"{part.codec} says that it works in rounds and has no average()")
        if not np.isfinite(part.array).all():
            place.report(part.name)
        open_ones.append(part.codec.average(part.array, part.state, place.workers))
    while True:
        asked: list[Floats] = []
        going: list[Generator[Floats, None, None]] = []
        for one in open_ones:
            array = next(one, None)
            if array is not None:
                asked.append(array)
                going.append(one)
        if not asked:
            return
        open_ones = going
        buffer = place.room.take(4 * sum(array.size for array in asked))
        together = buffer[: 4 * sum(array.size for array in asked)].view(np.float32)
        np.concatenate([array.reshape(-1) for array in asked], out=together)
        yield Sum(together)
        at = 0
        for array in asked:
            array.reshape(-1)[:] = together[at : at + array.size]
            at += array.size
        place.room.give(buffer)
