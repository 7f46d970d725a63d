"""Ranks without a transport: a loop that carries the messages and makes the sums of reducers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from syncline.compression.reducers import Reducer, Round, Sum
from syncline.wire.scratch import Scratch

Alter = Callable[[int, int, np.ndarray], np.ndarray]


def untouched(src: int, dst: int, data: np.ndarray) -> np.ndarray:  # noqa: ARG001
    """A wire that does its work."""
    return data


def run(ranks: Sequence[Reducer], alter: Alter = untouched, summed: Callable[[int], None] = lambda _: None) -> int:
    """Drive the reducers of all processes to their ends; the bytes sent in messages.

    ``alter`` is the wire; ``summed`` is told the bytes of every array that the workers sum.
    """
    asked: list[Round | Sum | None] = [next(reducer, None) for reducer in ranks]
    under_way: dict[tuple[int, int], deque[np.ndarray]] = {}
    sent = 0
    posted: set[int] = set()
    while any(one is not None for one in asked):
        moved = False
        if all(one is None or isinstance(one, Sum) for one in asked):
            together = [one for one in asked if isinstance(one, Sum)]
            summed(together[0].array.nbytes)
            _sum(together)
            for rank, one in enumerate(asked):
                if one is not None:
                    asked[rank] = _go_on(ranks[rank], [])
            continue
        for rank, one in enumerate(asked):
            if not isinstance(one, Round):
                continue
            if rank not in posted:
                for message in one.sends:
                    data = alter(rank, message.peer, message.data.copy())
                    under_way.setdefault((rank, message.peer), deque()).append(data)
                    sent += data.nbytes
                posted.add(rank)
                moved = True
            if all(under_way.get((message.peer, rank)) for message in one.receives):
                lengths = []
                for message in one.receives:
                    data = under_way[message.peer, rank].popleft()
                    assert data.nbytes <= message.data.nbytes
                    message.data[: data.nbytes] = data
                    lengths.append(data.nbytes)
                posted.discard(rank)
                asked[rank] = _go_on(ranks[rank], lengths)
                moved = True
        assert moved, "the ranks wait for each other"
    assert not any(under_way.values()), "a message was sent that nobody received"
    return sent


def _go_on(reducer: Reducer, lengths: list[int]) -> Round | Sum | None:
    try:
        return reducer.send(lengths)
    except StopIteration:
        return None


def _sum(asked: list[Sum]) -> None:
    total = asked[0].array.copy()
    for one in asked[1:]:
        total = total + one.array
    for one in asked:
        one.array[:] = total


class Counted(Scratch):
    """A shelf that knows what is missing from it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = 0

    def take(self, nbytes: int) -> np.ndarray:
        self.out += 1
        return super().take(nbytes)

    def give(self, buffer: np.ndarray) -> None:
        self.out -= 1
        super().give(buffer)
