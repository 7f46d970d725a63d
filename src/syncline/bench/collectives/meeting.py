"""How the ranks of a bench come together between repetitions, without favouring any contender's own barrier.

They meet over the store, in which waiting is a blocked read: while a contender is idle nothing spins, whatever it does
when it is at work. No key is used twice, so nobody can read an old value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

Table = NDArray[np.float64]


class Meeting:
    """One rank's view of the meetings; all ranks make the same calls in the same order."""

    def __init__(self, store: TCPStore, rank: int, world: int) -> None:
        self._store, self.rank, self.world = store, rank, world
        self._round = 0

    def wait(self) -> None:
        """Return when all ranks have called."""
        self.gather(0.0)

    def gather(self, *mine: float) -> Table:
        """Every rank's numbers, a line per rank. Cost: a round trip to rank 0 for each rank."""
        values = self.share(np.array(mine, np.float64).tobytes())
        return np.array([np.frombuffer(value, np.float64) for value in values])

    def leave(self) -> None:
        """The last meeting: rank 0, which serves the store, returns when nobody will ask it for anything any more."""
        mine = f"bench/left/{self.rank}"
        if self.rank:
            self._store.set(mine, "x")
        elif self.world > 1:
            self._store.wait([f"bench/left/{rank}" for rank in range(1, self.world)])

    def share(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order; none may be empty, which the store takes 0.4 s to hand out."""
        self._round += 1
        keys = [f"bench/round/{self._round}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], mine)  # type: ignore[arg-type]  # bytes are what it keeps
        self._store.wait(keys)
        return [bytes(self._store.get(key)) for key in keys]
