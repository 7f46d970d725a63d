"""What tests of the meeting share: processes that come to it, and a meeting whose words are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from syncline.wire.meeting import Frames, Kind, Meeting, Member, told

KEY = b"a key for those without a secret"


def member(rank: int, world: int, **changes: Any) -> Member:
    terms = {"strategy": "ring", "version": "1"}
    return replace(Member(rank, world, f"host{rank}", "m", 100 + rank, "p", "127.0.0.1", 1, "u", terms), **changes)


class Play:
    """A meeting and what it has said to every caller."""

    def __init__(self, world: int, **options: Any) -> None:
        self.meeting = Meeting(world, KEY, **options)
        self.world = world
        self.dismissed: set[int] = set()
        self.frames: dict[int, Frames] = {}

    def act(self, call: Callable[..., None], *arguments: Any) -> None:
        call(*arguments)
        while self.meeting.said:
            caller, data, last = self.meeting.said.popleft()
            assert caller not in self.dismissed, "nothing is said after the end"
            self.frames[caller].feed(data)
            if last:
                self.dismissed.add(caller)

    def enter(self, caller: int, rank: int) -> None:
        self.frames[caller] = Frames(told(self.world))
        self.act(self.meeting.enter, caller, rank, f"from 10.0.0.{rank}:1")

    def say(self, caller: int, kind: Kind, body: bytes = b"") -> None:
        self.act(self.meeting.hear, caller, kind, body)

    def come(self, rank: int, caller: int | None = None, **changes: Any) -> None:
        number = rank if caller is None else caller
        self.enter(number, rank)
        self.say(number, Kind.RECORD, member(rank, **({"world": self.world} | changes)).to_text().encode())

    def heard(self, caller: int) -> list[tuple[Kind, bytes]]:
        """What the caller has been told since the last time."""
        found = []
        while (said := self.frames[caller].take()) is not None:
            found.append(said)
        return found

    def fault(self) -> str:
        """The fault, which all that are there have read, last, and then nothing any more."""
        assert self.meeting.fault is not None
        for caller in self.frames:
            kind, body = self.heard(caller)[-1]
            assert (kind, body.decode()) == (Kind.FAULT, self.meeting.fault)
            assert caller in self.dismissed
        return self.meeting.fault


def called(world: int) -> Play:
    """A meeting to which all have come, and have read the roll."""
    play = Play(world)
    for rank in range(world):
        play.come(rank)
    for rank in range(world):
        play.heard(rank)
    return play
