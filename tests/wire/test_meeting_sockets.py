"""The rendezvous over sockets: a server under attack, how it ends, and a client that trusts nobody."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from plays import member
from served import Serve, Served
from strangers import LIMIT_S, RUN, SECRET, drain

from syncline.errors import GroupError, HandshakeError, RollCallError, SecretError
from syncline.wire import handshake
from syncline.wire.meeting import HEARD, NOTE_BYTES, NOTES_BYTES, VALUE_BYTES, Kind, fault_frame, frame, note
from syncline.wire.meeting_sockets import PURPOSE, MeetingClient


def test_all_meet_and_the_port_is_free_before_anybody_goes_on(serve: Serve) -> None:
    served = serve(3)
    assert served.all_come() == [[0, 1, 2]] * 3
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(served.where, LIMIT_S)


HUGE = struct.pack("<BI", Kind.RECORD, 0xFFFFFFFF)
HELLO = handshake.hello(RUN, 1, 0, PURPOSE).raw


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"\x02",
        b"\xff" * 500,
        HUGE * 50,
        b"GET / HTTP/1.1\r\n\r\n" + b" " * 100,
        HELLO[:40],
        HELLO,
        HELLO + b"\1" * handshake.MAC_BYTES + fault_frame("rank 1 has burnt down"),
        fault_frame("rank 1 has burnt down"),
    ],
    ids=["silent", "byte", "noise", "huge", "http", "half", "hello", "guess", "fault"],
)
def test_a_stranger_stops_nobody_and_ends_nothing(serve: Serve, noise: bytes) -> None:
    served = serve(3)
    for _ in range(20):
        served.knock(noise)
    assert served.all_come() == [[0, 1, 2]] * 3
    assert served.meeting.fault is None


def test_many_silent_connections_stop_nobody(serve: Serve) -> None:
    """More than are kept at a time: the oldest have to go."""
    served = serve(2)
    strangers = [served.knock(HELLO[:10]) for _ in range(300)]
    assert served.all_come() == [[0, 1]] * 2
    assert drain(strangers[0]) == b""


def test_a_wrong_secret_is_refused_and_said_when_its_rank_is_missed(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """Who cannot prove itself ends nothing, whatever it claims to be."""
    served = serve(2)
    with caplog.at_level(logging.WARNING, "syncline.wire"), pytest.raises(SecretError):
        served.prove(1, secret=b"a guess")
    late = served.come(0, timeout=2.0)
    assert "which says that it is rank 1: it does not know this run's secret" in caplog.text
    assert isinstance(late, RollCallError)
    assert "rank 1 (one that claims to be it was refused at 127.0.0.1:" in str(late)


def test_claims_beyond_the_world_leave_nothing(serve: Serve) -> None:
    served = serve(2)
    for rank in (2, 77, (1 << 32) - 1):
        with pytest.raises(SecretError):
            served.prove(rank, secret=b"a guess")
    assert served.meeting.refused == {}


def test_a_proof_for_another_purpose_is_refused(serve: Serve) -> None:
    served = serve(2)
    with pytest.raises((HandshakeError, ConnectionError)):
        served.prove(1, purpose="data")
    assert served.all_come() == [[0, 1]] * 2


def test_one_that_has_proved_itself_and_says_nothing_is_missed(serve: Serve) -> None:
    served = serve(2)
    served.prove(1)
    late = served.come(0, timeout=2.0)
    assert "1 of 2 processes have not come: rank 1 (it has connected, from 127.0.0.1:" in str(late)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (HUGE, "announced a record of 4294967295 bytes, but 16384 are the maximum"),
        (frame(Kind.RECORD, bytes(HEARD[Kind.RECORD] + 1)), "announced a record of 16385 bytes"),
        (b"\0" * 5, "sent a frame of unknown kind 0"),
        (frame(Kind.THROUGH), "sent through before its record"),
        (frame(Kind.RECORD, member(0, 3).to_text().encode()), "says that it is rank 0"),
        (frame(Kind.RECORD, b"{}"), "its record does not fit this version"),
    ],
    ids=["huge", "one beyond", "unknown", "order", "somebody else", "record"],
)
def test_one_that_breaks_the_rules_is_named_to_all(serve: Serve, said: bytes, wanted: str) -> None:
    served = serve(3)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(served.come, rank) for rank in (0, 2)]
        served.prove(1).sendall(said)
        for other in others:
            text = str(other.result(LIMIT_S))
            assert "rank 1 (from 127.0.0.1:" in text
            assert wanted in text


def test_one_that_leaves_too_much_is_named(serve: Serve) -> None:
    served = serve(2)
    clients = [served.client(rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda client: client.enter(), clients))
        list(pool.map(lambda rank: clients[rank].call_roll(member(rank, 2), "a run", SECRET), range(2)))
    full, room = divmod(NOTES_BYTES, VALUE_BYTES + NOTE_BYTES + 1)
    for number in range(full):
        clients[1].set(f"{number}", bytes(VALUE_BYTES))
    with pytest.raises(RollCallError, match=r"rank 1 \(host1, pid 101\) .* more than"):
        clients[1].set("9", bytes(room - NOTE_BYTES))
    with pytest.raises(RollCallError, match=r"rank 1 \(host1, pid 101\) .* more than"):
        clients[0].get("0")


def test_one_that_does_not_read_its_answers_is_not_heard_further(serve: Serve) -> None:
    """A million questions without a look at the answers: the others go on, and the meeting keeps one answer."""
    served = serve(2)
    clients = [served.client(rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda client: client.enter(), clients))
        list(pool.map(lambda rank: clients[rank].call_roll(member(rank, 2), "a run", SECRET), range(2)))
    clients[0].set("large", bytes(VALUE_BYTES))
    deaf = clients[1]._sock
    deaf.setblocking(False)
    rest, until = b"", time.monotonic() + LIMIT_S
    while not (stuck := [line for line in list(served.server._lines.values()) if line.unsent]):
        assert time.monotonic() < until
        rest = rest or frame(Kind.GET, note("large")) * 1000
        with contextlib.suppress(BlockingIOError):
            rest = rest[deaf.send(rest) :]
    (line,) = stuck
    assert sum(map(len, line.unsent)) <= VALUE_BYTES + 5
    assert clients[0].get("large") == bytes(VALUE_BYTES)
    assert clients[0].add("count", 3) == 3


def test_a_crowd_that_has_proved_itself_is_bounded(serve: Serve) -> None:
    served = serve(1)
    for _ in range(2 * 1 + 64):
        served.prove(0)
    with pytest.raises((HandshakeError, ConnectionError)):
        served.prove(0)


def test_one_that_dies_is_named_to_all(serve: Serve) -> None:
    served = serve(3)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(served.come, 0)
        dying = served.client(1)
        dying.enter()
        dying._send(frame(Kind.RECORD, member(1, 3).to_text().encode()))
        dying.close()
        assert "rank 1 (host1, pid 101) ended while the processes were meeting" in str(other.result(LIMIT_S))


def test_after_a_fault_it_goes_on_until_all_have_read_it(serve: Serve) -> None:
    """A minute would outlast this test: it ends with the last one."""
    served = serve(3)
    served.client(0).give_up("no such interface")
    served.server.close(60.0)
    for rank in (1, 2):
        text = str(served.come(rank))
        assert text.startswith("rank 0 (from 127.0.0.1:")
        assert text.endswith("): no such interface")
    served.server.join()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(served.where, LIMIT_S)


def test_after_a_fault_it_goes_where_nobody_else_is_coming(serve: Serve) -> None:
    served = serve(3)
    served.client(0).give_up("no such interface")
    served.server.close()
    served.server.join()


def test_one_that_does_not_read_the_fault_is_not_waited_for(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.wire.meeting_sockets._READ_S", 0.05)
    served = serve(3)
    served.prove(1)
    served.client(0).give_up("no such interface")
    served.server.close()
    served.server.join()


def test_one_that_was_let_in_before_all_were_through_is_not_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has proved itself, and says nothing and stays."""
    monkeypatch.setattr("syncline.wire.meeting_sockets._READ_S", 0.05)
    served = serve(1)
    client = served.client(0)
    client.enter()
    client.call_roll(member(0, 1), "a run", SECRET)
    stays, there = socket.socketpair()
    served.server._new.append((0, there, "a test"))
    client.through()
    served.server.close()
    served.server._thread.join(LIMIT_S)
    try:
        assert not served.server._thread.is_alive()
    finally:
        stays.close()


def test_an_end_that_is_asked_for_again_writes_to_no_other_file(serve: Serve) -> None:
    """The bell's descriptor is free when the thread has ended."""
    served = serve(1)
    bell = served.server._bell.fileno()
    served.server.close()
    served.server.join()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    if other != bell:
        spare, other = other, os.dup2(other, bell)
        os.close(spare)
    try:
        served.server.close()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        os.close(other)


def test_its_own_time_is_limited_too(serve: Serve) -> None:
    served = serve(2, limit_s=0.1)
    assert "the time for this start is over" in str(served.come(0))


def test_the_interpreter_waits_for_it() -> None:
    """Those who come late shall read why."""
    served = Served(1)
    thread = next(thread for thread in threading.enumerate() if thread.name == "syncline-meeting")
    assert not thread.daemon
    served.close()


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
        ((frame(Kind.OVER),), "breaks the rules of the meeting: it sent over"),
        ((struct.pack("<BI", Kind.WELCOME, 65),), "announced a welcome of 65 bytes, but 64 are the maximum"),
        ((struct.pack("<BI", Kind.ROLL, 0xFFFFFFFF),), "announced a roll of 4294967295 bytes"),
        ((b"HTTP/1.1 400 Bad Request",), "sent a frame of unknown kind"),
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
    with pytest.raises(GroupError, match=r"sent value|has ended"):
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
