"""What tests of groups of workers share: some collectives in a group, and what they must give."""

from __future__ import annotations

from typing import Any

import numpy as np

from syncline.session.session import Session


def all_calls(here: Session, worker: int) -> list[Any]:
    """What some collectives give in a group, of values that say which worker they are of."""
    summed, told = np.full(1000, 10.0**worker), np.array([float(worker)])
    here.allreduce(summed, average=False)
    here.broadcast(told, root=here.world_size - 1)
    here.barrier()
    return [float(summed[0]), float(told[0]), here.gather(b"%d" % worker), here.tell_all(b"%d" % worker)]


def wanted(ranks: tuple[int, ...]) -> list[Any]:
    return [
        sum(10.0**rank for rank in ranks),
        float(ranks[-1]),
        [b"%d" % rank for rank in ranks],
        b"%d" % ranks[0],
    ]
