"""The frames of ``_envelope``, and the outbox in which what is to be sent waits for its turn.

A frame is a header of 24 bytes, and behind it a message of up to ``INLINE_BYTES``. What it says is checked here as far
as it can be without knowing what is under way.

A library knows no priority, and sends what it has been given in its own order. So where priorities differ it is given
little ahead of time: the next thing for a peer while it has less than ``AHEAD_BYTES`` to send there, or when that is as
small as a header: it may be what the peer has to know of something urgent. Whoever puts something into the outbox sees
to it that it flows once the library has it, whatever its receiver does: what is held back then waits for nothing else.
While nothing has had another priority than 0 all is given to the library at once.

Pure: how a library sends is passed in.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from ..wire.links import broken
from . import INLINE_BYTES, Bytes

_HEADER = struct.Struct("<BxHxxxxQQ")
HEADER_BYTES = _HEADER.size
FRAME_BYTES = HEADER_BYTES + INLINE_BYTES
"""The size of the largest frame."""

SLOTS = 32767
"""Bodies under way between two ranks have slots from 1 to this: the tags that MPI promises at least."""

WHOLE, ANNOUNCED, ASKED, TURN, END, OFFERED, COMING = range(1, 8)
"""A message; a body that comes; one that may come; whose turn it is; the last frame; a body that is offered; its turn.

ANNOUNCED and OFFERED have the size of a body and its slot, which ASKED and COMING repeat. TURN and END have a key of
collectives, and how many of them have begun, in place of a tag.
"""


class Header(NamedTuple):
    """What a frame says."""

    kind: int
    slot: int
    tag: int
    size: int


def written(kind: int, tag: int, slot: int, size: int, data: Bytes | None) -> Bytes:
    """A frame, with a copy of a message that goes in it."""
    size = size if data is None else data.nbytes
    frame: Bytes = np.empty(HEADER_BYTES + (0 if data is None else size), np.uint8)
    _HEADER.pack_into(frame, 0, kind, slot, tag, size)
    if data is not None:
        frame[HEADER_BYTES:] = data
    return frame


def read(peer: int, frame: Bytes, nbytes: int) -> Header:
    """The header of a frame of so many bytes; raises ProtocolError where it cannot be one of this version."""
    if not HEADER_BYTES <= nbytes <= FRAME_BYTES:
        raise broken(peer, f"a frame of {nbytes} bytes came")
    header = Header._make(_HEADER.unpack_from(frame))
    if header.size != nbytes - HEADER_BYTES if header.kind == WHOLE else nbytes != HEADER_BYTES:
        raise broken(
            peer, f"a frame of kind {header.kind} with {nbytes} bytes came, which says it has {header.size} more"
        )
    return header


def frame_bytes(frame: Bytes) -> int:
    """The size of a frame that lies in a larger buffer."""
    kind, _, _, size = _HEADER.unpack_from(frame)
    return HEADER_BYTES + (size if kind == WHOLE else 0)


def is_last(frame: Bytes) -> bool:
    """True for the frame with which a rank ends."""
    return bool(_HEADER.unpack_from(frame)[0] == END)


AHEAD_BYTES = 1024 * 1024
_SMALL_BYTES = 64

Event = Callable[[], None]
"""Something that has happened, for the thread that drives to act on."""

Begin = Callable[[Event], None]
"""Gives something to the library, which calls what it is passed when that has been sent."""


class _Waiting(NamedTuple):
    """Something that waits; of the most urgent, which have the smallest priority, the oldest goes first."""

    priority: float
    serial: int
    nbytes: int
    begin: Begin
    done: Event


class Outbox:
    """What one rank has to send to each of its peers."""

    def __init__(self, peers: Iterable[int]) -> None:
        self.ranked = False
        """Whether something had another priority than 0."""
        self._waiting: dict[int, list[_Waiting]] = {peer: [] for peer in peers}
        self._ahead = dict.fromkeys(self._waiting, 0)
        self._serial = count()

    def put(self, peer: int, priority: float, nbytes: int, begin: Begin, done: Event) -> None:
        """Let something be sent when it is its turn; ``done`` when it has been."""
        if not self.ranked:
            begin(done)
            return
        heapq.heappush(self._waiting[peer], _Waiting(priority, next(self._serial), nbytes, begin, done))
        self._give(peer)

    def holds(self, peer: int) -> bool:
        """Whether something waits."""
        return bool(self._waiting[peer])

    def forget(self, peer: int) -> None:
        """The peer is gone."""
        self._waiting[peer].clear()

    def empty(self, peer: int) -> None:
        """Give the library all that waits for a peer: nothing will be more urgent."""
        waiting = self._waiting[peer]
        while waiting:
            first = heapq.heappop(waiting)
            first.begin(first.done)

    def _give(self, peer: int) -> None:
        waiting = self._waiting[peer]
        while waiting and (self._ahead[peer] < AHEAD_BYTES or waiting[0].nbytes <= _SMALL_BYTES):
            first = heapq.heappop(waiting)
            self._ahead[peer] += first.nbytes
            first.begin(partial(self._sent, peer, first))

    def _sent(self, peer: int, what: _Waiting) -> None:
        self._ahead[peer] -= what.nbytes
        what.done()
        self._give(peer)
