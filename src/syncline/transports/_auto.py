"""Combines several transports: each peer is reached by the transport that suits it best.

``transport=auto`` uses it if some processes share a host and others do not: shared memory within hosts, TCP between
them. All messages with one peer go through one member transport, so the members' guarantees hold. One wait covers all
members: the last member's, which also watches the other members' descriptors.

Members only have to satisfy ``Combinable``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ClosedError, UsageError
from . import Adds, Bytes, Handle, Transport


class Combinable(Transport, Protocol):
    """A transport whose wait can be combined with the waits of others."""

    def fileno(self) -> int:
        """A descriptor that is readable whenever ``poll`` has something to do, ``wake`` included."""
        ...

    def watch(self, fd: int) -> None:
        """Let the given descriptor of another member end a wait from now on."""
        ...

    def settle(self) -> bool:
        """Prepare for a wait by writing queued data. Returns whether ``poll`` can return something at once."""
        ...


class Auto:
    """The transports of process ``rank``, each with the peers that it reaches.

    The first member must be the member that can only send its own memory (shared memory): it allocates memory for all.
    The last member must be the member that moves bodies while it waits (TCP): it waits for all.
    """

    def __init__(self, rank: int, members: Mapping[Combinable, Collection[int]]) -> None:
        self.rank = rank
        self.name = "+".join(member.name for member in members)
        self._members = tuple(members)
        self._to = {peer: member for member, peers in members.items() for peer in peers}
        self.world = len(self._to) + 1
        self._closed = False
        *self._others, self._waiter = self._members
        for member in self._others:
            self._waiter.watch(member.fileno())

    def lends_from(self, src: int) -> bool:
        return self._member(src).lends_from(src)

    def allocate(self, nbytes: int) -> Bytes:
        """Memory of the first member."""
        return self._members[0].allocate(nbytes)

    def send(self, dst: int, tag: int, data: Bytes, priority: float = 0.0, owner: Any = None) -> Handle:
        return self._member(dst).send(dst, tag, data, priority, owner)

    def recv(self, src: int, tag: int, into: Bytes, owner: Any = None) -> Handle:
        return self._member(src).recv(src, tag, into, owner)

    def borrow(self, src: int, tag: int, nbytes: int, owner: Any = None) -> Handle:
        return self._member(src).borrow(src, tag, nbytes, owner)

    def adds_from(self, src: int, dtype: np.dtype[Any]) -> bool:
        member = self._member(src)
        return isinstance(member, Adds) and member.adds_from(src, dtype)

    def add(self, src: int, tag: int, into: NDArray[Any], owner: Any = None) -> Handle:
        member = self._member(src)
        assert isinstance(member, Adds)
        return member.add(src, tag, into, owner)

    def release(self, handle: Handle) -> None:
        self._member(handle.peer).release(handle)

    def poll(self, timeout: float) -> list[Handle]:
        """Waits for all members at once."""
        if self._closed:
            raise ClosedError("this transport is closed")
        at_once = [member.settle() for member in self._others]
        come = self._waiter.poll(0.0 if any(at_once) else timeout)
        return [handle for member in self._others for handle in member.poll(0.0)] + come

    @property
    def idle(self) -> bool:
        return all(member.idle for member in self._members)

    def wake(self) -> None:
        """One member suffices to end the common wait."""
        self._members[0].wake()

    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """In the order of peers."""
        sent: dict[int, int] = {}
        received: dict[int, int] = {}
        for member in self._members:
            out, come = member.traffic()
            sent.update(out)
            received.update(come)
        return dict(sorted(sent.items())), dict(sorted(received.items()))

    @property
    def moved_bytes(self) -> int:
        return sum([member.moved_bytes for member in self._members])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for member in self._members:
                member.close()

    def _member(self, peer: int) -> Combinable:
        member = self._to.get(peer)
        if member is None:
            raise UsageError(f"rank {self.rank} cannot exchange messages with {peer} in a world of {self.world}")
        return member
