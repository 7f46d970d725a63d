"""Transport between threads of one process, for tests, examples and checks of the simulator.

A ``Hub`` is the network; each rank takes its end of it. Messages are passed by reference: the receiver copies directly
from the sender's buffer and then notifies the sender, whose handle completes. Messages wait in the receiver's inbox,
the most urgent first. This transport passes the same contract tests as all others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from ..errors import UsageError
from ..registry import register
from ..wire.links import CONTROL
from . import Bytes, Handle
from ._operations import Operations, Receive


@dataclass
class _Message:
    """An entry of an inbox: a message, the notice that one was consumed, or that a rank is gone."""

    kind: Literal["data", "consumed", "gone"]
    src: int
    tag: int = 0
    data: Bytes | None = None
    handle: Handle | None = None
    priority: float = CONTROL


class _Inbox:
    """A queue of messages with a condition variable."""

    def __init__(self) -> None:
        self.bell = threading.Condition()
        self.queue: deque[_Message] = deque()
        self.woken = False
        self._priorities: set[float] = set()  # priorities of the queued data

    def put(self, message: _Message) -> None:
        with self.bell:
            self.queue.append(message)
            if message.kind == "data":
                self._priorities.add(message.priority)
            self.bell.notify()

    def take(self, timeout: float) -> list[_Message]:
        with self.bell:
            if not self.queue and not self.woken and timeout > 0:
                self.bell.wait(timeout)
            self.woken = False
            found = list(self.queue)
            self.queue.clear()
            if len(self._priorities) > 1:
                found.sort(key=attrgetter("priority"))
            self._priorities.clear()
            return found


class Hub:
    """The network of one process: an inbox per rank."""

    def __init__(self, world: int) -> None:
        if world < 1:
            raise UsageError(f"a hub needs at least one rank, got {world}")
        self.world = world
        self.inboxes = [_Inbox() for _ in range(world)]

    def transport(self, rank: int) -> InProc:
        """The end of that rank, for use by one thread."""
        if not 0 <= rank < self.world:
            raise UsageError(f"rank {rank} is not in a hub of {self.world}")
        return InProc(self, rank)

    def kill(self, rank: int) -> None:
        """Let a rank vanish like a process that dies."""
        for peer, inbox in enumerate(self.inboxes):
            if peer != rank:
                inbox.put(_Message("gone", rank, priority=inf))


@register("transports", "inproc", one_host=True, hub=Hub)
class InProc:
    """Between the threads of one process: one rank's end of a Hub."""

    name = "inproc"

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank = rank
        self.world = hub.world
        self._hub = hub
        peers = [peer for peer in range(hub.world) if peer != rank]
        self._operations = Operations(rank, peers, "rank {} is gone", self._deliver)
        self._sent = dict.fromkeys(peers, 0)
        self._received = dict(self._sent)

    def lends_from(self, src: int) -> bool:  # noqa: ARG002
        """Always True: messages are references."""
        return True

    def allocate(self, nbytes: int) -> Bytes:
        return np.zeros(nbytes, np.uint8)

    def send(self, dst: int, tag: int, data: Bytes, priority: float = 0.0, owner: Any = None) -> Handle:
        """The peer gets a reference; done when it has copied the data."""
        handle = Handle("send", dst, tag, data.nbytes, owner)
        if not self._operations.admit(handle):
            return handle
        self._sent[dst] += data.nbytes
        self._hub.inboxes[dst].put(_Message("data", self.rank, tag, data, handle, priority))
        return handle

    def recv(self, src: int, tag: int, into: Bytes, owner: Any = None) -> Handle:
        return self._post(Receive(Handle("recv", src, tag, into.nbytes, owner), into))

    def borrow(self, src: int, tag: int, nbytes: int, owner: Any = None) -> Handle:
        """The payload is the sender's buffer itself."""
        return self._post(Receive(Handle("borrow", src, tag, nbytes, owner)))

    def release(self, handle: Handle) -> None:
        message: _Message = handle.note
        handle.payload = handle.note = None
        self._consume(message)

    def poll(self, timeout: float) -> list[Handle]:
        self._operations.check_open()
        for message in self._hub.inboxes[self.rank].take(0.0 if self._operations.completed else timeout):
            self._handle(message)
        return self._operations.take()

    @property
    def idle(self) -> bool:
        """Always True: messages are delivered at once."""
        return True

    def wake(self) -> None:
        inbox = self._hub.inboxes[self.rank]
        with inbox.bell:
            inbox.woken = True
            inbox.bell.notify()

    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Payload bytes; there are no headers."""
        return dict(self._sent), dict(self._received)

    @property
    def moved_bytes(self) -> int:
        return sum(self._sent.values()) + sum(self._received.values())

    def close(self) -> None:
        """Peers that wait for this rank get an error."""
        if not self._operations.closed:
            self._operations.closed = True
            self._hub.kill(self.rank)

    def _post(self, receive: Receive) -> Handle:
        self._operations.post(receive)
        return receive.handle

    def _handle(self, message: _Message) -> None:
        if message.kind == "data":
            self._operations.arrive(message.src, message.tag, message)
        elif message.kind == "consumed":
            assert message.handle is not None
            self._operations.finish(message.handle)
        else:
            self._operations.lose(message.src)

    def _deliver(self, receive: Receive, message: _Message) -> None:
        assert message.data is not None
        self._received[message.src] += message.data.nbytes
        if self._operations.deliver(receive, message.data, message):
            self._consume(message)

    def _consume(self, message: _Message) -> None:
        self._hub.inboxes[message.src].put(_Message("consumed", self.rank, handle=message.handle))
