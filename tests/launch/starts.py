"""What tests of coming to the meeting share: places under a launcher, a start without connections, and strangers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from syncline.launch.environment import Environment
from syncline.launch.rendezvous import Joined
from syncline.wire import handshake
from syncline.wire.listener import bind_here
from syncline.wire.meeting import Member

LIMIT_S = 20.0
Case = Callable[..., Any]


def free_port() -> int:
    with bind_here() as probe:
        return int(probe.getsockname()[1])


def environment(rank: int, world: int = 2, port: int = 0, **changes: Any) -> Environment:
    return replace(Environment("arguments", rank, world, port=port), **changes)


def meet(joined: Joined) -> bytes:
    """A whole start without connections; what proves those."""
    rank, world = joined.environment.rank, joined.environment.world
    me = Member(rank, world, "host", "m", 100 + rank, "p", "127.0.0.1", 1, "u", {})
    joined.client.call_roll(me, "run", joined.secret)
    joined.client.through()
    return joined.secret


def serving() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "syncline-meeting"]


class Stranger:
    """Answers the first call at a port, wrongly or not at all, and is gone."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]

    def answer_one(self) -> None:
        self._door.settimeout(LIMIT_S)
        with self._door, self._door.accept()[0] as caller:
            caller.settimeout(LIMIT_S)
            assert caller.recv(handshake.HELLO_BYTES, socket.MSG_WAITALL)
            caller.sendall(self._answer)


WRONG = [b"HTTP/1.1 400 Bad Request\r\n" * 4, b""]
