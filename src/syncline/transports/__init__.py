"""Transports: how bytes travel between the processes of a group. One file per message library.

A transport moves messages between process indices (workers first, servers after them). Messages are matched by sender
and tag; those with the same sender and tag are received in the order in which they were sent; all others in any order.
Nothing moves except inside calls: one thread per process, the progress thread, makes all calls but ``wake``. Nothing
blocks except ``poll``. Data are one-dimensional contiguous uint8 arrays and are not copied by the caller's side: a
buffer given to ``send`` must stay unchanged, one given to ``recv`` untouched, until its handle is done.

Messages of up to ``INLINE_BYTES`` travel at once and are kept by the receiver until they are asked for. Larger ones
wait at the sender until the receiver has asked, so that a fast peer cannot fill a slow one's memory and no order of
receives can deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
"""One-dimensional contiguous uint8 array: how data are passed to a transport."""

Words = NDArray[np.int64]
"""Table of int64: what compiled code and Python share."""

INLINE_BYTES = 64 * 1024
"""Messages up to this size travel without waiting for the receiver."""


class Handle:
    """One send, receive or collective (of all peers: -1) under way.

    ``done`` turns True inside some call of ``poll``, which also returns the handle once. ``nbytes`` is then the
    message's size and ``payload`` what a ``borrow`` received. ``error`` is set instead when the operation failed.
    ``owner`` is the caller's own and never looked at.
    """

    __slots__ = ("done", "error", "kind", "nbytes", "note", "owner", "payload", "peer", "tag")

    def __init__(
        self,
        kind: Literal["send", "recv", "borrow", "add", "allreduce"],
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
        self.note: Any = None  # the transport's own
        self.done = False
        self.error: Exception | None = None

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done else "under way"
        return f"<{self.kind} peer={self.peer} tag={self.tag} nbytes={self.nbytes} {state}>"


class Transport(Protocol):
    """What the exchange needs of a message library."""

    name: str
    rank: int
    world: int

    def lends_from(self, src: int) -> bool:
        """True when ``borrow`` shows the memory of that sender itself, who then waits until it is released."""
        ...

    def allocate(self, nbytes: int) -> Bytes:
        """Zeroed memory that this transport moves without an extra copy; it lives until ``close``."""
        ...

    def send(self, dst: int, tag: int, data: Bytes, priority: float = 0.0, owner: Any = None) -> Handle:
        """Start sending; the smallest priority goes first among what waits for the same peer, equal ones in order.

        Messages of one tag have one priority while any of them waits.
        """
        ...

    def recv(self, src: int, tag: int, into: Bytes, owner: Any = None) -> Handle:
        """Start receiving into memory of the caller; a longer message is an error."""
        ...

    def borrow(self, src: int, tag: int, nbytes: int, owner: Any = None) -> Handle:
        """Start receiving into memory of the transport; ``payload`` is valid until ``release``."""
        ...

    def release(self, handle: Handle) -> None:
        """Give back what a ``borrow`` received."""
        ...

    def poll(self, timeout: float) -> list[Handle]:
        """Move data; what has completed, after at most ``timeout`` seconds. A failed handle carries its error."""
        ...

    @property
    def idle(self) -> bool:
        """True when nothing waits to be written, acknowledgements included: the transport may be closed."""
        ...

    def wake(self) -> None:
        """Make a ``poll`` in another thread return now (or the next one at once)."""
        ...

    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Bytes sent to and received from each peer since the start, headers included."""
        ...

    @property
    def moved_bytes(self) -> int:
        """The sum of ``traffic``: it is asked whenever nothing has completed, to see whether anything moves at all."""
        ...

    def close(self) -> None:
        """Free everything; what is under way is dropped. Flush before by waiting for the handles."""
        ...


@runtime_checkable
class Adds(Protocol):
    """A transport that can add what it receives to an array while it comes in."""

    def adds_from(self, src: int, dtype: np.dtype[Any]) -> bool:
        """True when messages of that process can be added while they come in, so that they need no other memory.

        The same as long as the transport lives.
        """
        ...

    def add(self, src: int, tag: int, into: NDArray[Any], owner: Any = None) -> Handle:
        """Start receiving a message that is added to ``into``, which nobody else touches until it is done."""
        ...


@runtime_checkable
class HasAllreduce(Protocol):
    """A transport over a library with an allreduce of its own: what the architecture ``native`` hands over to."""

    def allreduce(self, key: int, array: NDArray[Any], owner: Any = None) -> Handle:
        """Sum ``array`` (one-dimensional, contiguous) over all ranks, in place.

        Calls with the same key belong together, whatever the order in which ranks make theirs. The handle fails with
        UsageError for element types that the library cannot add.
        """
        ...


class Store(Protocol):
    """The small notebook in which a message library's processes find each other. Every call has a time limit.

    Between processes it is the meeting (``wire.meeting_sockets``), which keeps little and for the start only.
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
        """Read a value; None when nobody has written it yet."""
        with self._lock:
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + amount
            return self._counters[key]


@dataclass(frozen=True)
class Place:
    """Where the ranks of a transport that makes its own connections meet (capability ``connection="own"``).

    ``address`` is the interface to listen on, ``store`` a notebook that all ranks see, ``key`` the prefix of what this
    transport writes there. Forming the connections may take ``timeout_s`` seconds; ``check``, to be called while
    waiting, raises when another rank has failed meanwhile. ``secret`` is the run's, which all ranks hold and no
    stranger: connections are proved with it, and it is never sent. ``near`` are the ranks that share this one's kernel
    and network namespace.
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
