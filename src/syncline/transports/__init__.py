"""Transports move bytes between the processes of a group; there is one file per message library.

A transport moves messages between process indices (workers first, then servers). A receive matches a message by sender
and tag. Messages with the same sender and tag arrive in the order in which they were sent; others arrive in any order.
Data moves only inside calls. One thread per process, the progress thread, makes all calls except ``wake``, and only
``poll`` blocks. Data are one-dimensional contiguous uint8 arrays, which the caller does not copy: a buffer passed to
``send`` must not change, and one passed to ``recv`` must not be used, until its handle is done.

Messages of up to ``INLINE_BYTES`` are sent at once, and the receiver keeps them until a receive is posted. Larger ones
stay at the sender until the receive is posted. A fast peer therefore cannot fill a slow one's memory, and no order of
receives can deadlock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import GroupError

Bytes = NDArray[np.uint8]
"""The type of data passed to a transport: a one-dimensional contiguous uint8 array."""

Words = NDArray[np.int64]
"""A table of int64 that compiled code and Python share."""

INLINE_BYTES = 64 * 1024
"""Messages up to this size are sent without waiting for a receive."""

LIBRARY = 15 << 60
"""The tag of a message library's frames that another transport carries. No other tag has all of the highest four
bits."""

_POLL_S = 0.005


class Handle:
    """One send, receive or collective in flight. The peer of a collective is -1.

    ``done`` becomes True inside a call of ``poll``, which also returns the handle once. ``nbytes`` is then the size of
    the message, and ``payload`` the data of a ``borrow``. If the operation failed, ``error`` is set instead. ``owner``
    belongs to the caller.
    """

    __slots__ = ("done", "error", "kind", "nbytes", "note", "owner", "payload", "peer", "tag")

    def __init__(
        self,
        kind: Literal["send", "recv", "borrow", "add", "allreduce", "reduce_scatter", "all_gather"],
        peer: int,
        tag: int,
        nbytes: int,
        owner: Any,
    ) -> None:
        self.kind = kind
        self.peer = peer
        self.tag = tag
        self.nbytes = nbytes
        self.owner = owner
        self.payload: Bytes | None = None
        self.note: Any = None  # reserved for the transport
        self.done = False
        self.error: Exception | None = None

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done else "under way"
        return f"<{self.kind} peer={self.peer} tag={self.tag} nbytes={self.nbytes} {state}>"


class Transport(Protocol):
    """The interface of a message library to the exchange.

    A transport may also have ``chunk_bytes``, the most bytes of a chunk whose parts are added, alike in all processes.
    """

    name: str
    rank: int
    world: int

    def lends_from(self, src: int) -> bool:
        """Whether ``borrow`` exposes the memory of sender ``src`` itself, which then waits for the release."""
        ...

    def allocate(self, nbytes: int) -> Bytes:
        """Zeroed memory that this transport moves without an extra copy. It lives until ``close``."""
        ...

    def send(self, dst: int, tag: int, data: Bytes, priority: float = 0.0, owner: Any = None) -> Handle:
        """Start sending. Among messages that wait for one peer the smallest priority goes first, equal ones in order.

        All waiting messages of one tag must have the same priority.
        """
        ...

    def recv(self, src: int, tag: int, into: Bytes, owner: Any = None) -> Handle:
        """Start receiving into the caller's memory. A longer message is an error."""
        ...

    def borrow(self, src: int, tag: int, nbytes: int, owner: Any = None) -> Handle:
        """Start receiving into the transport's memory. ``payload`` is valid until ``release``."""
        ...

    def release(self, handle: Handle) -> None:
        """Return the memory of a ``borrow``."""
        ...

    def poll(self, timeout: float) -> list[Handle]:
        """Move data for at most ``timeout`` seconds. Returns the completed handles; failed ones have their errors."""
        ...

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be written, acknowledgements included. An idle transport may be closed."""
        ...

    def wake(self) -> None:
        """Make a ``poll`` in another thread return now, or else the next one at once."""
        ...

    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """The bytes sent to and received from each peer since the start, headers included."""
        ...

    @property
    def moved_bytes(self) -> int:
        """The sum of ``traffic``. The engine reads it when nothing has completed, to see whether data still moves."""
        ...

    def close(self) -> None:
        """Free everything and drop what is in flight. To flush, wait for the handles before."""
        ...


@runtime_checkable
class Adds(Protocol):
    """A transport that can add received data to an array while it arrives."""

    def adds_from(self, src: int, dtype: np.dtype[Any]) -> bool:
        """Whether messages from ``src`` can be added on arrival, without other memory. The answer never changes."""
        ...

    def add(self, src: int, tag: int, into: NDArray[Any], owner: Any = None) -> Handle:
        """Start receiving a message that is added to ``into``. No one else may use ``into`` until it is done."""
        ...


@runtime_checkable
class HasAllreduce(Protocol):
    """A transport whose library has its own allreduce, which the architecture ``native`` uses."""

    def allreduce(self, key: int, array: NDArray[Any], owner: Any = None) -> Handle:
        """Sum ``array`` (one-dimensional, contiguous) over all ranks, in place.

        Calls with the same key match, whatever the order in which ranks make them. The handle fails with UsageError for
        element types that the library cannot add.
        """
        ...


@runtime_checkable
class HasCollectives(HasAllreduce, Protocol):
    """A transport whose library also has the two halves of an allreduce, for architectures with ``inside=native``.

    ``together`` are the ranks of all its collectives, the allreduce included: all, or those of ``Place.together``.
    ``parts`` are one array (one-dimensional, contiguous, possibly empty) for each of these ranks, in their order. A
    half that all ranks have reached runs, whatever other halves some of them have reached.
    """

    together: tuple[int, ...]

    def reduce_scatter(self, key: int, parts: Sequence[NDArray[Any]], owner: Any = None) -> Handle:
        """Sum the parts over the ranks ``together``, in place. A rank then has its own part; others have no meaning.

        Calls match as for ``allreduce``, and their handles fail likewise.
        """
        ...

    def all_gather(self, key: int, parts: Sequence[NDArray[Any]], owner: Any = None) -> Handle:
        """Replace every part, in place, by the part of the rank that it belongs to."""
        ...


class Store(Protocol):
    """A small key-value store by which the processes of a message library find each other. Calls have time limits.

    Between processes it is the meeting (``wire.meeting_sockets``), which keeps little, and only during startup.
    """

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes | None:
        """Read a value; None when nobody has written it yet."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0 and return its new value."""
        ...


class MemoryStore:
    """A store between the threads of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> bytes | None:
        """Read a value; None if nobody has written it yet."""
        with self._lock:
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + amount
            return self._counters[key]


class Carrier(Transport, Protocol):
    """A transport that carries the frames of a message library."""

    def settle(self) -> bool:
        """Write queued data, as before a wait. Returns whether ``poll`` can return something at once."""
        ...


@dataclass(frozen=True)
class Place:
    """The rendezvous of a transport that makes its own connections (capability ``connection="own"``).

    ``address`` is the interface to listen on. ``store`` is a key-value store that all ranks see; this transport's keys
    start with ``key``. Connecting may take ``timeout_s`` seconds; call ``check`` while waiting: it raises if another
    rank has failed. ``secret`` is known to all ranks of the run and to no one else. It authenticates connections and is
    never sent. ``near`` are the ranks that share this one's kernel and network namespace. ``together`` are the ranks of
    the library's collectives, this one included; if empty, all ranks. A transport that declares ``inside="auto"`` then
    needs to reach these ranks only, and ``carrier`` carries its frames, with the tag ``LIBRARY``.
    """

    rank: int
    world: int
    store: Store = field(default_factory=MemoryStore)
    key: str = "transport"
    address: str = "127.0.0.1"
    timeout_s: float = 120.0
    check: Callable[[], None] = lambda: None
    secret: bytes = field(default=b"", repr=False)
    near: frozenset[int] = frozenset()
    together: tuple[int, ...] = ()
    carrier: Carrier | None = None

    def read(self, key: str, deadline: float, late: str) -> bytes:
        """A value of the store, once it is there. Raises GroupError ``late`` after ``deadline`` (time.monotonic)."""
        while (found := self.store.get(f"{self.key}/{key}")) is None:
            self.check()
            if time.monotonic() > deadline:
                raise GroupError(late)
            time.sleep(_POLL_S)
        return found
