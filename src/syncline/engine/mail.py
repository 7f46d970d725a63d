"""Single messages of one process: to and from others over the transport, and to itself, which no transport carries.

Used from the thread that drives, which is told there when one has been sent or has come.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial

import numpy as np

from ..errors import SynclineError, labelled
from ..transports import Bytes, Handle, Transport
from ..wire.culprit import Waits
from .order import Work
from .trace import Kind, Observer, Span, begin


class Mail:
    """The messages under way, each of which a work stands for; ``finish`` is called when one is done.

    ``has_left`` says of a process whether it has left in peace, which a ``tolerant`` work does not mind.
    """

    def __init__(
        self,
        transport: Transport,
        has_left: Callable[[int], bool],
        observer: Observer | None,
        finish: Callable[[Work], None],
    ) -> None:
        self._transport, self._has_left, self._observer, self._finish = transport, has_left, observer, finish
        self._loopback = Loopback()
        self._awaited: dict[Work, int] = {}  # from or to whom

    @property
    def waiting_for(self) -> Waits:
        """For whom those wait whose peers may not leave; may be asked from another thread."""
        return {peer: work.label for work, peer in list(self._awaited.items())}

    def send(self, work: Work, dst: int, tag: int, body: Bytes) -> None:
        """Send a message, which stays unchanged until the work is done."""
        if dst == self._transport.rank:
            self._loopback.send(tag, body.tobytes())
            self._finish(work)
            return
        span = self._begun("send", work, dst, body.nbytes)
        self._transport.send(dst, tag, body, owner=lambda handle: self._ended(work, handle, span))

    def recv(
        self, work: Work, src: int, tag: int, into: Bytes, placed: bool, left: Callable[[Exception], None]
    ) -> None:
        """Receive a message that fits ``into``; the work's result is its bytes, or, where it is ``placed``, how many.

        Where a tolerant one does not come because its peer has left, ``left`` is told.
        """
        if src == self._transport.rank:
            self._loopback.recv(tag, partial(self._came_back, work, into, placed))
            return
        span = self._begun("receive", work, src, into.nbytes)

        def arrived(handle: Handle) -> None:
            work.result = handle.nbytes if placed else into[: handle.nbytes].tobytes()
            self._ended(work, handle, span, left)

        self._transport.recv(src, tag, into, owner=arrived)

    def _came_back(self, work: Work, into: Bytes, placed: bool, data: bytes) -> None:
        """A message to this process itself."""
        if len(data) > into.nbytes:
            raise SynclineError(f"{work.label}: a message of {len(data)} bytes does not fit a receive of {into.nbytes}")
        work.result = data
        if placed:
            into[: len(data)] = np.frombuffer(data, np.uint8)
            work.result = len(data)
        self._finish(work)

    def _begun(self, kind: Kind, work: Work, peer: int, nbytes: int) -> Span | None:
        if not work.tolerant:
            self._awaited[work] = peer
        if self._observer is None:
            return None
        return begin(self._observer, kind, work.label, work.span, peer=peer, nbytes=nbytes)

    def _ended(
        self, work: Work, handle: Handle, span: Span | None, left: Callable[[Exception], None] = lambda _: None
    ) -> None:
        self._awaited.pop(work, None)
        if handle.error is not None:
            if work.tolerant and self._has_left(handle.peer):
                left(handle.error)
                return
            raise labelled(work.label, handle.error)
        if span is not None:
            span.end()
        self._finish(work)


class Loopback:
    """Messages of a process to itself: what was sent and has not been asked for, and the other way round, by tag.

    As between two processes, those of one tag are received in the order in which they were sent.
    """

    def __init__(self) -> None:
        self._sent: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self._asked: defaultdict[int, deque[Callable[[bytes], None]]] = defaultdict(deque)

    def send(self, tag: int, data: bytes) -> None:
        """Give a message to whoever asked first, or keep it."""
        if self._asked[tag]:
            self._asked[tag].popleft()(data)
        else:
            self._sent[tag].append(data)

    def recv(self, tag: int, came: Callable[[bytes], None]) -> None:
        """Call with the next message, now or when it is sent."""
        if self._sent[tag]:
            came(self._sent[tag].popleft())
        else:
            self._asked[tag].append(came)
