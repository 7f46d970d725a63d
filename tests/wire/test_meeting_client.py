"""A process at the meeting: what answers there is not to be trusted further than its rules, and holds nobody."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from plays import member
from strangers import LIMIT_S

from syncline.errors import GroupError, RollCallError
from syncline.wire.meeting import Kind, fault_frame, frame
from syncline.wire.meeting_sockets import MeetingClient


@pytest.fixture
def line() -> Iterator[tuple[MeetingClient, socket.socket]]:
    """A client, and the other end of its connection."""
    here, there = socket.socketpair()
    client = MeetingClient(here, "10.0.0.1:5", 2)
    client.limit(time.monotonic() + LIMIT_S, LIMIT_S)
    yield client, there
    client.close()
    there.close()


Line = tuple[MeetingClient, socket.socket]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ((), "rank 0, which serves the meeting at 10.0.0.1:5, has ended; see what it printed"),
        ((frame(Kind.OVER),), "breaks the rules of the meeting: it said over"),
        ((struct.pack("<BI", Kind.WELCOME, 65),), "announced 65 bytes of welcome, where 64 are the most"),
        ((struct.pack("<BI", Kind.ROLL, 0xFFFFFFFF),), "announced 4294967295 bytes of roll"),
        ((b"HTTP/1.1 400 Bad Request",), "said something unknown"),
        ((fault_frame("rank 1 has burnt down"),), "rank 1 has burnt down"),
    ],
    ids=["gone", "order", "one beyond", "huge", "http", "fault"],
)
def test_a_client_believes_no_meeting_further_than_the_rules(line: Line, said: tuple[bytes, ...], text: str) -> None:
    client, meeting = line
    meeting.sendall(b"".join(said))
    meeting.shutdown(socket.SHUT_WR)
    with pytest.raises(GroupError, match=text.replace("(", r"\(")):
        client.enter()


def test_a_fault_that_has_come_is_read_although_the_meeting_has_gone(line: Line) -> None:
    client, meeting = line
    meeting.sendall(frame(Kind.WELCOME) + fault_frame("rank 1 has burnt down"))
    meeting.close()
    client.enter()
    with pytest.raises(RollCallError, match="burnt"):
        client.call_roll(member(1, 2), "a run", b"")


def test_a_look_finds_a_fault_and_does_not_wait(line: Line) -> None:
    client, meeting = line
    client.check()
    meeting.sendall(fault_frame("rank 1 has burnt down"))
    with pytest.raises(RollCallError, match="burnt"):
        client.check()


class Endless:
    """A connection at which something is always there to be read, of which nothing may be sent."""

    def __init__(self, data: bytes, most: int) -> None:
        self._data, self._most = data, most

    def recv(self, _size: int) -> bytes:
        self._most -= 1
        assert self._most >= 0, "it is read on and on"
        return self._data

    def sendall(self, _data: bytes) -> None:
        raise BrokenPipeError

    def setblocking(self, _flag: bool) -> None: ...

    def settimeout(self, _limit_s: float) -> None: ...


@pytest.mark.parametrize("look", [MeetingClient.check, MeetingClient.through])
def test_a_meeting_that_goes_on_talking_holds_nobody(look: Callable[[MeetingClient], None]) -> None:
    """A look takes the words that have come, one by one, and ends."""
    client = MeetingClient(Endless(frame(Kind.VALUE, bytes(100)), most=2), "10.0.0.1:5", 2)  # type: ignore[arg-type]
    client.limit(time.monotonic() + LIMIT_S, LIMIT_S)
    with pytest.raises(GroupError, match=r"said value|has ended"):
        look(client)


def test_a_fault_behind_an_answer_is_read_although_the_meeting_has_gone() -> None:
    data = frame(Kind.VALUE) + fault_frame("rank 1 has burnt down \x1b[2J")
    client = MeetingClient(Endless(data, most=1), "10.0.0.1:5", 2)  # type: ignore[arg-type]
    with pytest.raises(RollCallError, match="rank 1 has burnt down \ufffd"):
        client.through()


def test_a_meeting_that_has_stopped_holds_nobody(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is stopped, or its machine is gone: its connections are there and say nothing."""
    monkeypatch.setattr("syncline.wire.meeting_sockets._WORD_S", 0.05)
    client, _ = line
    client.limit(time.monotonic() + 0.05, 7.0)
    with pytest.raises(GroupError, match=r"meeting at 10.0.0.1:5, has not answered within 7 s: is it stopped"):
        client.enter()
