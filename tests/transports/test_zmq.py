"""The transport over ZeroMQ: who is let in, connections that break, what a peer may not send, and what is missing."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from syncline.errors import GroupError, PeerLost, ProtocolError, SynclineError, UsageError
from syncline.testing import check_transport
from syncline.transports import Bytes, MemoryStore, Place

zmq = pytest.importorskip("zmq")

from syncline.transports import zmq as transport  # noqa: E402
from syncline.transports.zmq import Zmq  # noqa: E402

LIMIT_S = 20.0
LARGE = 3_000_001
TCP, NEAR = frozenset[int](), frozenset({0, 1})


def places(near: frozenset[int] = TCP, **options: Any) -> list[Place]:
    store = MemoryStore()
    return [Place(rank, 2, store, timeout_s=LIMIT_S, secret=b"of this run", near=near, **options) for rank in (0, 1)]


@contextmanager
def ends(near: frozenset[int] = TCP, curve: str = "off") -> Iterator[list[Zmq]]:
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda place: Zmq(place, curve=curve), places(near)))  # type: ignore[arg-type]
        try:
            yield made
        finally:
            list(threads.map(Zmq.close, made))


def exchange(first: Zmq, second: Zmq, nbytes: int) -> Any:
    """Whether each of so many bytes arrives as it was sent."""
    data, into = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    handles = [first.send(1, 0, data), second.recv(0, 0, into)]
    until(lambda: all(handle.done for handle in handles), first, second)
    assert [handle.error for handle in handles] == [None, None]
    return into == data


def until(holds: Any, *polled: Zmq) -> None:
    for _ in range(int(LIMIT_S / 0.002)):
        if holds():
            return
        for end in polled:
            end.poll(0.001)
    raise AssertionError("it has not come")


@pytest.mark.slow
def test_all_laws_hold_with_encryption() -> None:
    assert "received data is added" in check_transport("zmq(curve=on)", ahead_bytes=1 << 20, examples=5)


@pytest.mark.parametrize("near", [TCP, NEAR], ids=["tcp", "ipc"])
def test_memory_goes_without_a_copy_or_where_there_is_no_other_way_with_one(
    near: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(transport._sender(), transport._Lender)
    with ends(near) as (first, second):
        assert exchange(first, second, LARGE).all()
        monkeypatch.setattr(first, "_sender", transport._Copier())
        assert exchange(first, second, LARGE).all()


# Strangers.


def stranger(context: Any, where: str, how: str, note: dict[str, Any]) -> Any:
    """A socket that calls where rank 1 should, with everything but what rank 1 alone has been told."""
    caller = context.socket(zmq.PAIR)
    caller.linger = 0
    if how == "wrong password":
        caller.plain_username, caller.plain_password = b"1", b"0" * 32
    elif how == "another rank's name":
        caller.plain_username, caller.plain_password = b"0", note["token"].encode()
    elif how == "a key of its own":
        caller.curve_publickey, caller.curve_secretkey = zmq.curve_keypair()
        caller.curve_serverkey = note["key"].encode()
    caller.connect(where)
    caller.send(b"let me in")
    return caller


@pytest.mark.every(2)
@pytest.mark.parametrize("near", [TCP, NEAR], ids=["tcp", "ipc"])
@pytest.mark.parametrize(
    ("how", "curve"),
    [
        ("no password", "off"),
        ("wrong password", "off"),
        ("another rank's name", "off"),
        ("wrong password", "on"),
        ("a key of its own", "on"),
    ],
)
def test_a_stranger_who_calls_first_is_kept_out(how: str, curve: str, near: frozenset[int]) -> None:
    """Rank 1 comes later, and finds its place free."""
    mine, theirs = places(near)
    with zmq.Context() as context, ThreadPoolExecutor(1) as threads:
        forming = threads.submit(Zmq, mine, curve=curve)  # type: ignore[arg-type]
        while (text := mine.store.get("transport/0")) is None:
            assert not forming.done()
        note = json.loads(text)
        caller = stranger(context, note["at"]["1"], how, note)
        refused = caller.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        second = Zmq(theirs, curve=curve)  # type: ignore[arg-type]
        first = forming.result(LIMIT_S)
        try:
            assert exchange(first, second, LARGE).all()
            later = stranger(context, note["at"]["1"], how, note)
            assert exchange(first, second, LARGE).all()
            assert not caller.poll(50)  # nothing comes to it
            later.close(0)
            assert exchange(first, second, 1000).all()  # whose end is not the peer's
        finally:
            threads.submit(first.close)
            second.close()
            refused.close(0)
            caller.close(0)


def test_the_end_of_a_stranger_is_not_that_of_the_peer_who_gets_its_descriptor() -> None:
    mine, theirs = places()
    with ThreadPoolExecutor(1) as threads, contextlib.ExitStack() as opened:
        forming = threads.submit(Zmq, mine)
        while (text := mine.store.get("transport/0")) is None:
            assert not forming.done()
        host, port = json.loads(text)["at"]["1"].removeprefix("tcp://").split(":")
        strangers = [opened.enter_context(socket.create_connection((host, int(port)), LIMIT_S)) for _ in range(64)]
        for stranger in strangers:  # all are there at once, so their numbers are many
            assert stranger.recv(1)
        for stranger in strangers:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(60))
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1 << 10):
                    pass
        second = Zmq(theirs)
        first = forming.result(LIMIT_S)
        try:
            assert exchange(first, second, LARGE).all()
        finally:
            threads.submit(first.close)
            second.close()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x01\x00NULL" + bytes(60)])
def test_a_stranger_who_speaks_something_else_is_no_peer(said: bytes) -> None:
    """Nothing, another protocol, or an older ZMTP, which knows of no password."""
    mine, theirs = places()
    with ThreadPoolExecutor(1) as threads:
        forming = threads.submit(Zmq, mine)
        while (text := mine.store.get("transport/0")) is None:
            assert not forming.done()
        host, port = json.loads(text)["at"]["1"].removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), LIMIT_S) as raw:
            raw.sendall(said)
            second = Zmq(theirs)
            first = forming.result(LIMIT_S)
            assert exchange(first, second, LARGE).all()
        assert exchange(first, second, 1000).all()
        threads.submit(first.close)
        second.close()


def test_a_peer_with_another_secret_is_refused_by_both() -> None:
    mine, theirs = places()
    theirs = Place(1, 2, theirs.store, timeout_s=LIMIT_S, secret=b"of another run")
    mine = Place(0, 2, mine.store, timeout_s=2.0, secret=b"of this run")
    with ThreadPoolExecutor(1) as threads:
        forming = threads.submit(Zmq, mine)
        with pytest.raises(GroupError, match="rank 0 over ZeroMQ: it does not know this run's secret"):
            Zmq(theirs)
        with pytest.raises(GroupError, match="no ZeroMQ connection with rank 1 within 2 s"):
            forming.result(LIMIT_S)


@pytest.mark.parametrize(
    ("note", "said"),
    [
        (b"\xff", "its note of the start makes no sense"),
        (b'{"at": [], "token": "", "key": ""}', "its note of the start makes no sense"),
        (b'{"at": {"7": "tcp://127.0.0.1:1"}, "token": "", "key": ""}', "does not say where rank 1 connects"),
    ],
)
def test_notes_that_no_rank_writes(note: bytes, said: str) -> None:
    _, mine = places()
    mine.store.set("transport/0", note)
    with pytest.raises(ProtocolError, match=said):
        Zmq(mine)


def test_who_does_not_come_is_named_and_nothing_stays_open() -> None:
    before = threading.active_count()
    with pytest.raises(GroupError, match="no ZeroMQ connection with rank 1 within 0 s: check that hosts reach"):
        Zmq(Place(0, 2, timeout_s=0.2))
    assert threading.active_count() <= before  # threads of earlier tests may have ended meanwhile

    def failed() -> None:
        raise GroupError("rank 1 has failed")

    with pytest.raises(GroupError, match="rank 1 has failed"):
        Zmq(Place(0, 2, timeout_s=LIMIT_S, check=failed))


# Peers that are there.


def frame(kind: int, slot: int, tag: int, size: int, body: bytes = b"") -> bytes:
    return struct.pack("<BxHxxxxQQ", kind, slot, tag, size) + body


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "sent",
    [
        [b""],
        [bytes(24)],
        [bytes(100_000)],
        [frame(transport._BODY, 1, 0, LARGE)],
        [frame(transport._TAKEN, 1, 0, 0)],
        [frame(transport._TAKEN, 0, 0, 0)],
        [frame(transport._PASSED, 0, 0, 0), frame(99, 0, 0, 0)],
    ],
    ids=str,
)
def test_messages_that_no_peer_sends(sent: list[bytes]) -> None:
    with ends() as (first, second):
        handle = first.recv(1, 0, np.zeros(8, np.uint8))
        for message in sent:
            second._lines[0].socket.send(message)
        with pytest.raises(ProtocolError, match="rank 1 broke the protocol") as fault:
            until(lambda: False, first)
        assert fault.value.rank == 1
        until(lambda: handle.done, first)
        assert isinstance(handle.error, PeerLost)


@pytest.mark.parametrize("nbytes", [0, 1000, transport._SLICE_BYTES + 1])
def test_slices_of_another_size(nbytes: int) -> None:
    with ends() as (first, second):
        into = np.zeros(LARGE, np.uint8)
        handle = first.recv(1, 0, into)
        sent = second.send(0, 0, into)
        second._sender = Odd(nbytes)  # type: ignore[assignment]
        with pytest.raises(ProtocolError, match=f"{nbytes} bytes of a body came where {transport._SLICE_BYTES}"):
            until(lambda: handle.done, first, second)
        until(lambda: sent.done, second)
        assert isinstance(handle.error, PeerLost)
        assert isinstance(sent.error, PeerLost)


class Odd:
    """Sends something else than it was given."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def send(self, to: Any, data: Bytes, flags: int) -> None:  # noqa: ARG002
        to.send(bytes(self.nbytes), flags)


@pytest.mark.parametrize("near", [TCP, NEAR], ids=["tcp", "ipc"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_connection_that_breaks_fails_what_waits_for_it(who: int, near: frozenset[int]) -> None:
    """The one that sends more than any message may have is cut off, whoever has dialled."""
    with ends(near) as both:
        here, there = both[who], both[1 - who]
        handles = [here.recv(1 - who, 0, np.zeros(8, np.uint8)), here.send(1 - who, 1, np.zeros(LARGE, np.uint8))]
        there._lines[who].socket.send(bytes(4 * transport._SLICE_BYTES))
        until(lambda: all(handle.done for handle in handles), here)
        assert all(isinstance(handle.error, PeerLost) and handle.error.rank == 1 - who for handle in handles)
        late = there.recv(who, 0, np.zeros(8, np.uint8))
        until(lambda: late.done, there)
        assert isinstance(late.error, SynclineError)


# What is missing.


def test_what_is_missing_is_named_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zmq", None)
        with pytest.raises(UsageError, match=r"needs pyzmq .*: pip install 'syncline\[zmq\]'"):
            Zmq(Place(0, 2))
    with monkeypatch.context() as patch:
        patch.setattr(zmq, "pyzmq_version_info", lambda: (26, 4, 0))
        with pytest.raises(UsageError, match=r"needs pyzmq 27 or newer.*: pip install -U 'syncline\[zmq\]'"):
            Zmq(Place(0, 2))
    with monkeypatch.context() as patch:
        patch.setattr(zmq, "has", lambda what: what != "curve")
        with pytest.raises(UsageError, match=r"built with CURVE.*'syncline\[zmq\]'"):
            Zmq(Place(0, 2), curve="on")
