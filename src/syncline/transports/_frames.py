"""Defines the frames of ``_envelope`` and the outbox that orders them by priority.

A frame is a header of 24 bytes and a message of up to ``INLINE_BYTES``. This module validates headers as far as
possible without knowing the operations in flight.

A library knows no priority and sends in the order in which it was filled. If priorities differ, it is therefore filled
only slightly ahead: it gets the next item for a peer while fewer than ``AHEAD_BYTES`` to that peer are unsent. Items as
small as a header go at once, because urgent operations may depend on them. An item in the outbox must flow once the
library has it, whatever its receiver does; items that are held back then depend on nothing else. While all priorities
are 0 the library gets everything at once.

The outbox does no I/O; the functions that send are passed in.
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
"""Bodies in flight between two ranks use slots from 1 to this number, the largest tag that MPI guarantees."""

WHOLE, ANNOUNCED, ASKED, TURN, END, OFFERED, COMING, REACHED = range(1, 9)
"""The kinds of frames: a message; an announced body; a request for a body; the next collective; the last frame; an
offered body; the turn of an offered body; a collective that the sender has reached.

ANNOUNCED and OFFERED carry a body's size and slot; ASKED and COMING repeat the slot. Instead of a tag, TURN and REACHED
carry the key of a collective and END the number of collectives.
"""


class Header(NamedTuple):
    """The fields of a frame's header."""

    kind: int
    slot: int
    tag: int
    size: int


def written(kind: int, tag: int, slot: int, size: int, data: Bytes | None) -> Bytes:
    """A new frame with a copy of ``data``."""
    size = size if data is None else data.nbytes
    frame: Bytes = np.empty(HEADER_BYTES + (0 if data is None else size), np.uint8)
    _HEADER.pack_into(frame, 0, kind, slot, tag, size)
    if data is not None:
        frame[HEADER_BYTES:] = data
    return frame


def read(peer: int, frame: Bytes, nbytes: int) -> Header:
    """The header of a frame of ``nbytes``. Raises ProtocolError if no rank of this version sends such a frame."""
    if not HEADER_BYTES <= nbytes <= FRAME_BYTES:
        raise broken(peer, f"a frame of {nbytes} bytes came")
    header = Header._make(_HEADER.unpack_from(frame))
    if header.size != nbytes - HEADER_BYTES if header.kind == WHOLE else nbytes != HEADER_BYTES:
        raise broken(
            peer, f"a frame of kind {header.kind} with {nbytes} bytes came, which says it has {header.size} more"
        )
    return header


def frame_bytes(frame: Bytes) -> int:
    """The size of a frame in a larger buffer."""
    kind, _, _, size = _HEADER.unpack_from(frame)
    return HEADER_BYTES + (size if kind == WHOLE else 0)


def is_last(frame: Bytes) -> bool:
    """Whether this is a rank's last frame."""
    return bool(_HEADER.unpack_from(frame)[0] == END)


AHEAD_BYTES = 1024 * 1024
_SMALL_BYTES = 64

Event = Callable[[], None]
"""A callback for the thread that drives."""

Begin = Callable[[Event], None]
"""Passes an item to the library, which calls the given event when the item has been sent."""


class _Waiting(NamedTuple):
    """A waiting item. The smallest priority goes first; among equals, the oldest."""

    priority: float
    serial: int
    nbytes: int
    begin: Begin
    done: Event


class Outbox:
    """The items that one rank has to send to each of its peers."""

    def __init__(self, peers: Iterable[int]) -> None:
        self.ranked = False
        """Whether any item had a priority other than 0."""
        self._waiting: dict[int, list[_Waiting]] = {peer: [] for peer in peers}
        self._ahead = dict.fromkeys(self._waiting, 0)
        self._serial = count()

    def put(self, peer: int, priority: float, nbytes: int, begin: Begin, done: Event) -> None:
        """Send an item when it is its turn. ``done`` is called when it has been sent."""
        if not self.ranked:
            begin(done)
            return
        heapq.heappush(self._waiting[peer], _Waiting(priority, next(self._serial), nbytes, begin, done))
        self._give(peer)

    def holds(self, peer: int) -> bool:
        """Whether items for this peer wait for their turn."""
        return bool(self._waiting[peer])

    def forget(self, peer: int) -> None:
        """Drop the items for a peer that is gone."""
        self._waiting[peer].clear()

    def empty(self, peer: int) -> None:
        """Pass all items for a peer to the library, because no more urgent one can follow."""
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
