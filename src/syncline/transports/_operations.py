"""The operations of one end: which message belongs to which receive, what is under way, and what has completed.

Messages match receives by (sender, tag), first to first; whichever side comes first waits for the other. What a sender
may leave here unasked is bounded: a sound one is ahead by what is under way, a broken one without end. An operation
ends once, and is told once; one whose peer is gone fails.

Every transport has ``Operations`` and a ``Matcher``, which do no I/O and do not know how messages move. ``Looped`` is
what ``tcp`` and ``shm`` share beyond that: an end whose connections one event loop drives, and which waits alone or
together with other transports (``_auto.Member``). It does not know what frames mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from numpy.typing import NDArray

from ..errors import ClosedError, PeerLost, ProtocolError, UsageError
from ..wire.links import Link, Loop, moved_bytes
from . import Bytes, Handle

UNCLAIMED_BYTES = 1 << 30
"""What messages of one sender that nobody has asked for may take."""

_ENTRY_BYTES = 512
"""What a message takes at least, with the tables that know it."""

Posted = TypeVar("Posted")
Arrived = TypeVar("Arrived")


class Matcher(Generic[Posted, Arrived]):
    """Two tables of queues; at most one of them has an entry for a key at any time."""

    def __init__(self, unclaimed_bytes: int = UNCLAIMED_BYTES) -> None:
        self._posted: dict[tuple[int, int], deque[Posted]] = {}
        self._arrived: dict[tuple[int, int], deque[tuple[Arrived, int]]] = {}
        self._limit = unclaimed_bytes
        self._unclaimed: dict[int, int] = {}  # bytes by sender

    def post(self, src: int, tag: int, receive: Posted) -> Arrived | None:
        """A receive was posted: the message it gets at once, or None when it has to wait."""
        key = src, tag
        queue = self._arrived.get(key)
        if queue is None:
            self._posted.setdefault(key, deque()).append(receive)
            return None
        message, cost = queue.popleft()
        if not queue:
            del self._arrived[key]
        self._unclaimed[src] -= cost
        return message

    def arrive(self, src: int, tag: int, message: Arrived, nbytes: int = 0) -> Posted | None:
        """A message arrived: the receive it belongs to, or None when it is kept for later, in ``nbytes`` of memory.

        Raises ProtocolError when its sender has left too much here.
        """
        found = self.take(src, tag)
        if found is None:
            cost = nbytes + _ENTRY_BYTES
            total = self._unclaimed.get(src, 0) + cost
            if total > self._limit:
                raise ProtocolError(
                    f"rank {src} has sent messages of {total} bytes that nobody here has asked for; do all ranks make"
                    " the same calls?",
                    rank=src,
                )
            self._unclaimed[src] = total
            self._arrived.setdefault((src, tag), deque()).append((message, cost))
        return found

    def take(self, src: int, tag: int) -> Posted | None:
        """The receive that the next message of that key belongs to, taken out; None when there is none."""
        key = src, tag
        queue = self._posted.get(key)
        if queue is None:
            return None
        receive = queue.popleft()
        if not queue:
            del self._posted[key]
        return receive

    def forget(self, src: int) -> None:
        """Drop the receives that wait for that sender; messages that did arrive stay."""
        for key in [key for key in self._posted if key[0] == src]:
            del self._posted[key]


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


class Looped(ABC):
    """Process ``rank`` among ``links``, which a loop of the implementation drives."""

    _loop: Loop

    def __init__(self, rank: int, links: Mapping[int, Link]) -> None:
        self.rank = rank
        self.world = len(links) + 1
        self._links = links
        self._operations = Operations(rank, links, "the connection to rank {} closed")

    @abstractmethod
    def _post(self, receive: Receive) -> Handle:
        """Begin a receive, or end it at once with a message that is there."""

    def recv(self, src: int, tag: int, into: Bytes, owner: Any = None) -> Handle:
        return self._post(Receive(Handle("recv", src, tag, into.nbytes, owner), into))

    def borrow(self, src: int, tag: int, nbytes: int, owner: Any = None) -> Handle:
        return self._post(Receive(Handle("borrow", src, tag, nbytes, owner)))

    def poll(self, timeout: float) -> list[Handle]:
        operations, loop = self._operations, self._loop
        if operations.closed:
            operations.check_open()
        if loop.waiting:
            loop.write()
        loop.turn(0.0 if operations.completed else timeout)
        found, operations.completed = operations.completed, []
        return found

    def fileno(self) -> int:
        return self._loop.fileno()

    def watch(self, fd: int) -> None:
        self._loop.watch(fd)

    def settle(self) -> bool:
        self._loop.write()
        return bool(self._operations.completed)

    @property
    def idle(self) -> bool:
        """True when the kernel has all frames."""
        return self._loop.idle

    @property
    def moved_bytes(self) -> int:
        return moved_bytes(self._links.values())

    def wake(self) -> None:
        self._loop.wake()
