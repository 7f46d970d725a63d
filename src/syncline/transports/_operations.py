"""The operations of one end: which are under way, which have completed and are to be told, and which can never end.

Every transport has one of these. Does not know how messages move.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from numpy.typing import NDArray

from ..errors import ClosedError, PeerLost, UsageError
from ..wire.matching import Matcher
from . import Bytes, Handle

Arrived = TypeVar("Arrived")


@dataclass
class Receive:
    """A posted receive: its handle, and where its bytes go or what they are added to.

    Without either they are looked at in memory of the transport.
    """

    handle: Handle
    into: Bytes | None = None
    adds: NDArray[Any] | None = None


class Operations:
    """Those of process ``rank`` with its ``peers``; ``completed`` have ended and were not taken yet.

    ``gone`` are the peers that have ended, of which ``lost`` says so in the text of errors, with ``{}`` for the rank.
    """

    def __init__(self, rank: int, peers: Iterable[int], lost: str, gone: set[int] | None = None) -> None:
        self.rank = rank
        self.peers = frozenset(peers)
        self.completed: list[Handle] = []
        self.gone: set[int] = set() if gone is None else gone
        self.closed = False
        self.under_way: set[Handle] = set()
        self._lost = lost

    def check_open(self) -> None:
        """Raise ClosedError after the end."""
        if self.closed:
            raise ClosedError("this transport is closed")

    def _raise(self, peer: int) -> NoReturn:
        """Why nothing can be exchanged with that peer."""
        self.check_open()
        world = len(self.peers) + 1
        raise UsageError(f"rank {self.rank} cannot exchange messages with {peer} in a world of {world}")

    def admit(self, handle: Handle) -> bool:
        """Whether an operation can start, which is then under way; one whose peer is gone completes with that.

        Raises ClosedError after the end, and UsageError for a peer that there is not.
        """
        if self.closed or handle.peer not in self.peers:
            self._raise(handle.peer)
        self.under_way.add(handle)
        if handle.peer in self.gone:
            self.finish(handle, self.lost(handle.peer))
            return False
        return True

    def post(self, receive: Receive, matcher: Matcher[Receive, Arrived]) -> Arrived | None:
        """Begin a receive: the message that it gets at once; None where it waits for one, or has failed.

        Raises as ``admit`` does.
        """
        handle = receive.handle
        if self.closed or handle.peer not in self.peers:
            self._raise(handle.peer)
        self.under_way.add(handle)
        message = matcher.post(handle.peer, handle.tag, receive)
        if message is None and handle.peer in self.gone:
            matcher.forget(handle.peer)
            self.finish(handle, self.lost(handle.peer))
        return message

    def finish(self, handle: Handle, error: Exception | None = None) -> None:
        """An operation has ended, well or with an error; once only."""
        if handle.done:
            return
        self.under_way.discard(handle)
        handle.done, handle.error = True, error
        self.completed.append(handle)

    def refuse(self, handle: Handle, nbytes: int) -> None:
        """A receive gets a message that is too long for it."""
        text = f"a message of {nbytes} bytes from rank {handle.peer} does not fit a receive of {handle.nbytes}"
        self.finish(handle, UsageError(text))

    def lose(self, peer: int) -> None:
        """A peer is gone: what waits for it fails."""
        self.gone.add(peer)
        for handle in [handle for handle in self.under_way if handle.peer == peer]:
            self.finish(handle, self.lost(peer))

    def lost(self, peer: int) -> PeerLost:
        """The error of what waits for a peer that is gone."""
        return PeerLost(self._lost.format(peer), rank=peer)

    def take(self) -> list[Handle]:
        """What has completed since the last time: ``poll`` returns it."""
        found, self.completed = self.completed, []
        return found
