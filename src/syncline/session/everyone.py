"""What all processes of a run tell one another, servers included; workers alone have a communicator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..engine.order import Order, Work
from ..errors import ProtocolError
from ..nouns import Group
from .communicator import Array
from .grouped import AnyMember
from .programs import among, broadcast_plan, compiled, planned
from .tickets import BUCKET_KEYS

_TOLD_KEY, _SHARE_KEY = BUCKET_KEYS, BUCKET_KEYS + 1
_MOST_TOLD_BYTES, _MOST_SHARED_BYTES = 1 << 32, 1 << 44


class Heard(NamedTuple):
    """That worker 0 tells something, and how many bytes, once the work is done."""

    work: Work
    size: Array


class Everyone:
    """All processes of ``group``, as one of them sees them."""

    def __init__(self, member: AnyMember, group: Group) -> None:
        self._member, self._group = member, group

    def broadcast(self, array: Array, key: int, label: str, tolerant: bool = False) -> Work:
        """Start a broadcast from worker 0; every process calls it."""
        program = compiled(broadcast_plan(self._group.processes, 0), self._member.index)
        return self._member.engine.start(Order(program, array, key, label, tolerant))

    def tell(self, data: bytes, label: str) -> bytes:
        """The bytes of worker 0 on every process; what others give does not count."""
        try:
            size = np.array([len(data)], np.int64)
            self._member.engine.wait(self.broadcast(size, _TOLD_KEY, label))
            return self._told(size, data, label)
        except BaseException as error:
            self._member.process.interrupted(error)
            raise

    def listen(self, label: str) -> Heard:
        """Post a server's part in the next ``tell``; it never ends when the workers leave."""
        size = np.zeros(1, np.int64)
        return Heard(self.broadcast(size, _TOLD_KEY, label, tolerant=True), size)

    def hear(self, heard: Heard) -> bytes:
        """What worker 0 has begun to tell, once the work of ``listen`` is done."""
        return self._told(heard.size, b"", heard.work.label)

    def _told(self, size: Array, data: bytes, label: str) -> bytes:
        self._check_size(int(size[0]), 0, _MOST_TOLD_BYTES, label)
        told = np.zeros(int(size[0]), np.uint8)
        if self._member.index == 0:
            told[:] = np.frombuffer(data, np.uint8)
        self._member.engine.wait(self.broadcast(told, _TOLD_KEY, label))
        return told.tobytes()

    def _check_size(self, size: int, process: int, most: int, label: str) -> None:
        if not 0 <= size <= most:
            raise ProtocolError(
                f"{label}: {self._member.name(process)} tells {size} bytes, which makes no sense",
                rank=self._member.number(process),
            )

    def meet(self, label: str) -> None:
        """Wait until all processes have come here."""
        if self._member.alone:
            return
        program = compiled(planned("direct_all_gather", Group(self._group.processes)), self._member.index)
        self._member.engine.run(Order(program, np.zeros(self._group.processes, np.uint8), _TOLD_KEY, label))

    def share(self, processes: Sequence[int], data: bytes, label: str) -> Iterator[bytes]:
        """What each of these processes gives, one after the other, on all of them; they are the same at every call."""
        ranks, here = tuple(processes), processes.index(self._member.index)
        if len(ranks) == 1:
            yield data
            return
        engine = self._member.engine
        sizes = np.zeros(len(ranks), np.int64)
        sizes[here] = len(data)
        gather = compiled(among(planned("direct_all_gather", Group(len(ranks))), ranks), self._member.index)
        engine.run(Order(gather, sizes, _SHARE_KEY, label))
        for place, size in enumerate(sizes):
            self._check_size(int(size), ranks[place], _MOST_SHARED_BYTES, label)
            body = np.frombuffer(data, np.uint8).copy() if place == here else np.zeros(int(size), np.uint8)
            program = compiled(among(broadcast_plan(len(ranks), place), ranks), self._member.index)
            engine.run(Order(program, body, _SHARE_KEY, label))
            yield body.tobytes()
