"""An end of a transport with collectives of its own, between threads of one process: the last rank that comes adds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from syncline.transports import Handle
from syncline.transports.inproc import Hub, InProc, _Message


class Summing(InProc):
    """An end whose collectives are those of the ranks ``together``, all by default."""

    def __init__(self, hub: Hub, rank: int, together: Sequence[int] = ()) -> None:
        super().__init__(hub, rank)
        self.together = tuple(together) or tuple(range(self.world))

    def allreduce(self, key: int, array: Any, owner: Any = None) -> Handle:
        return self._meet("allreduce", key, [array], owner)

    def reduce_scatter(self, key: int, parts: Sequence[Any], owner: Any = None) -> Handle:
        return self._meet("reduce_scatter", key, parts, owner)

    def all_gather(self, key: int, parts: Sequence[Any], owner: Any = None) -> Handle:
        return self._meet("all_gather", key, parts, owner)

    def _meet(self, goal: Any, key: int, parts: Sequence[Any], owner: Any) -> Handle:
        handle = Handle(goal, -1, key, sum(part.nbytes for part in parts), owner)
        self._come(handle, parts)
        return handle

    def _come(self, handle: Handle, parts: Sequence[Any]) -> None:
        """Reach a collective."""
        hub, goal = self._hub, handle.kind
        with vars(hub).setdefault("lock", threading.Lock()):
            come = vars(hub).setdefault("met", {}).setdefault((goal, handle.tag, self.together), {})
            come[self.rank] = handle, parts
            if len(come) == len(self.together):
                for number in range(len(parts)):
                    arrays = [come[rank][1][number] for rank in self.together]
                    if goal == "all_gather":
                        result = arrays[number].copy()
                    else:
                        result = np.sum(arrays, axis=0, dtype=object).astype(arrays[0].dtype)
                    for place, array in enumerate(arrays):
                        if goal != "reduce_scatter" or place == number:
                            array[:] = result
                for rank, (its, _) in come.items():
                    hub.inboxes[rank].put(_Message("consumed", self.rank, handle=its))
                come.clear()
