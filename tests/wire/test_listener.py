"""Listeners let peers in; strangers are refused and logged, and keep nobody waiting."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strangers import LIMIT_S, RUN, SECRET, Where, drain, knock

from syncline.errors import GroupError, HandshakeError, SecretError, UsageError
from syncline.launch.address import addresses_towards, interface_address
from syncline.wire import handshake
from syncline.wire.handshake import run_id
from syncline.wire.listener import IN_FULL, Listener, Refusals, dial

WORLD = 4


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener("127.0.0.1", RUN, SECRET, 0, WORLD)
    yield found
    found.close()


@pytest.fixture(params=["tcp", "unix"])
def where(request: pytest.FixtureRequest, listener: Listener) -> Where:
    return (listener.address, listener.port) if request.param == "tcp" else listener.unix


def good_peer(listener: Listener, where: Where, source: int = 1, purpose: str = "data") -> None:
    """A peer gets in and bytes pass both ways, at whatever time this is asked."""
    with dial(where, RUN, SECRET, source, 0, purpose, LIMIT_S) as there:
        here = listener.take([source], purpose, LIMIT_S).get(source)
        assert here is not None
        with here:
            there.sendall(b"ping")
            assert here.recv(4, socket.MSG_WAITALL) == b"ping"
            here.sendall(b"pong")
            assert there.recv(4, socket.MSG_WAITALL) == b"pong"


def test_a_peer_that_proves_itself_gets_in(listener: Listener, where: Where) -> None:
    good_peer(listener, where)


def test_connections_are_told_apart_by_peer_and_purpose(listener: Listener, where: Where) -> None:
    calls = [(peer, purpose) for peer in (1, 2, 3) for purpose in ("control", "data")]
    with ThreadPoolExecutor(len(calls)) as pool:
        ends = pool.map(lambda call: dial(where, RUN, SECRET, call[0], 0, call[1], LIMIT_S), calls)
    for (peer, purpose), there in zip(calls, ends, strict=True):
        with there:
            there.sendall(f"{peer} {purpose}".encode())
            here = listener.take([peer], purpose, LIMIT_S).get(peer)
            assert here is not None
            with here:
                assert here.recv(100).decode() == f"{peer} {purpose}"
    assert listener.take([1], "data", 0).get(1) is None


def test_bytes_right_behind_the_proof_belong_to_the_connection(listener: Listener, where: Where) -> None:
    """The listener reads no byte more than the handshake has."""
    with knock(where) as sock:
        said = handshake.hello(RUN, 1, 0, "data")
        sock.sendall(said.raw)
        proof = handshake.check_answer(SECRET, said, sock.recv(handshake.ANSWER_BYTES, socket.MSG_WAITALL))
        sock.sendall(proof + b"and more")
        here = listener.take([1], "data", LIMIT_S).get(1)
        assert here is not None
        with here:
            assert here.recv(100) == b"and more"


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"\0" * 500,
        b"GET / HTTP/1.1\r\nHost: somewhere\r\nUser-Agent: a scanner that knows no better\r\n\r\n",
        b"SYN",
    ],
    ids=["closes", "zeros", "http", "half"],
)
def test_strangers_are_refused_and_logged(
    listener: Listener, where: Where, noise: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "syncline.wire"), knock(where) as stranger:
        with contextlib.suppress(OSError):  # the listener may hang up before the last byte
            stranger.sendall(noise)
            stranger.shutdown(socket.SHUT_WR)
        drain(stranger)
    assert "refused a connection from" in caplog.text
    good_peer(listener, where)


def test_strangers_that_say_nothing_keep_nobody_waiting(listener: Listener, where: Where) -> None:
    strangers = [knock(where) for _ in range(60)]
    half = [knock(where) for _ in range(20)]
    for sock in half:
        sock.sendall(handshake.hello(RUN, 1, 0, "data").raw[:30])
    good_peer(listener, where)
    listener.close()
    for sock in (*strangers, *half):
        with sock:
            assert drain(sock) == b""


def test_the_silent_are_refused_in_time(caplog: pytest.LogCaptureFixture) -> None:
    short = Listener("127.0.0.1", RUN, SECRET, 0, WORLD, handshake_s=0.05)
    try:
        with knock((short.address, short.port)) as stranger:
            stranger.sendall(b"x")
            assert drain(stranger) == b""
        assert "fell silent during the handshake, after 1 of" in caplog.text
    finally:
        short.close()


def test_a_thousand_strangers_do_not_fill_the_log(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "syncline.wire"):
        for _ in range(1000):
            with knock((listener.address, listener.port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n")
        good_peer(listener, (listener.address, listener.port))
        listener.close()
    assert len(caplog.records) < 3 * IN_FULL
    assert "refused 1000 connections so far, the latest from 127.0.0.1:" in caplog.text


def test_a_flood_of_strangers_pushes_out_strangers(listener: Listener) -> None:
    where = listener.address, listener.port
    strangers = [knock(where) for _ in range(300)]
    good_peer(listener, where)
    assert drain(strangers[0]) == b""  # the oldest had to go
    for sock in strangers:
        sock.close()


@pytest.mark.parametrize(
    ("changed", "logged"),
    [
        ({"secret": b"another"}, "which says that it is rank 1: it does not know this run's secret"),
        ({"run": run_id("another run")}, "another run"),
        ({"target": 5}, "it looks for rank 5, but this is rank 0"),
        ({"source": 4}, "rank 4 of 4 has nothing to connect for 'data'"),
        ({"purpose": "meeting"}, "rank 1 of 4 has nothing to connect for 'meeting'"),
    ],
)
def test_a_peer_of_another_run_secret_or_rank_is_refused(
    listener: Listener, where: Where, changed: dict[str, object], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    terms: dict[str, object] = {"run": RUN, "secret": SECRET, "source": 1, "target": 0, "purpose": "data"}
    with pytest.raises((HandshakeError, ConnectionError)):
        dial(where, timeout=LIMIT_S, **(terms | changed))  # type: ignore[arg-type]
    good_peer(listener, where, source=2)
    assert logged in caplog.text


def test_a_dialler_that_does_not_know_the_secret_but_goes_on_is_refused(listener: Listener, where: Where) -> None:
    with knock(where) as liar:
        liar.sendall(handshake.hello(RUN, 1, 0, "data").raw + b"\1" * handshake.MAC_BYTES)
        assert len(drain(liar)) <= handshake.ANSWER_BYTES  # no welcome
    assert listener.take([1], "data", 0).get(1) is None
    good_peer(listener, where)


def test_who_holds_another_secret_learns_it(where: Where) -> None:
    with pytest.raises(SecretError):
        dial(where, RUN, b"another", 1, 0, "data", LIMIT_S)


def test_a_port_where_nobody_listens_does_not_answer_itself() -> None:
    """The kernel may give a caller the very port that it calls, and connect it to itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    class Same(socket.socket):
        def connect(self, address: tuple[str, int]) -> None:  # type: ignore[override]
            self.bind(address)
            super().connect(address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("syncline.wire.listener.socket.socket", Same)
        with pytest.raises(ConnectionRefusedError):
            dial(("127.0.0.1", port), RUN, SECRET, 1, 0, "data", LIMIT_S)


def test_several_peers_are_taken_at_once(listener: Listener, where: Where) -> None:
    assert listener.take({1, 2, 3}, "data", 0.0) == {}
    ends = [dial(where, RUN, SECRET, peer, 0, "data", LIMIT_S) for peer in (1, 3)]
    found: dict[int, socket.socket] = {}
    while len(found) < 2:
        some = listener.take({1, 2, 3}, "data", LIMIT_S)
        assert some
        found |= some
    assert sorted(found) == [1, 3]
    for sock in (*ends, *found.values()):
        sock.close()


def test_a_second_connection_for_the_same_is_refused(listener: Listener, where: Where) -> None:
    with dial(where, RUN, SECRET, 1, 0, "data", LIMIT_S) as first:
        with pytest.raises((HandshakeError, ConnectionError)):
            dial(where, RUN, SECRET, 1, 0, "data", LIMIT_S)
        here = listener.take([1], "data", LIMIT_S).get(1)
        assert here is not None
        with here:
            first.sendall(b"still here")
            assert here.recv(100) == b"still here"


def fake(replies: Callable[[socket.socket], None]) -> tuple[tuple[str, int], threading.Thread, socket.socket]:
    """Something that is not a listener of ours."""
    door = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = door.accept()
        with sock:
            replies(sock)

    thread = threading.Thread(target=serve)
    thread.start()
    return door.getsockname(), thread, door


@pytest.mark.parametrize(
    "reply", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * handshake.ANSWER_BYTES], ids=["closes", "http", "zeros"]
)
def test_a_dialler_does_not_trust_who_cannot_prove_itself(reply: bytes) -> None:
    heard: list[bytes] = []

    def replies(sock: socket.socket) -> None:
        heard.append(sock.recv(handshake.HELLO_BYTES, socket.MSG_WAITALL))
        sock.sendall(reply)
        sock.shutdown(socket.SHUT_WR)
        heard.append(drain(sock))

    where, thread, door = fake(replies)
    with door, pytest.raises((HandshakeError, ConnectionError)):
        dial(where, RUN, SECRET, 1, 0, "data", LIMIT_S)
    thread.join(LIMIT_S)
    assert not heard[1].strip(b"\0")  # no proof for an impostor


def test_a_dialler_does_not_wait_for_ever() -> None:
    done = threading.Event()
    where, thread, door = fake(lambda _: done.wait(LIMIT_S) and None)
    with door, pytest.raises(HandshakeError, match="silent"):
        dial(where, RUN, SECRET, 1, 0, "data", 0.05)
    done.set()
    thread.join(LIMIT_S)


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        where = door.getsockname()
    with pytest.raises(ConnectionRefusedError):
        dial(where, RUN, SECRET, 1, 0, "data", LIMIT_S)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1: .*interface="):
        Listener("192.0.2.1", RUN, SECRET, 0, WORLD)


def test_interfaces_and_addresses() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("127.0.0.1") == "127.0.0.1"
    assert interface_address("::1") == "::1"
    with pytest.raises(UsageError, match=r"'nowhere0' has no IPv4 address .*there are .*lo"):
        interface_address("nowhere0")
    assert addresses_towards("127.0.0.1", 80) == ["127.0.0.1"]
    for name in ("no such name", "a..b", f"{'a' * 64}.org"):
        with pytest.raises(GroupError, match="cannot resolve the address"):
            addresses_towards(name, 80)
        with pytest.raises(OSError, match=r"Name or service not known|is no name of a host"):
            dial((name, 80), RUN, SECRET, 1, 0, "data", LIMIT_S)


def test_the_doors_close_with_all_that_nobody_took() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    files, threads = open_files(), threading.active_count()
    doors = Listener("127.0.0.1", RUN, SECRET, 0, WORLD)
    with dial(doors.unix, RUN, SECRET, 1, 0, "data", LIMIT_S) as there, knock((doors.address, doors.port)):
        doors.close()
        doors.close()
        assert there.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        knock((doors.address, doors.port))
    assert open_files() == files
    assert threading.active_count() == threads


log = logging.getLogger("syncline.test")


@given(st.integers(0, 5000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
def test_any_number_makes_few_lines_and_the_last_has_the_count(caplog: pytest.LogCaptureFixture, number: int) -> None:
    caplog.clear()
    refusals = Refusals(log)
    for caller in range(number):
        refusals.add(f"10.0.0.{caller}", "it does not speak this protocol")
    refusals.close()
    refusals.close()
    lines = [record.getMessage() for record in caplog.records]
    in_full = min(number, IN_FULL)
    assert lines[:in_full] == [
        f"refused a connection from 10.0.0.{caller}: it does not speak this protocol" for caller in range(in_full)
    ]
    assert len(lines) <= IN_FULL + max(0, (number // IN_FULL).bit_length())
    if number > IN_FULL:
        assert lines[-1].startswith(f"refused {number} connections so far, the latest from 10.0.0.{number - 1}: it")
