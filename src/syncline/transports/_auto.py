"""Combines several transports: each peer is reached by the transport that suits it best.

``transport=auto`` uses it if some processes share a host and others do not: shared memory within hosts, TCP between
them. All messages with one peer go through one member transport, so the members' guarantees hold. One wait covers all
members: the last member's, which also watches the other members' descriptors.

Members only have to satisfy ``Combinable``.

``AutoWithLibrary`` also has the collectives of a message library among the ranks of this host. The library's end joins
the common wait, and the first member carries the frames by which it orders its collectives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ClosedError, UsageError
from . import Adds, Bytes, Handle, HasCollectives, Transport


class Watchable(Protocol):
    """A transport for which another one can wait."""

    def fileno(self) -> int:
        """A descriptor that is readable whenever ``poll`` has something to do, ``wake`` included."""
        ...

    def settle(self) -> bool:
        """Prepare for a wait by writing queued data. Returns whether ``poll`` can return something at once."""
        ...


class Combinable(Transport, Watchable, Protocol):
    """A transport whose wait can be combined with the waits of others."""

    def watch(self, fd: int) -> None:
        """Let the given descriptor of another member end a wait from now on."""
        ...


class Library(HasCollectives, Transport, Watchable, Protocol):
    """The end of a message library among the ranks of this host. The first member carries its frames."""

    def carried(self, handle: Handle) -> None:
        """Handle the end of an operation of the carrier whose owner is this end."""
        ...


class Auto:
    """The transports of process ``rank``, each with the peers that it reaches.

    The first member must be the member that can only send its own memory (shared memory): it allocates memory for all.
    The last member must be the member that moves bodies while it waits (TCP): it waits for all.
    """

    def __init__(self, rank: int, members: Mapping[Combinable, Collection[int]]) -> None:
        self.rank = rank
        self.name = "+".join(member.name for member in members)
        self._members: tuple[Transport, ...] = tuple(members)
        self._to = {peer: member for member, peers in members.items() for peer in peers}
        self.world = len(self._to) + 1
        self._closed = False
        *others, self._waiter = members
        self._others = tuple(others)
        # TCP's, as a process has that is alone on its host: all processes cut an array alike.
        self.chunk_bytes: int | None = getattr(self._waiter, "chunk_bytes", None)
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
            for counts, more in zip((sent, received), member.traffic(), strict=True):
                for peer, nbytes in more.items():
                    counts[peer] = counts.get(peer, 0) + nbytes
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


class AutoWithLibrary(Auto):
    """An ``Auto`` whose ranks of one host also have the collectives of a message library among them.

    A rank that is alone on its host needs none and gets a plain ``Auto``.
    """

    def __init__(self, rank: int, members: Mapping[Combinable, Collection[int]], library: Library) -> None:
        super().__init__(rank, members)
        self.name = f"{library.name}+{self.name}"
        self.together = library.together
        self._library = library
        self._members = (*self._members, library)
        self._waiter.watch(library.fileno())

    def allreduce(self, key: int, array: NDArray[Any], owner: Any = None) -> Handle:
        return self._library.allreduce(key, array, owner)

    def poll(self, timeout: float) -> list[Handle]:
        library = self._library
        found = super().poll(0.0 if not self._closed and library.settle() else timeout)
        for handle in [handle for handle in found if handle.owner is library]:
            found.remove(handle)
            library.carried(handle)
        return found + library.poll(0.0)

    def close(self) -> None:
        """The library first, whose last frames the first member carries."""
        if not self._closed:
            self._library.close()
        super().close()

    def reduce_scatter(self, key: int, parts: Sequence[NDArray[Any]], owner: Any = None) -> Handle:
        return self._library.reduce_scatter(key, parts, owner)

    def all_gather(self, key: int, parts: Sequence[NDArray[Any]], owner: Any = None) -> Handle:
        return self._library.all_gather(key, parts, owner)
