"""What tests of a served meeting share: one on a port of this machine, and those who call there."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from plays import member
from strangers import LIMIT_S, RUN, SECRET, knock

from syncline.errors import GroupError
from syncline.wire.listener import dial, open_door
from syncline.wire.meeting import Meeting
from syncline.wire.meeting_sockets import PURPOSE, MeetingClient, MeetingServer


class Served:
    """A meeting on a port of this machine."""

    def __init__(self, world: int, limit_s: float = 10 * LIMIT_S) -> None:
        self.world = world
        self.meeting = Meeting(world)
        door = open_door("127.0.0.1")
        self.where: tuple[str, int] = door.getsockname()
        self.server = MeetingServer([door], RUN, SECRET, self.meeting, limit_s)
        self.socks: list[socket.socket] = []

    def knock(self, data: bytes = b"") -> socket.socket:
        sock = knock(self.where)
        self.socks.append(sock)
        with contextlib.suppress(OSError):
            sock.sendall(data)
        return sock

    def prove(self, rank: int, secret: bytes = SECRET, purpose: str = PURPOSE) -> socket.socket:
        sock = dial(self.where, RUN, secret, rank, 0, purpose, LIMIT_S)
        self.socks.append(sock)
        return sock

    def client(self, rank: int, timeout: float = LIMIT_S) -> MeetingClient:
        found = MeetingClient(self.prove(rank), "the meeting", self.world)
        found.limit(time.monotonic() + timeout, timeout)
        return found

    def come(self, rank: int, timeout: float = LIMIT_S) -> Any:
        """One process's whole meeting; the error if it fails."""
        client = self.client(rank, timeout)
        try:
            client.enter()
            roll = client.call_roll(member(rank, self.world), "a run", SECRET)
            client.through()
            return [one.index for one in roll.members]
        except GroupError as error:
            return error
        finally:
            client.close()

    def all_come(self) -> list[Any]:
        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(self.come, range(self.world), timeout=2 * LIMIT_S))

    def close(self) -> None:
        for sock in self.socks:
            sock.close()
        self.server.close()
        self.server.join()


Serve = Callable[..., Served]
