"""Drives reducers over a transport: their rounds become messages, their sums runs of the architecture's plan.

What others send to be added is looked at in the transport's memory, over shm in theirs, and added in one pass once all
of it is there: in the order that the reducer says, whatever came first.

A few of a bucket's reducers are open at the same time, so that one computes while another's messages travel. Used from
the thread that drives the engine, like the ``exchange``, through which the transport's events come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..collectives import Collective
from ..compression.reducers import Bytes, Lengths, Message, Reducer, Round, Sum, Total
from ..errors import ProtocolError, SynclineError, UsageError, labelled
from ..kernels.cpu import add_in_order
from ..plans.messages import Program
from ..transports import Handle
from .exchange import Exchange, Run
from .order import KEYS, Array
from .trace import Kind, Observer, Span, begin

OPEN = 4
"""Reducers of one bucket that are under way at once."""

_MARK = 3 << 62
"""Tags of rounds have the two highest bits set: plans have not the first, single messages not the second."""
_PIECE_BITS = 31
"""Below the key is the piece; two processes exchange its messages in the same order, so that rounds need no number."""

MOST_PIECES = 1 << _PIECE_BITS
"""Of one bucket."""


class Reducing:
    """The reducers of one bucket under way. ``program`` gives this rank's part in a sum by its bytes.

    ``key`` tells this bucket from all others in flight. A ``tolerant`` one does not mind peers that have left: it then
    never finishes.
    """

    def __init__(
        self,
        exchange: Exchange,
        pieces: Sequence[Callable[[], Reducer]],
        program: Callable[[int], Program | Collective],
        key: int,
        label: str,
        *,
        priority: float,
        on_done: Callable[[], None],
        tolerant: bool,
        has_left: Callable[[int], bool],
        observer: Observer | None = None,
        within: Span | None = None,
    ) -> None:
        if not 0 <= key < KEYS:
            raise UsageError(f"{label}: key {key} is out of range")
        if len(pieces) > MOST_PIECES:
            raise UsageError(
                f"{label}: a bucket of {len(pieces)} pieces has more than tags can number, which is {MOST_PIECES}: use"
                " smaller buckets, as schedule=fixed(bucket=25MiB)"
            )
        self._exchange, self._transport = exchange, exchange.transport
        self._pieces, self._program = pieces, program
        self._key, self._label, self._priority = key, label, priority
        self._on_done, self._tolerant, self._has_left = on_done, tolerant, has_left
        self._opened = self._ended = 0
        self._turns: set[_Turn] = set()
        self._observer, self._span = observer, within

    def urgency(self) -> float:
        """The smallest goes first."""
        return self._priority

    @property
    def label(self) -> str:
        """What is reduced; empty when nobody minds if it never ends."""
        return "" if self._tolerant else self._label

    @property
    def waiting_for(self) -> dict[int, str]:
        """Peer -> label, where messages from or to it are under way; may be asked from another thread.

        Where nobody minds if it never ends, of the rounds that somebody has come to.
        """
        turns = [turn for turn in list(self._turns) if turn.begun or not self._tolerant]
        return {peer: self._label for turn in turns for peer in tuple(turn.peers)}

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
        """Open one more reducer, if there may be; between two of them, messages of the first are to be sent."""
        if self._opened - self._ended >= OPEN or self._opened == len(self._pieces):
            return False
        self._open()
        return True

    def _open(self) -> None:
        number = self._opened
        self._opened += 1
        self._advance(number, self._pieces[number](), 0, [])

    def _advance(self, number: int, reducer: Reducer, turn: int, lengths: Lengths) -> None:
        """Let a reducer go on until it has to wait."""
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
            if asked.sends or asked.receives or (asked.total is not None and asked.total.peers):
                self._turns.add(_Turn(self, number, reducer, turn, asked))
                return
            lengths = []
        self._ended += 1
        if self._ended == len(self._pieces):
            self._finish()

    def _finish(self) -> None:
        if self._span is not None:
            self._span.end()
        self._on_done()

    def _tell(self, kind: Kind, number: int, peer: int = -1, nbytes: int = -1, phase: str = "") -> Span:
        """Tell the observer, which there is, that something of a piece begins."""
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


class _Turn:
    """One round of one reducer: goes on when all its messages have been sent and received.

    ``peers`` are the processes that messages still come from or go to.
    """

    def __init__(self, of: Reducing, number: int, reducer: Reducer, turn: int, asked: Round) -> None:
        self.of, self.number, self._reducer, self._turn = of, number, reducer, turn
        self._lengths = [0] * len(asked.receives)
        self._total, self._lent = asked.total, dict[int, Handle]()
        adds = [] if asked.total is None else [Message(peer, _bytes(asked.total)) for peer in asked.total.peers]
        self.peers = [message.peer for message in (*adds, *asked.receives, *asked.sends)]
        self._messages = len(self.peers)
        tag = _MARK | of._key << _PIECE_BITS | number
        transport = of._transport
        for message in adds:
            transport.borrow(message.peer, tag, message.data.nbytes, owner=_Completion(self, "receive", message))
        for index, message in enumerate(asked.receives):
            owner = _Completion(self, "receive", message, index)
            transport.recv(message.peer, tag, message.data, owner=owner)
        for message in asked.sends:
            transport.send(message.peer, tag, message.data, of._priority, owner=_Completion(self, "send", message))

    @property
    def begun(self) -> bool:
        """Whether another process has come to this round, or to one before it."""
        return self._turn > 1 or len(self.peers) < self._messages

    def arrived(self, handle: Handle, index: int) -> None:
        """A message has been sent, or received as number ``index``."""
        of = self.of
        if handle.error is not None:
            if of._tolerant and of._has_left(handle.peer):
                return
            verb = "sending a payload to" if handle.kind == "send" else "receiving a payload from"
            raise labelled(f"{of._label}: {verb} rank {handle.peer}", handle.error)
        if index >= 0:
            self._lengths[index] = handle.nbytes
        elif handle.kind == "borrow" and self._total is not None:
            self._came(handle, self._total)
        self.peers.remove(handle.peer)
        if not self.peers:
            of._turns.discard(self)
            of._advance(self.number, self._reducer, self._turn, self._lengths)

    def _came(self, handle: Handle, total: Total) -> None:
        """What is to be added is there; with the last of it the sum is made, whether or not all has been sent."""
        of = self.of
        if handle.nbytes != total.array.nbytes:
            raise ProtocolError(
                f"{of._label}: {handle.nbytes} bytes came from rank {handle.peer} to be added to {total.array.nbytes};"
                " do all ranks run the same version with the same model?",
                rank=handle.peer,
            )
        self._lent[handle.peer] = handle
        if len(self._lent) < len(total.peers):
            return
        span = None if of._observer is None else of._tell("reduce", self.number, nbytes=total.array.nbytes)
        before, after = ([self._array(peer, total) for peer in some] for some in (total.before, total.after))
        add_in_order(total.array, before, after)
        if span is not None:
            span.end()
        for lent in self._lent.values():
            of._transport.release(lent)
        self._lent.clear()

    def _array(self, peer: int, total: Total) -> Array:
        """What a peer sent, as numbers."""
        payload = self._lent[peer].payload
        assert payload is not None
        return payload.view(total.array.dtype)


def _bytes(total: Total) -> Bytes:
    return total.array.view(np.uint8)


class _Completion:
    """Who is told that a message of a round is complete; sent or lent, or number ``index`` of those received."""

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
