"""A served meeting under attack: strangers on the port, and processes that hold the secret and are broken."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from plays import member
from served import Serve
from strangers import LIMIT_S, RUN, SECRET, drain

from syncline.errors import HandshakeError, RollCallError, SecretError
from syncline.wire import handshake
from syncline.wire.meeting import HEARD, NOTE_BYTES, NOTES_BYTES, VALUE_BYTES, Kind, fault_frame, frame, note
from syncline.wire.meeting_sockets import PURPOSE


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
        (HUGE, "announced 4294967295 bytes of record, where 16384 are the most"),
        (frame(Kind.RECORD, bytes(HEARD[Kind.RECORD] + 1)), "announced 16385 bytes of record"),
        (b"\0" * 5, "said something unknown (kind 0)"),
        (frame(Kind.THROUGH), "said through before its record"),
        (frame(Kind.RECORD, member(0, 3).to_text().encode()), "says that it is rank 0"),
        (frame(Kind.RECORD, b"{}"), "its record is not one of this version"),
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
