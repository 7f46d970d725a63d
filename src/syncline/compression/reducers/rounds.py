"""Codecs that alternate between computing and sums over the ranks: the sums of all tensors of a bucket go together."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from ...codecs import Floats, Rounds
from ...errors import UsageError
from . import Part, Place, Reducer, Sum


def reduce(parts: Sequence[Part], place: Place) -> Reducer:
    """All tensors step by step together, one sum for each step."""
    going = [(part.name, _begun(part, place)) for part in parts]
    while True:
        asked: list[Floats] = []
        for name, one in list(going):
            try:
                asked.append(next(one))
            except StopIteration as end:
                going.remove((name, one))
                if not end.value:
                    place.report(name)
        if not asked:
            return
        buffer = place.room.take(4 * sum(array.size for array in asked))
        together = buffer[: 4 * sum(array.size for array in asked)].view(np.float32)
        np.concatenate([array.reshape(-1) for array in asked], out=together)
        yield Sum(together)
        at = 0
        for array in asked:
            array.reshape(-1)[:] = together[at : at + array.size]
            at += array.size
        place.room.give(buffer)


def _begun(part: Part, place: Place) -> Generator[Floats, None, bool]:
    if not isinstance(part.codec, Rounds):
        raise UsageError(f"{part.codec} says that it works in rounds and has no average()")
    return part.codec.average(part.array, part.state, place.workers)
