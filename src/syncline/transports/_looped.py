"""An end whose connections one event loop drives: what ``tcp`` and ``shm`` share.

Owns waiting, alone or together with other transports (``_auto.Member``). Does not know what frames mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from ..wire.links import Link, Loop, moved_bytes
from . import Bytes, Handle
from ._operations import Operations, Receive


class Looped(ABC):
    """Process ``rank`` among ``links``, which a loop of the implementation drives."""

    _loop: Loop

    def __init__(self, rank: int, links: Mapping[int, Link]) -> None:
        self.rank = rank
        self.world = len(links) + 1
        self._links = links
        self._operations = Operations(rank, links, "the connection to rank {} closed")

    @abstractmethod
    def _post(self, receive: Receive) -> Handle:
        """Begin a receive, or end it at once with a message that is there."""

    def recv(self, src: int, tag: int, into: Bytes, owner: Any = None) -> Handle:
        return self._post(Receive(Handle("recv", src, tag, into.nbytes, owner), into))

    def borrow(self, src: int, tag: int, nbytes: int, owner: Any = None) -> Handle:
        return self._post(Receive(Handle("borrow", src, tag, nbytes, owner)))

    def poll(self, timeout: float) -> list[Handle]:
        operations, loop = self._operations, self._loop
        if operations.closed:
            operations.check_open()
        if loop.waiting:
            loop.write()
        loop.turn(0.0 if operations.completed else timeout)
        found, operations.completed = operations.completed, []
        return found

    def fileno(self) -> int:
        return self._loop.fileno()

    def watch(self, fd: int) -> None:
        self._loop.watch(fd)

    def settle(self) -> bool:
        self._loop.write()
        return bool(self._operations.completed)

    @property
    def idle(self) -> bool:
        """True when the kernel has all frames."""
        return self._loop.idle

    @property
    def moved_bytes(self) -> int:
        return moved_bytes(self._links.values())

    def wake(self) -> None:
        self._loop.wake()
