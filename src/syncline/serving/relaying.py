"""What owners do when another layout takes the place of theirs (``session.layout``): slices have other owners then.

A server has posted its part in the next push, and that it hears of another layout. What it owns leaves the old memory
before that is laid out anew, and comes to those who own it in the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..nouns import Bucket
from ..session.layout import REPLACING
from ..session.session import Session
from .records import Array, Record, pack, unpack
from .shard import Holding, Shard
from .traffic import Model

Lay = Callable[[Sequence[Bucket]], tuple[Sequence[Array], Sequence[Array]]]
"""Cuts a model's memory into other buckets: their gradients and their weights."""


class Relay(NamedTuple):
    """A model, and how its memory is cut anew."""

    model: Model
    lay: Lay


class Leaving:
    """The slices of one owner on their way to others; made before its memory is laid out anew."""

    def __init__(self, session: Session, shard: Shard, keeps: bool) -> None:
        """``keeps``: the owners' weights may say more than those that all know."""
        self._session, self._build, self._apart = session, shard.build, shard.apart
        self._state = pack(shard.state())
        self._weights = pack(shard.weights()) if keeps else None

    def arrive(self, holdings: Sequence[Holding]) -> Shard:
        """The shard of what this process owns now; all owners call it together."""
        mine = {held.slice.tensor for held in holdings}
        learnt = [one for one in self._shared(self._state) if one.slice.tensor in mine]
        shard = Shard(holdings, self._build, learnt, apart=self._apart)
        if self._weights is not None:
            shard.load_weights(one for one in self._shared(self._weights) if one.slice.tensor in mine)
        return shard

    def _shared(self, data: bytes) -> Iterator[Record]:
        session, roles = self._session, self._session.strategy.roles
        assert roles is not None
        owners = roles.places(session.group)
        for process, told in zip(owners, session.everyone.share(owners, data, REPLACING), strict=True):
            yield from unpack(told, session.name(process), session.member.number(process))
