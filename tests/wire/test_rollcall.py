"""Forming a group: all find each other, or all learn the same fault at once."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest

from syncline.errors import GroupError, HandshakeError, RollCallError, SecretError
from syncline.wire.handshake import run_id
from syncline.wire.listener import Listener, connect
from syncline.wire.meeting import Meeting, Roll
from syncline.wire.meeting_sockets import MeetingClient, MeetingServer

LIMIT_S = 20.0
RUN = "a run"
SECRET = b"the run's secret"


@dataclass(frozen=True)
class Caller:
    """How one process comes to the roll call."""

    index: int
    world: int
    strategy: str = "ring"
    timeout: float = LIMIT_S


def form(client: MeetingClient, caller: Caller) -> Roll:
    """The roll call and connections of one process, with bytes over every connection."""
    listener = Listener("127.0.0.1", run_id(RUN), SECRET, caller.index, caller.world)
    socks: list[socket.socket] = []
    try:
        deadline = time.monotonic() + caller.timeout
        client.limit(deadline, caller.timeout)
        client.enter()
        me = listener.describe({"strategy": caller.strategy, "version": "1"})
        roll = client.call_roll(me, RUN, SECRET)
        for purpose, near in (("control", frozenset[int]()), ("data", roll.near)):
            found = connect(roll, listener, purpose, near, time.monotonic() + LIMIT_S, client.check)
            socks += found.values()
            for peer, sock in found.items():
                sock.sendall(f"{purpose} {caller.index} to {peer};".encode())
            for peer, sock in found.items():
                expected = f"{purpose} {peer} to {caller.index};".encode()
                assert sock.recv(len(expected), socket.MSG_WAITALL) == expected
        client.through()
        return roll
    except GroupError as error:
        client.give_up(str(error))
        raise
    finally:
        listener.close()
        client.close()
        for sock in socks:
            sock.close()


def form_all(callers: Sequence[Caller], hint: Callable[[int], str] = lambda _: "") -> list[Roll | GroupError]:
    """All at once, each in its thread; what each got."""
    meeting = Meeting(callers[0].world, b"", hint)
    server = MeetingServer((), run_id(RUN), SECRET, meeting, LIMIT_S)

    def body(client: MeetingClient, caller: Caller) -> Roll | GroupError:
        try:
            return form(client, caller)
        except GroupError as error:
            return error

    try:
        # Before any of them begins, since one may give up before another's thread has had its turn.
        clients = [MeetingClient(server.adopt(one.index, "a test"), "here", one.world) for one in callers]
        with ThreadPoolExecutor(len(callers)) as pool:
            return list(pool.map(body, clients, callers, timeout=2 * LIMIT_S))
    finally:
        server.close()
        server.join()


def faults(callers: Sequence[Caller], **options: Any) -> list[str]:
    """The texts of a roll call in which everyone fails."""
    found = form_all(callers, **options)
    assert all(isinstance(result, RollCallError) for result in found), found
    return [str(error) for error in found]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_find_each_other(world: int) -> None:
    rolls = form_all([Caller(index, world) for index in reversed(range(world))])
    assert all(isinstance(roll, Roll) for roll in rolls), rolls
    first = rolls[0]
    assert isinstance(first, Roll)
    assert [member.index for member in first.members] == list(range(world))
    assert first.hosts == 1
    assert [roll.near for roll in rolls if isinstance(roll, Roll)] == [
        frozenset(range(world)) - {index} for index in reversed(range(world))
    ]
    assert first.nodes == (0,) * world
    for roll in rolls:
        assert isinstance(roll, Roll)
        assert roll.members == first.members


def test_the_missing_are_named_with_where_they_were_expected() -> None:
    came = [Caller(index, 5, timeout=2.0) for index in (0, 3)]
    for text in faults(came, hint=lambda index: f" (node {index // 2})"):
        assert "3 of 5 processes have not come: rank 1 (node 0), rank 2 (node 1), rank 4 (node 2);" in text
        assert "init(timeout=)" in text


def test_who_gives_up_first_tells_the_others() -> None:
    """They end with the same text, without waiting for their own time limit."""
    texts = faults([Caller(0, 3, timeout=0.1), Caller(1, 3, timeout=1000.0)])
    assert len(set(texts)) == 1
    assert "rank 2" in texts[0]


def test_a_duplicate_rank_fails_all() -> None:
    callers = [Caller(0, 3), Caller(1, 3), Caller(1, 3)]
    for text in faults(callers):
        assert "rank 1 is taken" in text
        assert "claims it too" in text


@pytest.mark.parametrize(
    ("odd", "wanted"),
    [
        (Caller(2, 4), ["counts 4", "counts 3", "same world size"]),
        (Caller(3, 4), ["counts 4", "counts 3", "same world size"]),
        (
            Caller(2, 3, strategy="ps(servers=1)"),
            ["has strategy", "'ps(servers=1)'", "'ring'", "all ranks need the same"],
        ),
    ],
    ids=["world", "rank", "strategy"],
)
def test_one_that_disagrees_fails_all_at_once(odd: Caller, wanted: list[str]) -> None:
    """Its rank, host and process are in everybody's error."""
    texts = faults([Caller(0, 3), Caller(1, 3), odd])
    for text in texts:
        for part in (f"rank {odd.index}", socket.gethostname(), *wanted):
            assert part in text


@dataclass
class Here:
    """A listener, and a roll of which only this process exists."""

    listener: Listener
    roll: Roll

    def connect(self, **options: Any) -> None:
        terms = {
            "purpose": "data",
            "near": {1},
            "deadline": time.monotonic() + LIMIT_S,
            "check": lambda: None,
        } | options
        try:
            for sock in connect(self.roll, self.listener, **terms).values():
                sock.close()
        finally:
            self.listener.close()


def alone(index: int, **other: Any) -> Here:
    listener = Listener("127.0.0.1", run_id(RUN), SECRET, index, 2)
    me = listener.describe({})
    absent = replace(me, index=1 - index, host="elsewhere", pid=77, **other)
    members = (me, absent) if index == 0 else (absent, me)
    return Here(listener, Roll(index, members, RUN, SECRET))


def test_a_fault_found_elsewhere_ends_the_wait_for_connections() -> None:
    def check() -> None:
        raise RollCallError("rank 1 has burnt down")

    with pytest.raises(RollCallError, match="rank 1 has burnt down"):
        alone(0).connect(check=check)


def test_a_peer_that_does_not_connect_is_named() -> None:
    with pytest.raises(GroupError, match=r"no data connection within -?0 s from rank 1 \(elsewhere, pid 77\)"):
        alone(0).connect(deadline=time.monotonic())


def test_a_peer_that_cannot_be_reached_is_named_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    with pytest.raises(GroupError, match=rf"cannot connect to rank 0 \(elsewhere, pid 77\) at 127.0.0.1:{port}: "):
        alone(1, port=port).connect(purpose="control", near=())


def calls(errors: list[Exception], monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Connect to a peer at whose door the first calls end so; those that were not made."""

    def dial(*_: Any) -> socket.socket:
        if errors:
            raise errors.pop(0)
        return socket.socket()

    monkeypatch.setattr("syncline.wire.listener.dial", dial)
    alone(1).connect(near=())
    return errors


@pytest.mark.parametrize(
    "error",
    [
        HandshakeError("it closed the connection"),
        BlockingIOError(errno.EAGAIN, "its queue is full"),
        ConnectionResetError(errno.ECONNRESET, "it had read half of this"),
        BrokenPipeError(errno.EPIPE, "it had read nothing of this"),
    ],
)
def test_a_peer_that_has_let_one_go_in_a_crowd_is_called_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calls([error] * 3, monkeypatch) == []


def test_a_peer_in_a_crowd_is_called_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer than nobody knows of a fault."""
    monkeypatch.setattr("syncline.wire.listener._DIAL_S", 0.0)
    assert calls([BlockingIOError(errno.EAGAIN, "its queue is full")] * 3, monkeypatch) == []

    def check() -> None:
        raise RollCallError("rank 0 has burnt down")

    monkeypatch.setattr("syncline.wire.listener.dial", _refuses)
    with pytest.raises(RollCallError, match="burnt"):
        alone(1).connect(near=(), check=check)


def _refuses(*_: Any) -> socket.socket:
    raise HandshakeError("it closed the connection")


def test_a_peer_with_another_secret_is_not_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HandshakeError, match="refused: it does not know"):
        calls([SecretError("it does not know this run's secret")], monkeypatch)


def test_why_a_peer_has_closed_its_doors_is_waited_for() -> None:
    """It has heard of a process that has failed before this one has."""
    listener = Listener("127.0.0.1", run_id(RUN), SECRET, 1, 2)
    me = listener.describe({})
    listener.close()
    looks: list[None] = []

    def check() -> None:
        looks.append(None)
        if len(looks) > 3:
            raise RollCallError("rank 2 (host, pid 5): ValueError: the data are spoilt")

    roll = Roll(1, (replace(me, index=0), me), RUN, SECRET)
    with pytest.raises(RollCallError, match=r"rank 2 .*the data are spoilt"):
        connect(roll, listener, "control", (), time.monotonic() + LIMIT_S, check)


def test_nobody_is_left_behind_in_threads() -> None:
    form_all([Caller(index, 2) for index in range(2)])
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("syncline-meet", "syncline-d"))
    ]
