"""Drives reducers over a transport: rounds become messages, sums become runs of the architecture's plan.

A total is added directly from the transport's memory (over shm from the peers' memory), in one pass after all its parts
have arrived, in the order that the reducer gives, whatever the order of arrival.

Several reducers of a bucket are open at once, so that one computes while the messages of another travel. Only for the
driving thread, like ``exchange``, which delivers the transport's events.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ..collectives import Collective
from ..compression.reducers import HostCollective, Lengths, Message, Queue, Reducer, Round, Sum, Total
from ..errors import ProtocolError, SynclineError, UsageError, labelled
from ..kernels.cpu import add_in_order
from ..transports import Handle, HasCollectives
from .exchange import Exchange
from .order import KEYS, Array, CodedOrder, Run
from .trace import Kind, Observer, Span, begin

OPEN = 4
"""The number of open reducers per bucket."""

_MARK = 3 << 62
"""Tags of rounds have both highest bits set. Plans leave the highest one clear, single messages the second."""
_PIECE_BITS = 31
"""The low bits of a tag are the piece. Both ends exchange a piece's messages in one order, so rounds need no number."""

MOST_PIECES = 1 << _PIECE_BITS
"""Per bucket."""


class Reducing:
    """The reducers of one bucket in progress, as its order specifies.

    The order's key separates this bucket from all others in flight. ``resume``, called from any thread, lets the
    driving thread call a function. A tolerant bucket does not fail when peers leave; it then never finishes.
    """

    def __init__(
        self,
        exchange: Exchange,
        order: CodedOrder,
        on_done: Callable[[], None],
        has_left: Callable[[int], bool],
        resume: Callable[[Callable[[], None]], None],
        *,
        priority: float = 0.0,
        observer: Observer | None = None,
        within: Span | None = None,
    ) -> None:
        pieces, key, label = order.pieces(), order.key, order.label
        if not 0 <= key < KEYS:
            raise UsageError(f"{label}: key {key} is out of range")
        if len(pieces) > MOST_PIECES:
            raise UsageError(
                f"{label}: a bucket of {len(pieces)} pieces is too large, because tags can number {MOST_PIECES}"
                " pieces: use smaller buckets, such as schedule=fixed(bucket=25MiB)"
            )
        self._exchange, self._transport = exchange, exchange.transport
        self._pieces, self._program = pieces, order.program
        self._key, self._label, self._priority = key, label, priority
        self._on_done, self._tolerant, self._has_left, self._resume = on_done, order.tolerant, has_left, resume
        self._opened = self._ended = 0
        self._turns: set[_Turn] = set()
        self._collecting: set[int] = set()  # the pieces with a collective of the library in flight
        self._observer, self._span = observer, within

    def urgency(self) -> float:
        """The sort key: the smallest goes first."""
        return self._priority

    @property
    def label(self) -> str:
        """The bucket's label; empty if it is tolerant."""
        return "" if self._tolerant else self._label

    @property
    def waiting_for(self) -> dict[int, str]:
        """Peer -> label, for messages in flight from or to it. Callable from any thread.

        A tolerant bucket waits only in rounds that a peer has joined.
        """
        turns = [turn for turn in list(self._turns) if turn.begun or not self._tolerant]
        waits = {peer: self._label for turn in turns for peer in tuple(turn.peers)}
        if self._collecting and isinstance(self._transport, HasCollectives):
            near = self._transport.together
            waits |= {peer: self._label for peer in near if peer != self._transport.rank}
        return waits

    def start(self) -> None:
        """Open the first reducer."""
        self._exchange.regard(self._priority)
        if self._observer is not None:
            what = {"key": self._key, "phase": "reduce"}
            self._span = begin(self._observer, "run", self._label, self._span, priority=self._priority, **what)
        if self._pieces:
            self._open()
        else:
            self._finish()

    def open_another(self) -> bool:
        """Open one more reducer, if the limit allows it. Before the next one, send the messages of this one."""
        if self._opened - self._ended >= OPEN or self._opened == len(self._pieces):
            return False
        self._open()
        return True

    def _open(self) -> None:
        number = self._opened
        self._opened += 1
        self._advance(number, self._pieces[number](), 0, [])

    def _advance(self, number: int, reducer: Reducer, turn: int, lengths: Lengths) -> None:
        """Run a reducer until it has to wait."""
        while True:
            span = None
            if self._observer is not None:
                span = self._tell("compute", number, phase="decode" if turn else "encode")
            try:
                asked = next(reducer) if turn == 0 else reducer.send(lengths)
            except StopIteration:
                break
            except SynclineError as error:
                raise labelled(self._label, error) from error
            finally:
                if span is not None:
                    span.end()
            turn += 1
            if isinstance(asked, Sum):
                self._sum(asked.array, number, reducer, turn)
                return
            if isinstance(asked, HostCollective):
                self._collect(asked, number, reducer, turn)
                return
            if asked.after is not None:
                self._await_device(asked.after, number, partial(self._advance, number, reducer, turn, []))
                return
            if asked.sends or asked.receives or any(total.peers for total in asked.totals):
                self._turns.add(_Turn(self, number, reducer, turn, asked))
                return
            lengths = []
        self._ended += 1
        if self._ended == len(self._pieces):
            self._finish()

    def _await_device(self, queue: Queue, number: int, then: Callable[[], None]) -> None:
        """Call ``then`` in the driving thread when the device is done."""
        span = None if self._observer is None else self._tell("staging", number)

        def done() -> None:
            if span is not None:
                span.end()
            then()

        queue.then(lambda: self._resume(done))

    def _finish(self) -> None:
        if self._span is not None:
            self._span.end()
        self._on_done()

    def _tell(self, kind: Kind, number: int, peer: int = -1, nbytes: int = -1, phase: str = "") -> Span:
        """Begin the observer's span of one piece."""
        assert self._observer is not None
        what = {"phase": phase, "step": number, "peer": peer, "nbytes": nbytes}
        return begin(self._observer, kind, self._label, self._span, priority=self._priority, **what)

    def _sum(self, array: Array, number: int, reducer: Reducer, turn: int) -> None:
        def summed() -> None:
            self._advance(number, reducer, turn, [])

        program = self._program(array.nbytes)
        if isinstance(program, Collective):
            raise UsageError(f"{self._label}: a library's own collective sums gradients only as they are")
        run = Run(program, array, self._key, self._label, self._priority, summed, self._tolerant, self._span)
        self._exchange.start(run)

    def _collect(self, asked: HostCollective, number: int, reducer: Reducer, turn: int) -> None:
        """Let the transport's library run a collective among the workers of this host."""
        library, label = self._transport, self._label
        if not isinstance(library, HasCollectives):
            raise UsageError(f"{label}: transport={library.name} has no collectives of its own for inside=native")
        kind: Kind = "reduce" if asked.goal == "reduce_scatter" else "copy"
        span = None if self._observer is None else self._tell(kind, number, phase=asked.goal)

        def collected(handle: Handle) -> None:
            self._collecting.discard(number)
            if handle.error is not None:
                raise labelled(f"{label}: {asked.goal.replace('_', '-')} by transport={library.name}", handle.error)
            if span is not None:
                span.end()
            self._advance(number, reducer, turn, [])

        self._collecting.add(number)
        start = library.reduce_scatter if asked.goal == "reduce_scatter" else library.all_gather
        start(self._tag(number), asked.parts, owner=collected)

    def _tag(self, number: int) -> int:
        """The tag of a piece's messages and collectives."""
        return _MARK | self._key << _PIECE_BITS | number


class _Turn:
    """One round of one reducer. The reducer resumes when all messages have been sent and received.

    ``peers`` are the processes of the messages in flight.
    """

    def __init__(self, of: Reducing, number: int, reducer: Reducer, turn: int, asked: Round) -> None:
        self.of, self.number, self._reducer, self._turn = of, number, reducer, turn
        self._lengths = [0] * len(asked.receives)
        self._totals, self._lent = asked.totals, [dict[int, Handle]() for _ in asked.totals]
        adds = [
            (which, Message(peer, total.array.view(np.uint8)))
            for which, total in enumerate(asked.totals)
            for peer in total.peers
        ]
        self.peers = [message.peer for message in (*(add for _, add in adds), *asked.receives, *asked.sends)]
        self._messages = len(self.peers)
        tag = of._tag(number)
        transport = of._transport
        for which, message in adds:
            owner = _Completion(self, "receive", message, which)
            transport.borrow(message.peer, tag, message.data.nbytes, owner=owner)
        for index, message in enumerate(asked.receives):
            owner = _Completion(self, "receive", message, index)
            transport.recv(message.peer, tag, message.data, owner=owner)
        for message in asked.sends:
            transport.send(message.peer, tag, message.data, of._priority, owner=_Completion(self, "send", message))

    @property
    def begun(self) -> bool:
        """Whether a peer has joined this round or an earlier one."""
        return self._turn > 1 or len(self.peers) < self._messages

    def arrived(self, handle: Handle, index: int) -> None:
        """Handle the completion of a message: a send, a part of total ``index``, or received message ``index``."""
        of = self.of
        if handle.error is not None:
            if of._tolerant and of._has_left(handle.peer):
                return
            verb = "sending a payload to" if handle.kind == "send" else "receiving a payload from"
            raise labelled(f"{of._label}: {verb} rank {handle.peer}", handle.error)
        if handle.kind == "borrow":
            self._came(handle, self._totals[index], self._lent[index])
        elif index >= 0:
            self._lengths[index] = handle.nbytes
        self.peers.remove(handle.peer)
        if not self.peers:
            of._turns.discard(self)
            of._advance(self.number, self._reducer, self._turn, self._lengths)

    def _came(self, handle: Handle, total: Total, lent: dict[int, Handle]) -> None:
        """Keep an arrived part of a total; with the last part, compute the sum. Sends may still be in flight."""
        of = self.of
        if handle.nbytes != total.array.nbytes:
            raise ProtocolError(
                f"{of._label}: {handle.nbytes} bytes came from rank {handle.peer} to be added to {total.array.nbytes};"
                " do all ranks run the same version with the same model?",
                rank=handle.peer,
            )
        lent[handle.peer] = handle
        if len(lent) < len(total.peers):
            return
        span = None if of._observer is None else of._tell("reduce", self.number, nbytes=total.array.nbytes)
        before, after = ([_numbers(lent[peer], total) for peer in some] for some in (total.before, total.after))
        add_in_order(total.array, before, after)
        if span is not None:
            span.end()
        for one in lent.values():
            of._transport.release(one)
        lent.clear()


def _numbers(lent: Handle, total: Total) -> Array:
    """A part of a total as numbers."""
    assert lent.payload is not None
    return lent.payload.view(total.array.dtype)


class _Completion:
    """The completion callback of a message: a send, a part of total ``index``, or received message ``index``."""

    __slots__ = ("_index", "_span", "_turn", "priority")

    def __init__(self, turn: _Turn, kind: Kind, message: Message, index: int = -1) -> None:
        of = turn.of
        self.priority = of._priority
        self._turn, self._index = turn, index
        self._span = None if of._observer is None else of._tell(kind, turn.number, message.peer, message.data.nbytes)

    def __call__(self, handle: Handle) -> None:
        if self._span is not None and handle.error is None:
            self._span.end()
        self._turn.arrived(handle, self._index)
