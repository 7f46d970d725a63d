"""Send and receive with tags between two ranks of a group, or from any rank.

Each message is announced by a header, in the order of the sends between two ranks. Small data travel with the header;
larger data follow under a number of their own once a receive matches. A receive from any rank can therefore inspect the
announced messages, and a wrong size is an error on the receiving rank instead of another message's bytes. A header is
only awaited from a rank while a matching receive waits. All state changes in the driving thread.
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.order import Work
from ..errors import MismatchError, ProtocolError, labelled
from ..session.communicator import Communicator

Array = NDArray[Any]

_HEADER = struct.Struct("<qqQ")
_ALONG_BYTES = 16 * 1024
"""The most bytes that travel with a header."""
_BODIES = 1 << 49
"""The first topic of bodies; headers have topic 0."""


@dataclass(eq=False)
class _Receive:
    """A posted receive, from ``source`` or, if that is None, from any rank."""

    source: int | None
    tag: int
    place: Array
    work: Work

    def takes(self, source: int, tag: int) -> bool:
        """Whether a message with that tag matches."""
        return self.tag == tag and self.source in (None, source)


@dataclass(frozen=True)
class _Announced:
    """An announced message: its tag, its size, and its number or its bytes."""

    tag: int
    nbytes: int
    number: int
    body: bytes


class Mailbox:
    """The messages between the ranks of ``us``."""

    def __init__(self, us: Communicator) -> None:
        self.us = us
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._wanted: list[_Receive] = []
        self._awaited: set[int] = set()
        self._arrived: defaultdict[int, deque[_Announced]] = defaultdict(deque)
        self._heard: defaultdict[int, int] = defaultdict(int)
        self._listening: dict[int, tuple[Work, Work]] = {}  # the work that awaits the next header of each rank
        self._gone: dict[int, Exception] = {}  # ranks that have left, found by a receive

    def send(self, rank: int, tag: int, data: Array) -> Work:
        """Send bytes. A small message's memory may change at once, a larger one's when the work is done."""
        us, label = self.us, f"send to rank {rank}"
        process = us.ranks[rank]
        self._sent[rank] += 1
        header = _HEADER.pack(tag, data.size, self._sent[rank])
        if data.size <= _ALONG_BYTES:
            return us.engine.send(process, us.topic(0), header + data.tobytes(), label)
        us.engine.send(process, us.topic(0), header, label)
        return us.engine.send(process, us.topic(_BODIES + self._sent[rank]), data, label)

    def receive(self, rank: int | None, tag: int, place: Array) -> Work:
        """Receive exactly ``place.size`` bytes. ``result`` is the sender's rank."""
        label = "receive from any rank" if rank is None else f"receive from rank {rank}"
        work = self.us.engine.promise(label)
        wanted = _Receive(rank, tag, place, work)
        self.us.engine.then(label, [], partial(self._want, wanted))
        return work

    @property
    def unused(self) -> bool:
        """Whether nothing was ever sent or received, so that no message can be in flight."""
        return not (self._sent or self._wanted or self._awaited or self._heard)

    def close(self) -> None:
        """Give up receives without a message, so that the end of the run does not wait for them."""
        self.us.engine.then("giving up receives", [], self._give_up, tolerant=True)

    def _give_up(self) -> None:
        waiting = [work for pair in self._listening.values() for work in pair]
        self.us.process.engine.abandon([*waiting, *(receive.work for receive in self._wanted)])

    def _want(self, receive: _Receive) -> None:
        sources = range(self.us.world_size) if receive.source is None else (receive.source,)
        for source in sources:
            for announced in self._arrived[source]:
                if receive.takes(source, announced.tag):
                    self._arrived[source].remove(announced)
                    self._deliver(receive, source, announced)
                    return
        self._wanted.append(receive)
        self._check_gone()
        for source in sources:
            self._await(source, receive.work.label, tolerant=receive.source is None)

    def _await(self, source: int, label: str, tolerant: bool) -> None:
        """Await the next header of a rank. Its absence is no fault if other ranks may send instead."""
        if source in self._awaited:
            return
        self._awaited.add(source)
        us = self.us
        size, left = _HEADER.size + _ALONG_BYTES, partial(self._left, source)
        work = us.engine.recv(us.ranks[source], us.topic(0), size, label, tolerant, left=left)
        then = us.engine.then(label, [work], partial(self._come, source, work), tolerant=tolerant)
        self._listening[source] = work, then

    def _left(self, source: int, error: Exception) -> None:
        self._gone[source] = error
        self._check_gone()

    def _check_gone(self) -> None:
        """Raise for a receive that no remaining rank can satisfy, preferably one from a specific rank."""
        us = self.us
        for receive in sorted(self._wanted, key=lambda receive: receive.source is None):
            sources = set(range(us.world_size)) - {us.rank} if receive.source is None else {receive.source}
            if sources <= self._gone.keys():
                raise labelled(receive.work.label, self._gone[max(sources)])

    def _come(self, source: int, work: Work) -> None:
        self._awaited.discard(source)
        announced = self._opened(source, work)
        receive = next((found for found in self._wanted if found.takes(source, announced.tag)), None)
        if receive is None:
            self._arrived[source].append(announced)
        else:
            self._wanted.remove(receive)
            self._deliver(receive, source, announced)
        waiting = [found for found in self._wanted if found.source in (None, source)]
        if waiting:
            self._await(source, waiting[0].work.label, tolerant=all(found.source is None for found in waiting))

    def _opened(self, source: int, work: Work) -> _Announced:
        """Validate and parse a header and the data that come with it."""
        message, self._heard[source] = work.result, self._heard[source] + 1
        if len(message) < _HEADER.size:
            raise self._senseless(source, work.label, f"{len(message)} bytes instead of a header of {_HEADER.size}")
        tag, nbytes, number = _HEADER.unpack_from(message)
        announced = _Announced(tag, nbytes, number, message[_HEADER.size :])
        if number != self._heard[source]:
            raise self._senseless(source, work.label, f"message {number}, but message {self._heard[source]} is due")
        if nbytes < 0 or len(announced.body) != (nbytes if nbytes <= _ALONG_BYTES else 0):
            along = f"{len(announced.body)} bytes with the header of a message of {nbytes}"
            raise self._senseless(source, work.label, along)
        return announced

    def _senseless(self, source: int, label: str, what: str) -> ProtocolError:
        us = self.us
        text = f"{label}: {us.name(source)} sends {what}; check that every rank has the same version of syncline"
        return us.process.fail(ProtocolError(text, rank=us.ranks[source]))

    def _deliver(self, receive: _Receive, source: int, announced: _Announced) -> None:
        us, label = self.us, receive.work.label
        if announced.nbytes != receive.place.size:
            sent = f"{us.name(source)} sends {announced.nbytes} bytes (tag {announced.tag})"
            text = f"{label}: {sent} where {us.name(us.rank)} receives {receive.place.size}"
            remedy = "give tensors of the same size and type on both"
            raise us.process.fail(MismatchError(f"{text}; {remedy}"))
        receive.work.result = source
        if announced.nbytes <= _ALONG_BYTES:
            receive.place[:] = np.frombuffer(announced.body, np.uint8)
            us.engine.fulfil(receive.work)
            return
        topic = us.topic(_BODIES + announced.number)
        body = us.engine.recv(us.ranks[source], topic, announced.nbytes, label, place=receive.place)

        def come() -> None:
            if body.result != announced.nbytes:
                raise self._senseless(source, label, f"{body.result} bytes of a message of {announced.nbytes}")
            us.engine.fulfil(receive.work)

        us.engine.then(label, [body], come)
