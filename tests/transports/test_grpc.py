"""The transport over gRPC: who is let in, what a peer may not send, how it ends, and what is missing."""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from syncline.errors import GroupError, HandshakeError, PeerLost, ProtocolError, SecretError, UsageError
from syncline.transports import Bytes, MemoryStore, Place
from syncline.wire import handshake

grpc = pytest.importorskip("grpc")

from syncline.transports import grpc as transport  # noqa: E402
from syncline.transports.grpc import Grpc  # noqa: E402

LIMIT_S = 20.0
LARGE = 3_000_001
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


def places(world: int = 2, **options: Any) -> list[Place]:
    options = {"timeout_s": LIMIT_S, "secret": b"of this run"} | options
    store = MemoryStore()
    return [Place(rank, world, store, **options) for rank in range(world)]


@contextmanager
def threads() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def until(holds: Callable[[], bool], *polled: Grpc) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "it has not come"
        for end in polled:
            end.poll(0.001)


def exchange(first: Grpc, second: Grpc, nbytes: int = LARGE) -> None:
    data, into = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    handles = [first.send(1, 0, data), second.recv(0, 0, into)]
    until(lambda: all(handle.done for handle in handles), first, second)
    assert [handle.error for handle in handles] == [None, None]
    assert (into == data).all()


def close(*ends: Grpc) -> None:
    with ThreadPoolExecutor(len(ends)) as pool:
        list(pool.map(Grpc.close, ends))


def told(place: Place, forming: Future[Any] | None = None) -> tuple[bytes, str]:
    """The number that rank 0 has drawn, and where it listens."""
    while (note := place.store.get("transport/grpc/0")) is None:
        assert forming is None or not forming.done()
    return note[: handshake.RUN_BYTES], note[handshake.RUN_BYTES :].decode()


def call(where: str, said: Sequence[bytes], method: str = transport._METHOD) -> Any:
    """The status of a call that says something and waits for the end."""
    with grpc.insecure_channel(where, OPTIONS) as channel:
        held = threading.Event()

        def requests() -> Iterator[bytes]:
            yield from said
            held.wait(LIMIT_S)

        with pytest.raises(grpc.RpcError) as refused:
            list(channel.stream_stream(method)(requests(), timeout=LIMIT_S))
        held.set()
        return refused.value.code()


# Strangers.


def hello(run: bytes, source: int = 1, purpose: str = "grpc") -> bytes:
    return handshake.hello(run, source, 0, purpose).raw


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("said", "status"),
    [
        (lambda _: [b""], "UNAUTHENTICATED"),
        (lambda _: [b"let me in"], "UNAUTHENTICATED"),
        (lambda _: [bytes(transport._SLICE_BYTES)], "UNAUTHENTICATED"),
        (lambda _: [bytes(transport._SLICE_BYTES + transport._SLICE.size + 1)], "RESOURCE_EXHAUSTED"),
        (lambda _: [bytes(100_000_000)], "RESOURCE_EXHAUSTED"),
        (lambda _: [hello(bytes(16)), bytes(32)], "UNAUTHENTICATED"),
        (lambda run: [hello(run), bytes(32)], "UNAUTHENTICATED"),
        (lambda run: [hello(run, purpose="control"), bytes(32)], "UNAUTHENTICATED"),
        (lambda run: [hello(run), b""], "UNAUTHENTICATED"),
    ],
    ids=["nothing", "text", "a slice", "more", "much more", "another run", "no proof", "another purpose", "half"],
)
def test_a_stranger_who_calls_first_is_refused(said: Callable[[bytes], list[bytes]], status: str) -> None:
    mine, theirs = places()
    with threads() as start:
        forming = start(Grpc, mine)
        run, where = told(mine, forming)
        assert call(where, said(run)) is grpc.StatusCode[status]
        second = Grpc(theirs)
        first = forming.result(LIMIT_S)
        exchange(first, second)
        close(first, second)


@pytest.mark.parametrize(("run", "target", "purpose"), [(0, 0, "grpc"), (1, 1, "grpc"), (1, 0, "control")])
def test_who_looks_for_something_else_gets_no_answer(run: int, target: int, purpose: str) -> None:
    mine, theirs = places()
    with threads() as start:
        forming = start(Grpc, mine)
        drawn, where = told(mine, forming)
        said = handshake.hello(drawn if run else bytes(handshake.RUN_BYTES), 1, target, purpose)
        with grpc.insecure_channel(where, OPTIONS) as channel, pytest.raises(grpc.RpcError) as refused:
            next(channel.stream_stream(transport._METHOD)(iter([said.raw]), timeout=LIMIT_S))
        assert "looking for another" in refused.value.details()
        second = Grpc(theirs)
        close(forming.result(LIMIT_S), second)


def test_a_recorded_proof_lets_nobody_in() -> None:
    """What rank 1 has said to rank 0 is said again."""
    mine, theirs = places(world=3)[:2]
    with threads() as start:
        forming = start(Grpc, mine)
        run, where = told(mine, forming)
        with grpc.insecure_channel(where, OPTIONS) as channel:
            said = handshake.hello(run, 1, 0, "grpc")
            heard = channel.stream_stream(transport._METHOD)(iter([said.raw]))
            proof = handshake.check_answer(theirs.secret, said, next(heard))
            heard.cancel()
        assert call(where, [said.raw, proof]) is grpc.StatusCode.UNAUTHENTICATED
        assert not forming.done()
        ends = [start(Grpc, Place(rank, 3, mine.store, secret=mine.secret, timeout_s=LIMIT_S)) for rank in (1, 2)]
        close(*(end.result(LIMIT_S) for end in [forming, *ends]))


@pytest.mark.parametrize("with_stream", [True, False])
def test_strangers_who_say_nothing_hold_nobody_up(with_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there may be, with a stream that says nothing, or with a connection alone."""
    monkeypatch.setattr(transport, "_HANDSHAKE_S", 1.0)
    options = dict(transport._OPTIONS)
    options |= {"grpc.server_handshake_timeout_ms": 1000, "grpc.max_connection_idle_ms": 1000}
    monkeypatch.setattr(transport, "_CONNECTIONS", transport._STRANGERS)
    monkeypatch.setattr(transport, "_OPTIONS", tuple(options.items()))
    mine, theirs = places()
    with threads() as start, ExitStack() as strangers:
        forming = start(Grpc, mine)
        _, where = told(mine, forming)
        held = threading.Event()
        for _ in range(transport._STRANGERS + 4):
            if with_stream:
                channel = strangers.enter_context(grpc.insecure_channel(where, OPTIONS))
                strangers.callback(channel.stream_stream(transport._METHOD)(_held(held)).cancel)
            else:
                host, _, port = where.removeprefix("ipv4:").rpartition(":")
                strangers.enter_context(socket.create_connection((host, int(port)), LIMIT_S))
        strangers.callback(held.set)
        while call(where, [b"is there a place?"]) is grpc.StatusCode.UNAUTHENTICATED:
            pass
        second = Grpc(theirs)
        first = forming.result(LIMIT_S)
        exchange(first, second)
        close(first, second)


def _held(event: threading.Event) -> Iterator[bytes]:
    event.wait(LIMIT_S)
    yield from ()


def call_until_refused(host: str, port: int) -> None:
    """Connect again and again: gRPC stops to listen in a thread of its own."""
    due = time.monotonic() + LIMIT_S
    while time.monotonic() < due:
        socket.create_connection((host, port), LIMIT_S).close()


def test_nobody_listens_once_all_are_connected() -> None:
    mine, theirs = places()
    with threads() as start:
        forming = start(Grpc, mine)
        second = Grpc(theirs)
        first = forming.result(LIMIT_S)
        _, where = told(mine)
        host, _, port = where.removeprefix("ipv4:").rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            call_until_refused(host, int(port))
        exchange(first, second)
        close(first, second)


def test_a_peer_with_another_secret_is_refused_by_both() -> None:
    mine = places(timeout_s=2.0)[0]
    theirs = Place(1, 2, mine.store, timeout_s=LIMIT_S, secret=b"of another run")
    with threads() as start:
        forming = start(Grpc, mine)
        with pytest.raises(SecretError, match=r"rank 0 at ipv4.*: it does not know this run's secret"):
            Grpc(theirs)
        with pytest.raises(GroupError, match="rank 0 has no gRPC stream with rank 1 after 2 s"):
            forming.result(LIMIT_S)


def test_a_peer_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = places(timeout_s=2.0)
    with threads() as start:
        forming = start(Grpc, mine)
        told(mine, forming)
        monkeypatch.setattr(transport._Call, "method", "/syncline/SYNCLIN0", raising=True)
        with pytest.raises(HandshakeError, match=r"rank 0 at .* speaks another version of the protocol: install one"):
            Grpc(theirs)
        with pytest.raises(GroupError, match="no gRPC stream with rank 1"):
            forming.result(LIMIT_S)


def test_a_proxy_in_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    mine, theirs = places()
    with threads() as start:
        forming = start(Grpc, mine)
        second = Grpc(theirs)
        first = forming.result(LIMIT_S)
        exchange(first, second)
        close(first, second)


def test_who_does_not_come_is_named_and_nothing_stays() -> None:
    before = set(threading.enumerate())
    with pytest.raises(GroupError, match="rank 0 has no gRPC stream with rank 1 after 0 s"):
        Grpc(Place(0, 2, timeout_s=0.2))
    with pytest.raises(GroupError, match="rank 1 has no gRPC stream with ranks 0, 2 after 0 s"):
        Grpc(Place(1, 3, timeout_s=0.2))

    def failed() -> None:
        raise GroupError("rank 1 has failed")

    with pytest.raises(GroupError, match="rank 1 has failed"):
        Grpc(Place(0, 2, timeout_s=LIMIT_S, check=failed))
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT_S)
    assert set(threading.enumerate()) <= before


# Peers that are there.


class Peer:
    """Rank 1, which has proved itself and then says what the test wants."""

    def __init__(self, place: Place) -> None:
        run, where = told(place)
        self._channel = grpc.insecure_channel(where, OPTIONS)
        self.leaves: Any = SimpleQueue()
        said = handshake.hello(run, 1, 0, "grpc")
        self.leaves.put(said.raw)
        self.heard = self._channel.stream_stream(transport._METHOD)(iter(self.leaves.get, None))
        self.leaves.put(handshake.check_answer(place.secret, said, next(self.heard)))
        assert next(self.heard) == handshake.WELCOME

    def close(self) -> None:
        self.leaves.put(None)
        self.heard.cancel()
        self._channel.close()


@contextmanager
def attacked() -> Iterator[tuple[Grpc, Peer]]:
    mine, theirs = places()
    with threads() as start:
        forming = start(Grpc, mine)
        told(mine, forming)
        peer = Peer(theirs)
        end = forming.result(LIMIT_S)
        try:
            yield end, peer
        finally:
            peer.close()
            end.close()


def frame(kind: int, slot: int, tag: int, size: int, body: bytes = b"") -> bytes:
    return struct.pack("<BxHxxxxQQ", kind, slot, tag, size) + body


def piece(slot: int, at: int, nbytes: int) -> bytes:
    return transport._SLICE.pack(0, slot, at) + bytes(nbytes)


ANNOUNCED = frame(2, 7, 0, LARGE)


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ([b""], "a frame of 0 bytes"),
        ([frame(9, 0, 0, 0)], "a frame of kind 9"),
        ([frame(1, 0, 0, 5, b"abc")], "which says it has 5 more"),
        ([bytes([1]) * 100_000], "a frame of 100000 bytes"),
        ([piece(3, 0, 10)], "of a body came that nobody has asked for"),
        ([b"\0"], "a slice of 1 bytes"),
        ([transport._SLICE.pack(0, 7, 0)], "a slice of 16 bytes"),
        ([ANNOUNCED, piece(7, 1, 1 << 20)], "bytes 1 to 1048577 of a body came"),
        ([ANNOUNCED, piece(7, 0, 10)], "bytes 0 to 10 of a body came"),
        ([ANNOUNCED, piece(7, 0, 1 << 20), piece(7, 0, 1 << 20)], "bytes 0 to 1048576 of a body came"),
        ([ANNOUNCED, piece(7, 1 << 62, 10)], "of a body came that nobody has asked for"),
    ],
)
def test_what_no_peer_sends_is_a_fault_of_its_sender(said: list[bytes], fault: str) -> None:
    with attacked() as (end, peer):
        handle = end.recv(1, 0, np.zeros(LARGE, np.uint8))
        for message in said:
            peer.leaves.put(message)
        with pytest.raises(ProtocolError, match=fault) as raised:
            until(lambda: False, end)
        assert raised.value.rank == 1
        until(lambda: handle.done, end)
        assert isinstance(handle.error, PeerLost)


@pytest.mark.parametrize("early", [False, True])
def test_a_peer_whose_stream_breaks_is_lost(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it is told that it is welcome."""
    if early:  # gRPC drives the sending end no more
        monkeypatch.setattr(transport._Stream, "messages", lambda _: iter(()))
    with attacked() as (end, peer):
        handle = end.recv(1, 0, np.zeros(LARGE, np.uint8))
        peer.close()
        until(lambda: handle.done, end)
        assert isinstance(handle.error, PeerLost)
        assert handle.error.rank == 1


def test_a_receive_that_has_failed_is_written_no_more() -> None:
    """The buffer is the caller's again."""
    with attacked() as (end, peer):
        into = np.zeros(LARGE, np.uint8)
        handle = end.recv(1, 0, into)
        peer.leaves.put(ANNOUNCED)
        peer.leaves.put(frame(9, 0, 0, 0))
        with pytest.raises(ProtocolError):
            until(lambda: False, end)
        peer.leaves.put(transport._SLICE.pack(0, 7, 0) + b"\1" * (1 << 20))
        until(lambda: handle.done and end._streams[1].over.is_set(), end)
        assert not into.any()


def test_a_fast_peer_waits_for_the_progress_thread() -> None:
    """Frames that nobody polls for are not taken without end."""
    with attacked() as (end, peer):
        many = 4 * transport._AHEAD
        for number in range(many):
            peer.leaves.put(frame(1, 0, number, 1, b"x"))
        deadline = time.monotonic() + LIMIT_S
        while not any(not isinstance(event, partial) for event in end._events.copy()):  # its reader waits
            assert time.monotonic() < deadline
        assert len(end._events) == transport._AHEAD + 1
        handles = [end.recv(1, number, np.zeros(1, np.uint8)) for number in range(many)]
        until(lambda: all(handle.done for handle in handles), end)


def test_a_rank_ends_though_its_peer_does_not_react() -> None:
    """As one that is stopped: there is a limit, and no thread stays."""
    before = set(threading.enumerate())
    with attacked() as (end, _peer):
        body: Bytes = np.zeros(LARGE, np.uint8)
        end.send(1, 0, body)
        own = [thread for thread in threading.enumerate() if thread not in before]
        end.close()
        for thread in own:
            if thread.name.startswith("syncline-"):
                thread.join(LIMIT_S)
                assert not thread.is_alive()


# What is missing.


def test_a_library_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc, "__version__", "1.9.1")
    with pytest.raises(
        UsageError, match=r"needs grpcio 1.80 or newer, but 1.9.1 is installed: pip .* 'syncline\[grpc\]'"
    ):
        Grpc(Place(0, 1))
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(UsageError, match=r"transport=grpc needs grpcio .*: pip install --upgrade 'syncline\[grpc\]'"):
        Grpc(Place(0, 1))
