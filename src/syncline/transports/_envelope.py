"""The common part of transports over message libraries, whose tags are smaller than 64 bits or missing.

This module owns matching, buffers, the end of peers and the order of collectives. It does no I/O. A library moves
*frames* and *bodies*. If its messages have tags it implements ``_send`` and ``_receive``, otherwise ``_put``, ``_push``
and ``_pull``. It also implements ``_leave``, ``_move`` unless its own threads report events, and ``_collect`` if it has
its own collectives.

* A frame is one small message: a header of 24 bytes and up to ``INLINE_BYTES`` of data. Frames between two ranks arrive
  in the order in which they were sent, which keeps messages of one tag in order. A message of up to ``INLINE_BYTES`` is
  a single frame.
* The body of a larger message goes directly from the sender's buffer to the receiver's, on a *slot*: a number that its
  frame announces and that every library can use as a tag. The body's receive is posted when the matching receive has
  been. Until then the library's rendezvous holds the body back at the sender. A library that cannot hold a body back,
  or cannot tell when it was taken, sends bodies only on request, which is one more frame (``asks``).
* Libraries have no priorities, so waiting data stay in an outbox. From the first message with a priority other than 0
  on, bodies are *offered*: the receiver requests each one, and the sender announces its turn by one more frame. Only
  then do both ends pass it to the library, whose own queue therefore never blocks and keeps its order.
* A library matches collectives by the order of the calls (``Turns``). Ranks may start theirs in different orders, so
  the first of their ranks sends one order to the others in frames. Allreduces are in the order in which the first rank
  starts them. This costs at most the latency of one frame, which overlaps with the wait for the other ranks. A
  reduce-scatter or an all-gather gets its turn once all its ranks have reached it, which the others tell the first rank
  in a frame. This costs the latency of one more frame, and none of them ever holds up another: a rank may reach one
  only after the end of another, on this host or, through the messages between hosts, on another one.
* A rank that closes sends a last frame. Its earlier messages still arrive, and operations that wait for it fail. The
  frame contains the number of collectives that the rank took part in, so that no rank waits for it in a later one. A
  rank that dies sends nothing; the session's watcher detects its death.

Received headers are validated; for an invalid one ``poll`` raises a ProtocolError that names the peer. A body that does
not fit its receive fails that receive; bodies of up to 1 GiB are then received and discarded.

Traffic of a message: its bytes and a header of 24; 24 more in each direction if bodies are requested, and another 24 if
they are offered.
"""

from __future__ import annotations

import ctypes
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ProtocolError, UsageError
from ..kernels.cpu import add_all_into
from ..wire.bell import Bell
from ..wire.links import CONTROL, broken
from ..wire.scratch import Scratch, can_add
from . import INLINE_BYTES, Bytes, Handle, HasAllreduce, HasCollectives, _frames
from ._frames import HEADER_BYTES, SLOTS, Event, Outbox
from ._operations import UNCLAIMED_BYTES, Operations, Receive

_MOST_TURNS = 1 << 16
"""The most collectives that the first rank may be ahead of another, or another of it."""

_SMALL_BYTES = 4096
"""Received frames up to this size are kept in memory of their own size."""


class Call(NamedTuple):
    """A collective: its goal, and the part of each of its ranks, or the one array of an allreduce."""

    goal: Literal["allreduce", "reduce_scatter", "all_gather"]
    parts: Sequence[NDArray[Any]]


class Turns:
    """The order of collectives: those that have got their turn, that this rank has reached, and the running ones.

    ``begun`` counts the collectives that have started to run.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._reached: dict[int, set[int]] = {}  # at the first rank: key -> the ranks that have reached it
        self._order: deque[int] = deque()  # keys, in the first rank's order
        self._ready: dict[int, tuple[Handle, Call]] = {}
        self._running: dict[int, Handle] = {}  # by the number of the collective
        self.begun = 0

    def check_new(self, key: int) -> None:
        """Raise UsageError for a key that this rank has in flight already."""
        if key in self._ready:
            raise UsageError(f"rank {self._rank} has a collective with key {key} under way already")

    def come(self, key: int, handle: Handle, call: Call) -> None:
        """Record that this rank has reached a collective."""
        self._ready[key] = handle, call

    def reached(self, key: int, rank: int) -> bool:
        """Record at the first rank that a rank has reached a collective. Whether it is the last one."""
        ranks = self._reached.setdefault(key, set())
        ranks.add(rank)
        if len(ranks) < self._ranks:
            return False
        del self._reached[key]
        return True

    def may_reach(self, key: int, rank: int) -> bool:
        """Whether a rank may be the next to reach a collective: it has not before, nor is it too far ahead."""
        ranks = self._reached.get(key)
        return len(self._reached) < _MOST_TURNS if ranks is None else rank not in ranks

    @property
    def known(self) -> int:
        """The number of collectives that have got their turn."""
        return self.begun + len(self._order)

    @property
    def full(self) -> bool:
        """Whether the first rank is as far ahead as it may be."""
        return len(self._order) >= _MOST_TURNS

    def add(self, key: int) -> None:
        """Append the next collective of the first rank's order."""
        self._order.append(key)

    def take(self) -> tuple[Handle, Call] | None:
        """Start the next collective. None if none has got its turn, or this rank has not reached it."""
        if not self._order or self._order[0] not in self._ready:
            return None
        handle, call = self._ready.pop(self._order.popleft())
        handle.note = self.begun
        self._running[self.begun] = handle
        self.begun += 1
        return handle, call

    def ended(self, handle: Handle) -> None:
        """Record that a collective has ended or will never start."""
        self._running.pop(handle.note, None)

    def left_out(self, begun: int) -> list[Handle]:
        """The running collectives without a peer that took part in only ``begun`` of them."""
        return [handle for number, handle in self._running.items() if number >= begun]

    def give_up(self) -> list[Handle]:
        """The collectives that have not started and never will."""
        found = [handle for handle, _ in self._ready.values()]
        self._ready.clear()
        self._reached.clear()
        return found


@dataclass
class Body:
    """A body to send or receive on a slot. ``at`` counts the bytes that have left or arrived.

    With ``adds`` the elements of that type are added to ``data``. Call ``done()`` when a sent body's memory is free
    again, or when a received one is complete.
    """

    slot: int
    data: Bytes
    done: Event
    adds: np.dtype[Any] | None = None
    at: int = 0

    def put(self, at: int, data: Bytes) -> None:
        """Store or add received bytes."""
        into = self.data[at : at + data.nbytes]
        if self.adds is None:
            into[:] = data
        else:
            part = data.view(self.adds)
            add_all_into(into.view(self.adds), [part if part.flags.aligned else part.copy()])


@dataclass
class _Message:
    """A received message: its frame in scratch memory, or the slot of its announced or offered body."""

    size: int
    frame: Bytes | None = None
    slot: int = 0
    offered: bool = False


class Enveloped(ABC):
    """One rank's transport over a library's messages. The module's docstring describes what a library implements."""

    name: ClassVar[str]
    asks: ClassVar[bool]
    """Whether a body is sent only after its receive has been posted."""
    answers: ClassVar[bool]
    """Whether a peer that has ended still waits for this rank's end."""
    adds: ClassVar[bool] = False
    """Whether a body can be added while it arrives."""
    piece_bytes: ClassVar[int] = 1 << 62
    """The size of the messages in which ``_send`` and ``_receive`` move a body."""

    def __init__(
        self, rank: int, world: int, bell: Bell | None = None, together: tuple[int, ...] = (), *, apart: bool = False
    ) -> None:
        self.rank = rank
        self.world = world
        self.together = together or tuple(range(world))
        """The ranks of the library's collectives. If ``apart``, messages reach no others."""
        self.scratch = Scratch()
        self.bell = bell or Bell()
        self._events: deque[Event] = deque()  # reported by other threads
        self._peers = [peer for peer in (self.together if apart else range(world)) if peer != rank]
        self._operations = Operations(rank, self._peers, "rank {} has ended its part", self._deliver)
        self._slots = dict.fromkeys(self._peers, 0)
        self._bodies: set[tuple[int, int]] = set()  # (peer, slot) of bodies that have not left yet
        self._unasked: dict[tuple[int, int], Event] = {}  # (peer, slot) -> sends a body that has not been requested yet
        self._promised: dict[tuple[int, int], Event] = {}  # (peer, slot) -> receives a requested body
        self._outbox = Outbox(self._peers)
        self._turns = Turns(rank, len(self.together))
        self._ends: list[tuple[int, int]] = []  # last frames that came before the turn of a collective of their sender
        self._sending = dict.fromkeys(self._peers, 0)  # frames and bodies that the library has not sent yet
        self._sent = dict.fromkeys(self._peers, 0)
        self._received = dict.fromkeys(self._peers, 0)
        self._pid = os.getpid()

    # Implemented by the library; called from the progress thread

    def _send(self, peer: int, slot: int, data: Bytes, done: Event) -> None:
        """Send a message with a tag. Call ``done()`` when the caller may use its memory again."""
        raise NotImplementedError

    def _receive(self, peer: int, slot: int, into: Bytes, done: Event) -> None:
        """Receive a message with that tag and exactly the size of ``into``. Call ``done()`` when it has arrived."""
        raise NotImplementedError

    def _put(self, peer: int, frame: Bytes, done: Event) -> None:
        """Send a frame, whose memory then belongs to the library. Frames to one peer keep their order."""
        self._send(peer, 0, frame, done)

    def _push(self, peer: int, body: Body) -> None:
        """Send a body."""
        starts = range(0, body.data.nbytes, self.piece_bytes)
        ended = countdown(len(starts), body.done)
        for at in starts:
            self._send(peer, body.slot, body.data[at : at + self.piece_bytes], ended)

    def _pull(self, peer: int, body: Body) -> None:
        """Receive a body of exactly the size of its memory. Only libraries that declare ``adds`` get sums."""
        self._pull_pieces(body, self.piece_bytes, lambda _, into, done: self._receive(peer, body.slot, into, done))

    def _move(self, timeout: float) -> None:
        """Let the library move data. Return when something completes, the bell rings, or the time is up.

        Pass received frames to ``_came``.
        """
        if not self._events:
            self.bell.wait(timeout)
        while self._events:
            self._events.popleft()()

    @abstractmethod
    def _leave(self) -> None:
        """Free the library's resources. In a forked child (``_forked``), drop them without any communication."""

    def _collect(self, call: Call, handle: Handle) -> None:
        """Start a collective of the library (sums, in place), and call ``_finish(handle)`` at its end.

        All ranks ``together`` call it in one order. Only for libraries with collectives; their class declares
        ``allreduce = Enveloped._allreduce``, and likewise the others of ``HasCollectives``.
        """
        raise NotImplementedError

    # The transport protocol

    def lends_from(self, src: int) -> bool:  # noqa: ARG002
        """Always False: the data are a copy in the library's or this transport's memory."""
        return False

    def allocate(self, nbytes: int) -> Bytes:
        """Ordinary memory: the libraries can use any."""
        return np.zeros(nbytes, np.uint8)

    def send(self, dst: int, tag: int, data: Bytes, priority: float = 0.0, owner: Any = None) -> Handle:
        """A small message is copied into one frame; a larger one is announced."""
        handle = Handle("send", dst, tag, data.nbytes, owner)
        if not self._operations.admit(handle):
            return handle
        self._outbox.ranked = self._outbox.ranked or priority != 0.0
        if data.nbytes <= INLINE_BYTES:
            self._tell(dst, _frames.WHOLE, tag, data=data, priority=priority)
            self._finish(handle)
            return handle
        slot = self._free_slot(dst)
        if slot is None:
            text = f"{SLOTS} large messages to rank {dst} are under way: use fewer and larger buckets"
            self._finish(handle, UsageError(text))
            return handle
        self._bodies.add((dst, slot))
        handle.note = slot
        push = partial(self._push, dst, Body(slot, data, partial(self._pushed, handle)))
        kind = _frames.OFFERED if self._outbox.ranked else _frames.ANNOUNCED
        self._tell(dst, kind, tag, slot=slot, size=data.nbytes, priority=priority)
        if self._outbox.ranked:
            self._unasked[dst, slot] = partial(self._queue, handle, data, priority)
        elif self.asks:
            self._unasked[dst, slot] = push
        else:
            push()
        return handle

    def _queue(self, handle: Handle, data: Bytes, priority: float) -> None:
        """Queue a requested body for its turn."""
        peer, slot = handle.peer, handle.note

        def begin(done: Event) -> None:
            self._put(peer, self._frame(peer, _frames.COMING, slot=slot), _nothing)
            self._push(peer, Body(slot, data, done))

        self._outbox.put(peer, priority, data.nbytes, begin, partial(self._pushed, handle))

    def _free_slot(self, peer: int) -> int | None:
        """The least recently used free slot to a peer, None if all are in use."""
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
        """If the library's messages can be added from its memory and the compiled code supports the type."""
        return self.adds and can_add(dtype)

    def add(self, src: int, tag: int, into: NDArray[Any], owner: Any = None) -> Handle:
        return self._post(Receive(Handle("add", src, tag, into.nbytes, owner), adds=into))

    def release(self, handle: Handle) -> None:
        self.scratch.give(handle.note)
        handle.payload = handle.note = None

    def _allreduce(self, key: int, array: NDArray[Any], owner: Any = None) -> Handle:
        """The ``allreduce`` of transports whose library has one."""
        return self._collective(key, Call("allreduce", (array,)), owner)

    def _reduce_scatter(self, key: int, parts: Sequence[NDArray[Any]], owner: Any = None) -> Handle:
        """The ``reduce_scatter`` of transports whose library has one."""
        return self._collective(key, Call("reduce_scatter", parts), owner)

    def _all_gather(self, key: int, parts: Sequence[NDArray[Any]], owner: Any = None) -> Handle:
        """The ``all_gather`` of transports whose library has one."""
        return self._collective(key, Call("all_gather", parts), owner)

    def _collective(self, key: int, call: Call, owner: Any) -> Handle:
        handle = Handle(call.goal, -1, key, sum(part.nbytes for part in call.parts), owner)
        operations = self._operations
        operations.check_open()
        self._turns.check_new(key)
        operations.under_way.add(handle)
        # The library needs all its ranks: after one has gone, no collective can complete.
        if gone := operations.gone.intersection(self.together):
            self._finish(handle, operations.lost(min(gone)))
            return handle
        self._turns.come(key, handle, call)
        first = self.together[0]
        if self.rank == first and (call.goal == "allreduce" or self._turns.reached(key, first)):
            self._give_turn(key)
        elif self.rank != first and call.goal != "allreduce":
            self._tell(first, _frames.REACHED, key)
        self._take_turns()
        return handle

    def _give_turn(self, key: int) -> None:
        """Let a collective be the next one, at the first rank."""
        for peer in self.together[1:]:
            self._tell(peer, _frames.TURN, key)
        self._turns.add(key)

    def poll(self, timeout: float) -> list[Handle]:
        self._operations.check_open()
        self._move(0.0 if self._operations.completed else timeout)
        return self._operations.take()

    @property
    def idle(self) -> bool:
        """Whether the library has nothing left to send to the remaining peers."""
        left = [peer for peer in self._peers if peer not in self._operations.gone]
        return not any(self._sending[peer] or self._outbox.holds(peer) for peer in left)

    def wake(self) -> None:
        self.bell.ring()

    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Bytes of messages and headers, without the library's own headers and collectives."""
        return dict(self._sent), dict(self._received)

    @property
    def moved_bytes(self) -> int:
        return sum(self._sent.values()) + sum(self._received.values())

    def close(self) -> None:
        """The peers get a last frame."""
        if self._operations.closed:
            return
        self._operations.closed = True
        if not self._forked:
            self._outbox.ranked = False
            for peer in self._peers:
                self._outbox.empty(peer)
                if self.answers or peer not in self._operations.gone:
                    self._tell(peer, _frames.END, self._turns.begun)
        self._leave()

    # For the library's methods

    @property
    def _forked(self) -> bool:
        """Whether this process was forked from the transport's own. The library then belongs to the parent."""
        return os.getpid() != self._pid

    def _came(self, peer: int, frame: Bytes, nbytes: int) -> None:
        """Handle a received frame in a buffer of ``scratch``, which is returned to the pool later."""
        self._received[peer] += nbytes
        try:
            self._understand(peer, frame, nbytes)
        except ProtocolError:
            self._lose(peer)
            raise

    def _understand(self, peer: int, frame: Bytes, nbytes: int) -> None:
        """Act on a frame. Raises ProtocolError for one that no rank of this version sends."""
        kind, slot, tag, size = _frames.read(peer, frame, nbytes)
        if kind == _frames.WHOLE:
            self._operations.arrive(peer, tag, _Message(size, frame=frame), frame.nbytes)
            return
        self.scratch.give(frame)
        if kind in (_frames.ANNOUNCED, _frames.OFFERED) and 1 <= slot <= SLOTS and size > INLINE_BYTES:
            self._operations.arrive(peer, tag, _Message(size, slot=slot, offered=kind == _frames.OFFERED))
        elif kind == _frames.ASKED and (peer, slot) in self._unasked:
            self._unasked.pop((peer, slot))()
        elif kind == _frames.COMING and (peer, slot) in self._promised:
            self._promised.pop((peer, slot))()
        elif kind == _frames.TURN and self._takes_turns_from(peer):
            self._turns.add(tag)
            self._take_turns()
            self._take_ends()
        elif kind == _frames.REACHED and self._gives_turns_to(peer) and self._turns.may_reach(tag, peer):
            if self._turns.reached(tag, peer):
                self._give_turn(tag)
                self._take_turns()
        elif kind == _frames.END:
            self._ended(peer, tag)
        else:
            raise broken(peer, f"a frame of kind {kind} came (slot {slot}, {size} bytes) that has no meaning now")

    def _takes_turns_from(self, peer: int) -> bool:
        """Whether a peer may tell this rank the next collective."""
        first, mine = self.together[0], self.rank in self.together
        return mine and peer == first and isinstance(self, HasAllreduce) and not self._turns.full

    def _gives_turns_to(self, peer: int) -> bool:
        """Whether a peer may tell this rank that it has reached a collective."""
        return peer in self.together and self.rank == self.together[0] and isinstance(self, HasCollectives)

    def _ended(self, peer: int, begun: int) -> None:
        """Handle a peer's last frame, after ``begun`` collectives."""
        first = self.together[0]
        comes = self._takes_turns_from(first) and first not in (self.rank, peer, *self._operations.gone)
        if comes and peer in self.together and begun > self._turns.known:
            self._ends.append((peer, begun))  # the first rank has sent this turn, which is still on its way
            return
        # First fail the collectives that the peer never joined; then everything else that waits for it.
        for handle in self._turns.left_out(begun) if peer in self.together else ():
            self._finish(handle, self._operations.lost(peer))
        self._lose(peer)

    def _take_ends(self) -> None:
        """Handle the last frames that have waited for a turn, as far as it has come."""
        ends, self._ends = self._ends, []
        for peer, begun in ends:
            Enveloped._ended(self, peer, begun)

    def _pushed(self, handle: Handle) -> None:
        """Record that a body has left."""
        self._bodies.discard((handle.peer, handle.note))
        self._sent[handle.peer] += handle.nbytes
        self._finish(handle)

    def _finish(self, handle: Handle, error: Exception | None = None) -> None:
        if handle.peer < 0:
            self._turns.ended(handle)
        self._operations.finish(handle, error)

    def _lose(self, peer: int) -> None:
        """Handle the loss of a peer: fail what waits for it, including all collectives that have not started.

        The library itself ends the collectives that are running.
        """
        if peer in self._operations.gone:
            return
        self._outbox.forget(peer)
        for bodies in (self._unasked, self._promised):
            for key in [key for key in bodies if key[0] == peer]:
                del bodies[key]
        for handle in self._turns.give_up() if peer in self.together else ():
            self._finish(handle, self._operations.lost(peer))
        self._operations.lose(peer)
        self._take_ends()

    def _pull_pieces(self, body: Body, piece_bytes: int, fetch: Callable[[int, Bytes, Event], None]) -> None:
        """Receive a body in pieces. ``fetch(at, memory, event)`` starts to receive the bytes from ``at`` on.

        Pieces of a sum are added from memory that fits the cache, with two of them in flight.
        """
        starts = deque(range(0, body.data.nbytes, piece_bytes))
        done = countdown(len(starts), body.done)

        def begin() -> None:
            at = starts.popleft()
            nbytes = min(piece_bytes, body.data.nbytes - at)
            memory = self.scratch.take(nbytes)
            fetch(at, memory[:nbytes], partial(add, at, memory, nbytes))

        def add(at: int, memory: Bytes, nbytes: int) -> None:
            body.put(at, memory[:nbytes])
            self.scratch.give(memory)
            if starts:
                begin()
            done()

        if body.adds is None:
            for at in starts:
                fetch(at, body.data[at : at + piece_bytes], done)
            return
        for _ in range(min(2, len(starts))):
            begin()

    def _tell_progress(self, event: Event) -> None:
        """Call an event in the progress thread. From any thread."""
        self._events.append(event)
        self.bell.ring()

    def _read_frame(self, peer: int, frame: Bytes) -> None:
        """Handle a frame in memory for the largest one, and let the library receive the next (``_await_frame``)."""
        nbytes = _frames.frame_bytes(frame)
        if nbytes <= _SMALL_BYTES:
            small = self.scratch.take(nbytes)
            small[:nbytes] = frame[:nbytes]
            self.scratch.give(frame)
            frame = small
        self._await_frame(peer)
        self._came(peer, frame, nbytes)

    def _await_frame(self, peer: int) -> None:
        """Let the library receive one more frame from a peer. Only for users of ``_read_frame``."""
        raise NotImplementedError

    def _spin(
        self, timeout: float, eager_s: float, turn: Callable[[], bool], sleep: Callable[[float, float], bool]
    ) -> None:
        """The ``_move`` of a library that must be polled: often at first, then after sleeps.

        ``turn()`` polls and returns whether anything happened. ``sleep(waited, left)`` sleeps for at most ``left``
        seconds after a wait of ``waited`` and returns whether the bell rang.
        """
        begun = now = time.monotonic()
        deadline = begun + timeout
        while True:
            acted = turn()
            if self._operations.completed or self.bell.rang():
                return
            now = time.monotonic()
            if now >= deadline:
                return
            if acted:
                begun = now
            elif now - begun < eager_s:
                os.sched_yield()
            elif sleep(now - begun, deadline - now):
                return

    # Messages

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
        frame = _frames.written(kind, tag, slot, size, data)
        self._sent[peer] += frame.nbytes
        return frame

    def _post(self, receive: Receive) -> Handle:
        self._operations.post(receive)
        return receive.handle

    def _deliver(self, receive: Receive, message: _Message) -> None:
        """Complete a receive with its message, or receive the message's body."""
        if message.frame is None:
            fits = self._operations.fits(receive, message.size)
            if fits or message.size <= UNCLAIMED_BYTES:
                self._fetch(receive, message, fits)
            return
        data = message.frame[HEADER_BYTES : HEADER_BYTES + message.size]
        if self._operations.deliver(receive, data, message.frame):
            self.scratch.give(message.frame)

    def _fetch(self, receive: Receive, message: _Message, fits: bool) -> None:
        """Receive a body, after a request if necessary. A peer that has ended no longer answers requests."""
        if (message.offered or self.asks) and receive.handle.peer in self._operations.gone:
            self._finish(receive.handle, self._operations.lost(receive.handle.peer))
            return
        take = partial(self._take, receive, message, fits)
        if message.offered:
            self._promised[receive.handle.peer, message.slot] = take
        else:
            take()
        if message.offered or self.asks:
            self._tell(receive.handle.peer, _frames.ASKED, receive.handle.tag, slot=message.slot)

    def _take(self, receive: Receive, message: _Message, fits: bool) -> None:
        """Receive a body. One that does not fit goes to scratch memory and is discarded."""
        handle, size = receive.handle, message.size
        into: Bytes | None = None
        if fits:
            into = receive.into if receive.adds is None else receive.adds.view(np.uint8)
        buffer = self.scratch.take(size) if into is None else None

        def done() -> None:
            self._received[handle.peer] += size
            if buffer is not None and handle.done:  # the message did not fit, or the peer was given up
                self.scratch.give(buffer)
            elif buffer is not None:
                handle.payload, handle.note = buffer[:size], buffer
            self._finish(handle)

        memory = buffer if into is None else into
        assert memory is not None
        adds = None if receive.adds is None or not fits else receive.adds.dtype
        self._pull(handle.peer, Body(message.slot, memory[:size], done, adds))

    def _take_turns(self) -> None:
        """Start the collectives that have got their turn and that this rank has reached, in the first rank's order."""
        while (turn := self._turns.take()) is not None:
            handle, call = turn
            self._collect(call, handle)


def _nothing() -> None:
    """Do nothing after a frame was sent, since its memory is a copy."""


def countdown(number: int, done: Event) -> Event:
    """A function that calls ``done`` on its ``number``-th call."""
    left = count(number - 1, -1)
    return lambda: done() if next(left) == 0 else None


def immortal(value: Any) -> None:
    """Keep an object from ever being destroyed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
