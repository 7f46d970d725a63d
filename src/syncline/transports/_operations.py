"""Tracks the operations of one end: matches messages with receives, and records what is in flight and what completed.

Messages match receives by (sender, tag) in order; whichever comes first waits for the other. The unclaimed messages of
one sender are limited, because a broken sender could otherwise fill the memory. Every operation ends exactly once and
is reported exactly once. If its peer is gone, it fails.

All transports use ``Operations``, which do no I/O. ``LoopTransport`` is the base of ``tcp`` and
``shm``: an end whose connections one event loop drives, and which can wait alone or together with other transports
(``_auto.Combinable``). It does not know the meaning of frames.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from numpy.typing import NDArray

from ..errors import ClosedError, PeerLost, ProtocolError, UsageError
from ..kernels.cpu import add_all_into
from ..wire.links import Link, Loop, broken, moved_bytes
from . import Bytes, Handle

UNCLAIMED_BYTES = 1 << 30
"""The limit for unclaimed messages of one sender."""

_ENTRY_BYTES = 512
"""The least memory that an unclaimed message counts as, table entries included."""

Posted = TypeVar("Posted")
Arrived = TypeVar("Arrived")


class Matcher(Generic[Posted, Arrived]):
    """Two tables of queues, of receives and of messages. At most one of them has an entry for a key."""

    def __init__(self, unclaimed_bytes: int = UNCLAIMED_BYTES) -> None:
        self._posted: dict[tuple[int, int], deque[Posted]] = {}
        self._arrived: dict[tuple[int, int], deque[tuple[Arrived, int]]] = {}
        self._limit = unclaimed_bytes
        self._unclaimed: dict[int, int] = {}  # bytes by sender

    def post(self, src: int, tag: int, receive: Posted) -> Arrived | None:
        """Post a receive. Returns the message that it matches, or None if it has to wait."""
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
        """Handle a message. Returns the receive that it matches, or None if it is kept in ``nbytes`` of memory.

        Raises ProtocolError if the sender exceeds the limit for unclaimed messages.
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
        """Remove and return the receive for the next message of that key. None if there is none."""
        key = src, tag
        queue = self._posted.get(key)
        if queue is None:
            return None
        receive = queue.popleft()
        if not queue:
            del self._posted[key]
        return receive

    def forget(self, src: int) -> None:
        """Drop the receives from that sender, and keep its unclaimed messages."""
        for key in [key for key in self._posted if key[0] == src]:
            del self._posted[key]


@dataclass
class Receive:
    """A posted receive: its handle, and the array that its data go to or are added to.

    With neither, the data stay in the transport's memory (``borrow``).
    """

    handle: Handle
    into: Bytes | None = None
    adds: NDArray[Any] | None = None


class Operations(Generic[Arrived]):
    """The operations of process ``rank`` with its ``peers``. ``completed`` have ended and were not returned yet.

    ``gone`` are the peers that have ended. ``lost`` is the error text for them, with ``{}`` for the rank. ``matched``
    is called with a receive and its message.
    """

    def __init__(self, rank: int, peers: Iterable[int], lost: str, matched: Callable[[Receive, Arrived], None]) -> None:
        self.rank = rank
        self.peers = frozenset(peers)
        self.completed: list[Handle] = []
        self.gone: set[int] = set()
        self.closed = False
        self.under_way: set[Handle] = set()
        self.matcher: Matcher[Receive, Arrived] = Matcher()
        self._lost, self._matched = lost, matched

    def check_open(self) -> None:
        """Raise ClosedError after the end."""
        if self.closed:
            raise ClosedError("this transport is closed")

    def _raise(self, peer: int) -> NoReturn:
        """Raise the reason why no message can be exchanged with that peer."""
        self.check_open()
        world = len(self.peers) + 1
        raise UsageError(f"rank {self.rank} cannot exchange messages with {peer} in a world of {world}")

    def admit(self, handle: Handle) -> bool:
        """Whether an operation can start. If its peer is gone, it completes with an error.

        Raises ClosedError after the end, and UsageError for a peer that does not exist.
        """
        if self.closed or handle.peer not in self.peers:
            self._raise(handle.peer)
        self.under_way.add(handle)
        if handle.peer in self.gone:
            self.finish(handle, self.lost(handle.peer))
            return False
        return True

    def post(self, receive: Receive) -> bool:
        """Start a receive. Returns whether it waits for its message. Raises as ``admit`` does."""
        handle = receive.handle
        if self.closed or handle.peer not in self.peers:
            self._raise(handle.peer)
        self.under_way.add(handle)
        message = self.matcher.post(handle.peer, handle.tag, receive)
        # A message that arrived before its sender left still matches; only a receive that would wait fails.
        if message is not None:
            self._matched(receive, message)
        elif handle.peer in self.gone:
            self.lose(handle.peer)
        return message is None and not handle.done

    def arrive(self, src: int, tag: int, message: Arrived, nbytes: int = 0) -> None:
        """Handle a message, which is kept in ``nbytes`` of memory until its receive is posted."""
        receive = self.matcher.arrive(src, tag, message, nbytes)
        if receive is not None:
            self._matched(receive, message)

    def finish(self, handle: Handle, error: Exception | None = None) -> None:
        """End an operation, with an error if given. Further calls do nothing."""
        if handle.done:
            return
        self.under_way.discard(handle)
        handle.done, handle.error = True, error
        self.completed.append(handle)

    def fits(self, receive: Receive, nbytes: int) -> bool:
        """Whether a message of ``nbytes`` fits its receive, which fails otherwise.

        Raises ProtocolError for a sum that ends within an element.
        """
        handle = receive.handle
        if nbytes > handle.nbytes:
            text = f"a message of {nbytes} bytes from rank {handle.peer} does not fit a receive of {handle.nbytes}"
            self.finish(handle, UsageError(text))
            return False
        if receive.adds is not None and nbytes % receive.adds.itemsize:
            raise broken(handle.peer, f"{nbytes} bytes came to be added to elements of {receive.adds.itemsize}")
        handle.nbytes = nbytes
        return True

    def deliver(self, receive: Receive, data: Bytes, memory: Any) -> bool:
        """Complete a receive with its message, which is in ``memory``. Returns whether that memory is free again."""
        if not self.fits(receive, data.nbytes):
            return True
        handle = receive.handle
        if receive.adds is not None:
            part = data.view(receive.adds.dtype)
            add_all_into(receive.adds[: part.size], [part])
        elif receive.into is None:
            handle.payload, handle.note = data, memory
        elif receive.into is not memory:
            receive.into[: data.nbytes] = data
        self.finish(handle)
        return handle.payload is None and receive.into is not memory

    def lose(self, peer: int) -> None:
        """Record that a peer is gone and fail all operations that wait for it."""
        self.gone.add(peer)
        self.matcher.forget(peer)
        for handle in [handle for handle in self.under_way if handle.peer == peer]:
            self.finish(handle, self.lost(peer))

    def lost(self, peer: int) -> PeerLost:
        """The error for operations with a peer that is gone."""
        return PeerLost(self._lost.format(peer), rank=peer)

    def take(self) -> list[Handle]:
        """Remove and return the completed handles."""
        found, self.completed = self.completed, []
        return found


class LoopTransport(ABC):
    """Process ``rank`` and its ``links`` to the others, driven by the event loop of the subclass."""

    _loop: Loop

    def __init__(self, rank: int, links: Mapping[int, Link]) -> None:
        self.rank = rank
        self.world = len(links) + 1
        self._links = links
        self._operations: Operations[Any] = Operations(rank, links, "the connection to rank {} closed", self._deliver)

    @abstractmethod
    def _deliver(self, receive: Receive, message: Any) -> None:
        """Complete a receive with its message."""

    def _post(self, receive: Receive) -> Handle:
        self._operations.post(receive)
        return receive.handle

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
        """Whether the kernel has all frames."""
        return self._loop.idle

    @property
    def moved_bytes(self) -> int:
        return moved_bytes(self._links.values())

    def wake(self) -> None:
        self._loop.wake()
