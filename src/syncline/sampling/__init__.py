"""Which samples a worker trains on: a share of its own, or batches from one pool where workers keep no common pace.

``order`` has the order of an epoch and fair shares of it, ``pool`` hands an epoch out piece by piece, both without I/O;
``pools`` brings the pool to all workers, by messages; ``sampler`` is what scripts iterate over. No framework: PyTorch's
``DataLoader`` takes any iterable of indices, or of lists of them.
"""

from __future__ import annotations

from ..session.session import Session
from .order import SampleOrder
from .pools import Pools
from .sampler import Sampler, Shares, Split

__all__ = ["Sampler", "sampler_of"]


def sampler_of(session: Session, order: SampleOrder) -> Sampler:
    """This worker's sampler of that order; all workers call it, with the same, at the same point of their scripts.

    Raises MismatchError where a worker has another order. A server, which trains on nothing, gets the last worker's
    shares.
    """
    if session.strategy.sync_mode().merges or not session.is_worker:
        if session.is_worker:
            order.check_alike(session)
        shares: Shares = Split(order, session.rank, session.world_size)
    else:
        if session.pools is None:
            session.pools = Pools(session)
        shares = session.pools.enter(order)
    return Sampler(order, shares)
