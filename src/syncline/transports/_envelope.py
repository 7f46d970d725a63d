"""Messages with 64-bit tags over a library that has its own, smaller, idea of tags: what libraries share.

Owns matching, buffers, the end of peers and the order of collectives. Does not know how a library sends, and does no
I/O: a library's part is five methods that move *frames* and *bodies*, and a sixth where it has an allreduce of its own.

* A frame is one small message, a header of 24 bytes and up to ``INLINE_BYTES`` behind it. The frames between two ranks
  arrive in the order in which they were sent; that order is what keeps messages of one tag in order. A message of up
  to ``INLINE_BYTES`` is one frame.
* The body of a larger message goes straight from the sender's buffer into the receiver's, on a *slot*, a number that
  its frame announces and that every library has a tag for. The receive of a body is posted when the receive that it
  belongs to has been: until then the library's own rendezvous holds the body back at the sender. A library that cannot
  hold it back, or cannot say when it has been taken, is *asked* for it by one more frame (``asks``).
* Libraries know no priority: what waits does so in an outbox. From the first message on whose priority is not 0
  bodies are *offered*: each is asked for, and when it is its turn one more frame says that it comes. Only then do both
  ends give it to the library: what that has been given flows, and in the order in which it was given.
* A library matches collectives by the order in which they are called (``Turns``). Ranks may start theirs in different
  orders, so rank 0 tells the others its own by frames: at most one frame of latency, which overlaps with the wait for
  the others.
* A rank that closes says so in a last frame, so what it sent before still arrives, and what waits for it fails. The
  frame tells in how many collectives the rank has been: others do not wait for it in a further one. A rank that dies
  says nothing: the watcher of the session finds out.

What frames say is checked before it is believed; ``poll`` raises a ProtocolError that names the peer. A body that does
not fit its receive ends that receive; one of up to 1 GiB is taken from the library and forgotten.

Traffic of a message: its bytes and 24 of header; 24 more in either direction where bodies are asked for, and 24 more
where they are offered.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ProtocolError, UsageError
from ..kernels.cpu import add_all_into
from ..wire.links import CONTROL, broken
from ..wire.scratch import Scratch, can_add
from . import INLINE_BYTES, Bytes, Handle, HasAllreduce
from ._bell import Bell
from ._frames import (
    ANNOUNCED,
    ASKED,
    COMING,
    END,
    HEADER_BYTES,
    OFFERED,
    SLOTS,
    TURN,
    WHOLE,
    Event,
    Outbox,
    read,
    written,
)
from ._operations import UNCLAIMED_BYTES, Matcher, Operations, Receive

_MOST_TURNS = 1 << 16
"""How many collectives rank 0 may be ahead."""


class Turns:
    """The collectives that rank 0 has begun, those that this rank has come to, and those of both that run.

    ``begun`` counts the last.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._order: deque[int] = deque()  # keys, as rank 0 starts them
        self._ready: dict[int, tuple[Handle, NDArray[Any]]] = {}
        self._running: dict[int, Handle] = {}  # by number
        self.begun = 0

    def check_new(self, key: int) -> None:
        """Raise UsageError for a key that this rank has come to already."""
        if key in self._ready:
            raise UsageError(f"rank {self._rank} has an allreduce with key {key} under way already")

    def come(self, key: int, handle: Handle, array: NDArray[Any]) -> None:
        """This rank has come to one."""
        self._ready[key] = handle, array

    @property
    def full(self) -> bool:
        """Whether rank 0 is as far ahead as it may be."""
        return len(self._order) >= _MOST_TURNS

    def add(self, key: int) -> None:
        """It is the next one's turn, says rank 0."""
        self._order.append(key)

    def take(self) -> tuple[Handle, NDArray[Any]] | None:
        """The next one that runs from now on; None where this rank or rank 0 has not come to it."""
        if not self._order or self._order[0] not in self._ready:
            return None
        handle, array = self._ready.pop(self._order.popleft())
        handle.note = self.begun
        self._running[self.begun] = handle
        self.begun += 1
        return handle, array

    def ended(self, handle: Handle) -> None:
        """One has ended, or will never begin."""
        self._running.pop(handle.note, None)

    def left_out(self, begun: int) -> list[Handle]:
        """Those that run and that a peer is not in, which has been in so many."""
        return [handle for number, handle in self._running.items() if number >= begun]

    def give_up(self) -> list[Handle]:
        """Those that have not begun, and never will."""
        found = [handle for handle, _ in self._ready.values()]
        self._ready.clear()
        return found


@dataclass
class _Message:
    """What a frame brought: the message itself in scratch memory, or the slot on which its body comes, or may."""

    size: int
    frame: Bytes | None = None
    slot: int = 0
    offered: bool = False


class Enveloped(ABC):
    """The transport of one rank over a library's own messages; see the head of this file for what a library gives."""

    name: ClassVar[str]
    asks: ClassVar[bool]
    """True when a body is sent only once its receive has been posted."""
    answers: ClassVar[bool]
    """True when a peer that has ended still waits for this rank's end."""
    adds: ClassVar[bool] = False
    """True when a body can be added while it comes in (``_pull_sum``)."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.scratch = Scratch()
        self.bell = Bell()
        self._peers = [peer for peer in range(world) if peer != rank]
        self._operations = Operations(rank, self._peers, "rank {} has ended its part")
        self._matcher: Matcher[Receive, _Message] = Matcher()
        self._slots = dict.fromkeys(self._peers, 0)
        self._bodies: set[tuple[int, int]] = set()  # (peer, slot) of bodies that have not left yet
        self._unasked: dict[tuple[int, int], Event] = {}  # (peer, slot): how bodies go that are not asked for yet
        self._promised: dict[tuple[int, int], Event] = {}  # (peer, slot): how bodies are taken that were asked for
        self._outbox = Outbox(self._peers)
        self._turns = Turns(rank)
        self._sending = dict.fromkeys(self._peers, 0)  # frames and bodies that the library has not sent yet
        self._sent = dict.fromkeys(self._peers, 0)
        self._received = dict.fromkeys(self._peers, 0)
        self._pid = os.getpid()

    # The library's part, all called from the progress thread.

    @abstractmethod
    def _put(self, peer: int, frame: Bytes, done: Event) -> None:
        """Send a frame, which is the library's from now on; frames to one peer keep their order."""

    @abstractmethod
    def _push(self, peer: int, slot: int, body: Bytes, done: Event) -> None:
        """Send a body; ``done()`` when its buffer is the caller's again."""

    @abstractmethod
    def _pull(self, peer: int, slot: int, into: Bytes, done: Event) -> None:
        """Receive a body of exactly the size of ``into``; ``done()`` when it is there."""

    @abstractmethod
    def _move(self, timeout: float) -> None:
        """Let the library move data; return when something completed, the bell rang, or the time is up.

        Frames that have come are given to ``_came``.
        """

    @abstractmethod
    def _leave(self) -> None:
        """Free what the library holds; in a forked child, let go of it without a word (see ``_forked``)."""

    def _pull_sum(self, peer: int, slot: int, into: NDArray[Any], done: Event) -> None:
        """Receive a body of exactly the size of ``into`` and add it there; for a library whose class says ``adds``."""
        raise NotImplementedError

    def _reduce(self, array: NDArray[Any], handle: Handle) -> None:
        """Begin the library's allreduce (sum, in place); ``_finish(handle)`` when it is done. Calls agree in order.

        For a library that has one; its class says ``allreduce = Enveloped._allreduce``.
        """
        raise NotImplementedError

    # The transport protocol.

    def lends_from(self, src: int) -> bool:  # noqa: ARG002
        """Never: the library has copied what arrives."""
        return False

    def allocate(self, nbytes: int) -> Bytes:
        """Plain memory: the libraries read and write any."""
        return np.zeros(nbytes, np.uint8)

    def send(self, dst: int, tag: int, data: Bytes, priority: float = 0.0, owner: Any = None) -> Handle:
        """A copy goes in one frame, or the body is announced."""
        handle = Handle("send", dst, tag, data.nbytes, owner)
        if not self._operations.admit(handle):
            return handle
        self._outbox.ranked = self._outbox.ranked or priority != 0.0
        if data.nbytes <= INLINE_BYTES:
            self._tell(dst, WHOLE, tag, data=data, priority=priority)
            self._finish(handle)
            return handle
        slot = self._free_slot(dst)
        if slot is None:
            text = f"{SLOTS} large messages to rank {dst} are under way: use fewer and larger buckets"
            self._finish(handle, UsageError(text))
            return handle
        self._bodies.add((dst, slot))
        handle.note = slot
        offers, push = self._outbox.ranked, partial(self._push, dst, slot, data, partial(self._pushed, handle))
        self._tell(dst, OFFERED if offers else ANNOUNCED, tag, slot=slot, size=data.nbytes, priority=priority)
        if offers:
            self._unasked[dst, slot] = partial(self._queue, handle, data, priority)
        elif self.asks:
            self._unasked[dst, slot] = push
        else:
            push()
        return handle

    def _queue(self, handle: Handle, data: Bytes, priority: float) -> None:
        """A body that was offered has been asked for: it goes when it is its turn."""
        peer, slot = handle.peer, handle.note

        def begin(done: Event) -> None:
            self._put(peer, self._frame(peer, COMING, slot=slot), _nothing)
            self._push(peer, slot, data, done)

        self._outbox.put(peer, priority, data.nbytes, begin, partial(self._pushed, handle))

    def _free_slot(self, peer: int) -> int | None:
        """The slot for the next body to that peer: the one used longest ago among those that are not in use."""
        for _ in range(SLOTS):
            slot = self._slots[peer] = self._slots[peer] % SLOTS + 1
            if (peer, slot) not in self._bodies:
                return slot
        return None

    def recv(self, src: int, tag: int, into: Bytes, owner: Any = None) -> Handle:
        return self._post(Receive(Handle("recv", src, tag, into.nbytes, owner), into))

    def borrow(self, src: int, tag: int, nbytes: int, owner: Any = None) -> Handle:
        return self._post(Receive(Handle("borrow", src, tag, nbytes, owner)))

    def adds_from(self, src: int, dtype: np.dtype[Any]) -> bool:  # noqa: ARG002
        """Where the library's messages can be added from its memory, and the compiled code knows the type."""
        return self.adds and can_add(dtype)

    def add(self, src: int, tag: int, into: NDArray[Any], owner: Any = None) -> Handle:
        return self._post(Receive(Handle("add", src, tag, into.nbytes, owner), adds=into))

    def release(self, handle: Handle) -> None:
        self.scratch.give(handle.note)
        handle.payload = handle.note = None

    def _allreduce(self, key: int, array: NDArray[Any], owner: Any = None) -> Handle:
        """What a transport over a library with an allreduce has as ``allreduce``."""
        handle = Handle("allreduce", -1, key, array.nbytes, owner)
        operations = self._operations
        operations.check_open()
        self._turns.check_new(key)
        operations.under_way.add(handle)
        if operations.gone:
            self._finish(handle, operations.lost(min(operations.gone)))
            return handle
        self._turns.come(key, handle, array)
        if self.rank == 0:
            for peer in self._peers:
                self._tell(peer, TURN, key)
            self._turns.add(key)
        self._take_turns()
        return handle

    def poll(self, timeout: float) -> list[Handle]:
        self._operations.check_open()
        self._move(0.0 if self._operations.completed else timeout)
        return self._operations.take()

    @property
    def idle(self) -> bool:
        """True when the library has nothing left to send to those who are still there."""
        left = [peer for peer in self._peers if peer not in self._operations.gone]
        return not any(self._sending[peer] or self._outbox.holds(peer) for peer in left)

    def wake(self) -> None:
        self.bell.ring()

    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Bytes of messages with their headers; what the library adds, or its collectives move, it does not tell."""
        return dict(self._sent), dict(self._received)

    @property
    def moved_bytes(self) -> int:
        return sum(self._sent.values()) + sum(self._received.values())

    def close(self) -> None:
        """The others are told that this rank ends."""
        if self._operations.closed:
            return
        self._operations.closed = True
        if not self._forked:
            self._outbox.ranked = False
            for peer in self._peers:
                self._outbox.empty(peer)
                if self.answers or peer not in self._operations.gone:
                    self._tell(peer, END, self._turns.begun)
        self._leave()

    # For the library's part.

    @property
    def _forked(self) -> bool:
        """True in a process that was forked from the transport's own: the library is the parent's."""
        return os.getpid() != self._pid

    def _came(self, peer: int, frame: Bytes, nbytes: int) -> None:
        """A frame has arrived in a buffer of ``scratch``, which is given back in time."""
        self._received[peer] += nbytes
        try:
            self._understand(peer, frame, nbytes)
        except ProtocolError:
            self._lose(peer)
            raise

    def _understand(self, peer: int, frame: Bytes, nbytes: int) -> None:
        """Act on a frame; raises ProtocolError for one that no rank of this version sends."""
        kind, slot, tag, size = read(peer, frame, nbytes)
        if kind == WHOLE:
            self._arrived(peer, tag, _Message(size, frame=frame))
            return
        self.scratch.give(frame)
        if kind in (ANNOUNCED, OFFERED) and 1 <= slot <= SLOTS and size > INLINE_BYTES:
            self._arrived(peer, tag, _Message(size, slot=slot, offered=kind == OFFERED))
        elif kind == ASKED and (peer, slot) in self._unasked:
            self._unasked.pop((peer, slot))()
        elif kind == COMING and (peer, slot) in self._promised:
            self._promised.pop((peer, slot))()
        elif kind == TURN and peer == 0 and isinstance(self, HasAllreduce) and not self._turns.full:
            self._turns.add(tag)
            self._take_turns()
        elif kind == END:
            self._ended(peer, tag)
        else:
            raise broken(peer, f"a frame of kind {kind} came (slot {slot}, {size} bytes) that has no meaning now")

    def _ended(self, peer: int, begun: int) -> None:
        """A peer has said that it ends, after so many collectives; what it took before has to be noticed first."""
        for handle in self._turns.left_out(begun):
            self._finish(handle, self._operations.lost(peer))
        self._lose(peer)

    def _pushed(self, handle: Handle) -> None:
        """A body has left."""
        self._bodies.discard((handle.peer, handle.note))
        self._sent[handle.peer] += handle.nbytes
        self._finish(handle)

    def _finish(self, handle: Handle, error: Exception | None = None) -> None:
        if handle.kind == "allreduce":
            self._turns.ended(handle)
        self._operations.finish(handle, error)

    def _lose(self, peer: int) -> None:
        """A peer is gone: fail what waits for it, collectives not begun included; the library ends those that are."""
        if peer in self._operations.gone:
            return
        self._matcher.forget(peer)
        self._outbox.forget(peer)
        for bodies in (self._unasked, self._promised):
            for key in [key for key in bodies if key[0] == peer]:
                del bodies[key]
        for handle in self._turns.give_up():
            self._finish(handle, self._operations.lost(peer))
        self._operations.lose(peer)

    def _add_in_pieces(
        self, into: NDArray[Any], piece_bytes: int, fetch: Callable[[int, Bytes, Event], None], done: Event
    ) -> None:
        """A body whose pieces come into memory that stays in the cache, and are added from there, two ahead.

        ``fetch(at, memory, event)`` begins to bring the bytes from ``at`` on.
        """
        step = piece_bytes // into.itemsize
        starts = deque(range(0, into.size, step))
        left = len(starts)

        def begin() -> None:
            start = starts.popleft()
            part = into[start : start + step]
            memory = self.scratch.take(part.nbytes)
            fetch(start * into.itemsize, memory[: part.nbytes], partial(add, part, memory))

        def add(part: NDArray[Any], memory: Bytes) -> None:
            nonlocal left
            add_all_into(part, [memory[: part.nbytes].view(part.dtype)])
            self.scratch.give(memory)
            left -= 1
            if starts:
                begin()
            elif left == 0:
                done()

        for _ in range(min(2, left)):
            begin()

    # Between the two.

    def _tell(
        self,
        peer: int,
        kind: int,
        tag: int = 0,
        *,
        slot: int = 0,
        size: int = 0,
        data: Bytes | None = None,
        priority: float = CONTROL,
    ) -> None:
        frame = self._frame(peer, kind, tag, slot=slot, size=size, data=data)
        self._outbox.put(peer, priority, frame.nbytes, partial(self._put, peer, frame), _nothing)

    def _frame(
        self, peer: int, kind: int, tag: int = 0, *, slot: int = 0, size: int = 0, data: Bytes | None = None
    ) -> Bytes:
        frame = written(kind, tag, slot, size, data)
        self._sent[peer] += frame.nbytes
        return frame

    def _post(self, receive: Receive) -> Handle:
        message = self._operations.post(receive, self._matcher)
        if message is not None:
            self._deliver(receive, message)
        return receive.handle

    def _arrived(self, peer: int, tag: int, message: _Message) -> None:
        kept = 0 if message.frame is None else message.frame.nbytes
        receive = self._matcher.arrive(peer, tag, message, kept)
        if receive is not None:
            self._deliver(receive, message)

    def _deliver(self, receive: Receive, message: _Message) -> None:
        """A message has met its receive: its bytes are here, or have to be fetched."""
        handle = receive.handle
        fits = message.size <= handle.nbytes
        if not fits:
            self._operations.refuse(handle, message.size)
        else:
            handle.nbytes = message.size
            if receive.adds is not None and message.size % receive.adds.itemsize:
                text = f"{message.size} bytes came to be added to elements of {receive.adds.itemsize}"
                raise broken(handle.peer, text)
        if message.frame is None:
            if fits or message.size <= UNCLAIMED_BYTES:
                self._fetch(receive, message, fits)
            return
        data = message.frame[HEADER_BYTES : HEADER_BYTES + message.size]
        if fits and receive.into is None and receive.adds is None:
            handle.payload, handle.note = data, message.frame
        else:
            if fits and receive.adds is not None:
                part = data.view(receive.adds.dtype)
                add_all_into(receive.adds[: part.size], [part])
            elif fits and receive.into is not None:
                receive.into[: message.size] = data
            self.scratch.give(message.frame)
        self._finish(handle)

    def _fetch(self, receive: Receive, message: _Message, fits: bool) -> None:
        """Ask for a body where that has to be, and receive it; who has ended answers no more."""
        if (message.offered or self.asks) and receive.handle.peer in self._operations.gone:
            self._finish(receive.handle, self._operations.lost(receive.handle.peer))
            return
        take = partial(self._take, receive, message, fits)
        if message.offered:
            self._promised[receive.handle.peer, message.slot] = take
        else:
            take()
        if message.offered or self.asks:
            self._tell(receive.handle.peer, ASKED, receive.handle.tag, slot=message.slot)

    def _take(self, receive: Receive, message: _Message, fits: bool) -> None:
        """Receive a body; one that does not fit goes to scratch memory and is forgotten."""
        handle, size = receive.handle, message.size
        in_place = receive.into if fits else None
        summed = receive.adds if fits else None
        buffer = self.scratch.take(size) if in_place is None and summed is None else None

        def done() -> None:
            self._received[handle.peer] += size
            if buffer is not None and handle.done:  # it did not fit, or the peer was given up
                self.scratch.give(buffer)
            elif buffer is not None:
                handle.payload, handle.note = buffer[:size], buffer
            self._finish(handle)

        if summed is not None:
            self._pull_sum(handle.peer, message.slot, summed[: size // summed.itemsize], done)
            return
        into = in_place if buffer is None else buffer
        assert into is not None
        self._pull(handle.peer, message.slot, into[:size], done)

    def _take_turns(self) -> None:
        """Begin the collectives that rank 0 has begun, and this rank has come to, in rank 0's order."""
        while (turn := self._turns.take()) is not None:
            handle, array = turn
            self._reduce(array, handle)


def _nothing() -> None:
    """What is done when a frame has been sent: it was a copy."""
