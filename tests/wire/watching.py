"""What tests of watchers share: those of a whole group in this process, and connections that a test itself holds."""

from __future__ import annotations

import os
import socket
import struct
import threading
from dataclasses import dataclass, field, replace

from syncline.errors import PeerError
from syncline.wire.culprit import Answer
from syncline.wire.meeting import Member, Roll
from syncline.wire.watch import Watcher

LIMIT_S = 20.0
SHORT_S = 0.2
BEATS_S = 2.0
"""Long enough for a thread of a busy machine to be heard several times within it."""
RESTS = Answer({})
QUESTION, ANSWER = 4, 5


def numbered(kind: int, number: int, text: bytes = b"") -> bytes:
    """A question, or the answer to it, as it travels."""
    return struct.pack("<BxHI", kind, 4 + len(text), number) + text


@dataclass
class Seat:
    """One process's watcher and what it was told."""

    index: int
    watcher: Watcher
    failures: list[PeerError] = field(default_factory=list)
    failed: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)

    def culprit(self) -> int:
        assert self.failed.wait(LIMIT_S)
        return self.failures[0].rank


class Table:
    """Watchers of a whole group in this process, and connections that the test itself holds."""

    def __init__(self) -> None:
        self.seats: list[Seat] = []
        self.raw: list[socket.socket] = []

    def seat(
        self,
        index: int,
        members: list[Member],
        socks: dict[int, socket.socket],
        liveness_s: float,
        answer: Answer = RESTS,
    ) -> Seat:
        seat: Seat

        def on_failure(error: PeerError) -> None:
            seat.failures.append(error)
            seat.failed.set()

        roll = Roll(index, tuple(members), "a run", b"")
        watcher = Watcher(roll, socks, on_failure, lambda _: seat.left.set(), liveness_s, lambda: answer)
        seat = Seat(index, watcher)
        # The process must not end when the "script" does not come back.
        watcher.came_back()
        watcher.start()
        self.seats.append(seat)
        return seat

    def group(self, world: int, liveness_s: float = LIMIT_S, host: str = "host") -> list[Seat]:
        members = [replace(member(index), host=f"{host}{index}") for index in range(world)]
        socks: list[dict[int, socket.socket]] = [{} for _ in range(world)]
        for low in range(world):
            for high in range(low + 1, world):
                socks[low][high], socks[high][low] = socket.socketpair()
        return [self.seat(index, members, socks[index], liveness_s) for index in range(world)]

    def beside(self, other: Member, liveness_s: float = LIMIT_S) -> tuple[Seat, socket.socket]:
        """Rank 0 watching ``other`` as rank 1, and rank 1's end of the connection."""
        here, there = socket.socketpair()
        self.raw.append(there)
        return self.seat(0, [member(0), other], {1: here}, liveness_s), there


def member(index: int, pid: int | None = None, pid_space: str = "here", machine: str = "machine") -> Member:
    return Member(index, 9, f"host{index}", machine, pid or os.getpid(), pid_space, "127.0.0.1", 1, "", {})
