"""Selects the samples that a worker trains on: a fixed share, or batches from a common pool in asynchronous runs.

``order`` has the order of an epoch and equal shares of it; ``pool`` distributes an epoch piece by piece; ``sampler``
has the iterables for scripts. No framework is needed: PyTorch's ``DataLoader`` accepts any iterable of indices, or of
lists of them.
"""

from __future__ import annotations

from ..session.session import Session
from .order import SampleOrder
from .pool import Pools
from .sampler import Sampler, Shares, Split

__all__ = ["Sampler", "sampler_of"]


def sampler_of(session: Session, order: SampleOrder) -> Sampler:
    """This worker's sampler. Collective: all workers call it with the same order at the same point of their scripts.

    Raises MismatchError if a worker has another order. A server, which does not train, gets the last worker's shares.
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
