"""A peer that has proved itself and then sends nonsense, in frames or shared memory, is named by an error."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attacks import KINDS, LARGE, SOUND, attacked, memory, numbers, poll, provoke, spoken, words
from hypothesis import given, settings
from hypothesis import strategies as st

from frames import header
from syncline.errors import PeerLost, ProtocolError, SynclineError
from syncline.kernels.board import BOARD_BYTES, MOST_SEGMENTS
from syncline.testing.network import connected
from syncline.transports import INLINE_BYTES, Bytes, Handle, Transport, shm, tcp
from syncline.transports._envelope import Body, Enveloped
from syncline.transports._frames import FRAME_BYTES, HEADER_BYTES, SLOTS
from syncline.transports.shm import Shm
from syncline.transports.tcp import Tcp

DATA, CREDIT = tcp._DATA, tcp._CREDIT


def small_receive(end: Transport) -> Handle:
    return end.recv(1, 0, np.zeros(100, np.uint8))


@pytest.mark.parametrize("kind", ["tcp", "shaped"])
@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (header(CREDIT, 5, 0, 0) + b"abcde", "5 bytes came behind a frame of kind 2"),
        (header(CREDIT, (1 << 56) - 1, 0, 0), "behind a frame of kind 2"),
        (header(DATA, LARGE, 0, 0), f"a message of {LARGE} bytes came without being asked for"),
        (header(DATA, (1 << 56) - 1, 0, 0), "without being asked for"),
        (header(0, 0, 0, 0), "unknown kind 0"),
        (header(3, 0, 1 << 63, 7), "unknown kind 3"),
        (b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n", "kind 71"),
    ],
    ids=spoken,
)
def test_what_no_tcp_peer_sends(kind: str, stream: bytes, said: str) -> None:
    assert said in str(provoke(kind, stream, small_receive))


@pytest.mark.parametrize("kind", ["tcp", "shaped"])
def test_credits_without_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_MOST_CREDITS", 100)
    stream = b"".join(header(CREDIT, 0, tag, 0) for tag in range(101))
    assert "more than 100 credits" in str(provoke(kind, stream))
    with attacked(kind) as (end, raw):
        raw.sendall(stream[: 100 * 24])
        poll(end)  # as many as there may be


def test_a_large_message_that_comes_on_a_credit_that_is_left_over() -> None:
    """A small message filled the large receive that the credit was for: what comes then is kept, within a bound."""

    def filled(size: int) -> bytes:
        return header(DATA, 3, 0, 0) + b"abc" + header(DATA, size, 0, 0)

    def large(end: Transport) -> Handle:
        return end.recv(1, 0, np.zeros(LARGE, np.uint8))

    assert "that a smaller one had filled" in str(provoke("tcp", filled((1 << 30) + 1), large))
    with attacked("tcp") as (end, raw):
        first = large(end)
        raw.sendall(filled(LARGE) + bytes(LARGE))
        poll(end)
        second = large(end)
        poll(end)
        assert (first.nbytes, second.nbytes) == (3, LARGE)


@pytest.mark.parametrize("size", [LARGE, 1000])
def test_bytes_that_are_no_whole_elements(size: int) -> None:
    with attacked("tcp") as (end, raw):
        assert isinstance(end, Tcp)
        into = np.zeros(LARGE, np.float64)
        end.add(1, 0, into)
        raw.sendall(header(DATA, size - size % 8 + 3, 0, 0) + bytes(size - size % 8 + 3))
        with pytest.raises(ProtocolError, match="bytes came to be added to elements of 8"):
            poll(end)


def test_a_large_message_that_fits_nowhere_takes_no_memory() -> None:
    with attacked("tcp") as (end, raw):
        assert isinstance(end, Tcp)
        handle = end.recv(1, 0, np.zeros(LARGE, np.uint8))
        raw.sendall(header(DATA, 10 * LARGE, 0, 0))
        poll(end)
        before = end.scratch.allocated_bytes
        for _ in range(10):
            raw.sendall(bytes(LARGE))
            poll(end)
        assert handle.error is not None
        assert "does not fit" in str(handle.error)
        assert end.scratch.allocated_bytes == before == 0


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A frame that is nearly right: its body may be missing, short or long."""
    size = draw(numbers)
    whole = draw(st.booleans())
    body = bytes(min(size, 200_000)) if whole else draw(st.binary(max_size=100))
    if draw(st.booleans()):
        body = b"".join(word.to_bytes(8, "little") for word in draw(st.lists(words, min_size=3, max_size=3)))
        size = len(body)
    return header(draw(st.integers(0, 6)), size, draw(words), draw(words)) + body


streams = st.lists(st.one_of(frames(), frames(), st.binary(max_size=60)), max_size=8)


def allowed(error: Exception | None) -> bool:
    return error is None or (isinstance(error, SynclineError) and "rank 1" in str(error))


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", KINDS)
@given(stream=streams, fds=st.lists(st.sampled_from(["sound", "holes", "bell", "file"]), max_size=3))
@settings(max_examples=25, deadline=None)
def test_any_bytes_are_messages_or_a_fault_of_their_sender(kind: str, stream: list[bytes], fds: list[str]) -> None:
    with attacked(kind) as (end, raw):
        handles = [
            end.recv(1, 0, np.zeros(10, np.uint8)),
            end.recv(1, 1, np.zeros(2 * LARGE, np.uint8)),
            end.borrow(1, 2, 2 * LARGE),
            end.send(1, 3, np.zeros(2 * LARGE, np.uint8)),
        ]
        if isinstance(end, Tcp):
            handles.append(end.add(1, 4, np.zeros(LARGE, np.float64)))
        faults: list[ProtocolError] = []
        try:
            for part in stream:
                say(raw, part, fds.pop() if fds and kind == "shm" else None)
                end.poll(0.0)
        except ProtocolError as fault:
            faults.append(fault)
        for _ in range(2):  # a fault may come late: the second time the peer is gone
            try:
                poll(end)
            except ProtocolError as fault:
                faults.append(fault)
            raw.close()
        assert len(faults) <= 1
        assert all(fault.rank == 1 and "rank 1" in str(fault) for fault in faults)
        assert all(allowed(handle.error) for handle in handles)


def say(raw: socket.socket, part: bytes, carries: str | None) -> None:
    make: dict[str, Callable[[], int]] = {
        "sound": lambda: memory(65536, SOUND),
        "holes": lambda: memory(65536, SOUND, holes=True),
        "bell": lambda: os.eventfd(0, os.EFD_NONBLOCK),
        "file": lambda: os.open(__file__, os.O_RDONLY),
    }
    try:
        if carries is None or not part:
            raw.sendall(part)
            return
        fd = make[carries]()
        try:
            socket.send_fds(raw, [part], [fd])
        finally:
            os.close(fd)
    except OSError:
        return  # the transport has hung up, or reads no more of this


class Scripted(Enveloped):
    """A library whose frames the test makes up, and which never brings a body."""

    name = "scripted"
    asks = True
    answers = False

    def __init__(self) -> None:
        super().__init__(1, 3)
        self.frames: list[tuple[int, bytes]] = []

    def _put(self, peer: int, frame: Bytes, done: Callable[[], None]) -> None:  # noqa: ARG002
        done()

    def _push(self, peer: int, body: Body) -> None:  # noqa: ARG002
        body.done()

    def _pull(self, peer: int, body: Body) -> None:
        pass

    def _reduce(self, array: Any, handle: Handle) -> None:
        pass

    def _move(self, timeout: float) -> None:  # noqa: ARG002
        while self.frames:
            peer, data = self.frames.pop(0)
            frame = self.scratch.take(len(data))
            frame[: len(data)] = np.frombuffer(data, np.uint8)
            self._came(peer, frame, len(data))

    def _leave(self) -> None:
        pass


def frame(kind: int, slot: int, tag: int, size: int, body: bytes = b"") -> bytes:
    return struct.pack("<BxHxxxxQQ", kind, slot, tag, size) + body


WHOLE, ANNOUNCED, ASKED, TURN, END, OFFERED, COMING, REACHED = range(1, 9)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(HEADER_BYTES - 1),
        frame(WHOLE, 0, 0, 5, b"abcd"),
        frame(WHOLE, 0, 0, 3, b"abcd"),
        frame(WHOLE, 0, 0, 1 << 63),
        frame(WHOLE, 0, 0, FRAME_BYTES, bytes(FRAME_BYTES)),
        frame(ANNOUNCED, 0, 0, LARGE),
        frame(ANNOUNCED, SLOTS + 1, 0, LARGE),
        frame(ANNOUNCED, 1, 0, INLINE_BYTES),
        frame(ANNOUNCED, 1, 0, LARGE, b"and more"),
        frame(ASKED, 7, 0, 0),
        frame(TURN, 0, 0, 0),
        frame(OFFERED, 0, 0, LARGE),
        frame(OFFERED, 1, 0, INLINE_BYTES),
        frame(COMING, 1, 0, 0),
        frame(REACHED, 0, 0, 0),
        frame(9, 0, 0, 0),
        frame(0, 0, 0, 0),
    ],
    ids=lambda data: f"{len(data)} bytes of kind {data[0] if data else 'none'}",
)
def test_what_no_peer_of_a_library_sends(data: bytes) -> None:
    end = Scripted()
    handle = end.recv(2, 0, np.zeros(100, np.uint8))
    end.frames.append((2, data))
    with pytest.raises(ProtocolError, match="rank 2 broke the protocol") as fault:
        end.poll(0.0)
    assert fault.value.rank == 2
    assert end.poll(0.0) == [handle]
    assert isinstance(handle.error, PeerLost)


def test_as_many_bodies_as_a_library_has_tags_for_and_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.transports._envelope.SLOTS", 5)
    end = Scripted()
    sent = [end.send(0, tag, np.zeros(LARGE, np.uint8)) for tag in range(6)]
    assert [handle.done for handle in sent] == [False] * 5 + [True]
    assert "5 large messages to rank 0 are under way" in str(sent[5].error)
    end.frames = [(0, frame(ASKED, 1, 0, 0))]
    end.poll(0.0)
    again = end.send(0, 9, np.zeros(LARGE, np.uint8))
    assert again.error is None


@pytest.mark.parametrize("kind", [ANNOUNCED, OFFERED])
def test_a_body_that_its_sender_has_announced_and_does_not_bring_any_more(kind: int) -> None:
    """Its receive comes after the sender's end: it fails, and does not wait for ever."""
    end = Scripted()
    end.frames = [(2, frame(kind, 1, 7, LARGE)), (2, frame(END, 0, 0, 0))]
    end.poll(0.0)
    late = end.recv(2, 7, np.zeros(LARGE, np.uint8))
    assert end.poll(0.0) == [late]
    assert isinstance(late.error, PeerLost)


class Collecting(Scripted):
    """One whose library has collectives, which end at once."""

    allreduce = Enveloped._allreduce
    reduce_scatter = Enveloped._reduce_scatter
    all_gather = Enveloped._all_gather

    def _collect(self, call: Any, handle: Handle) -> None:  # noqa: ARG002
        self._finish(handle)


@pytest.mark.parametrize("first_ends", [False, True])
def test_an_end_that_overtakes_the_turn_of_its_senders_last_collective(first_ends: bool) -> None:
    """The collective still runs, unless the first rank ends as well; operations of the sender then fail."""
    end = Collecting()
    gathers, waits = end.all_gather(5, [np.zeros(8)] * 3), end.recv(2, 0, np.zeros(8, np.uint8))
    end.frames = [(2, frame(END, 0, 1, 0))]
    assert end.poll(0.0) == []
    end.frames = [(0, frame(END, 0, 0, 0) if first_ends else frame(TURN, 0, 5, 0))]
    assert set(end.poll(0.0)) == {gathers, waits}
    assert isinstance(gathers.error, PeerLost) is first_ends
    assert isinstance(waits.error, PeerLost)


def test_a_rank_that_reaches_a_collective_twice_breaks_the_protocol() -> None:
    end = Collecting()
    end.rank, end.together = 0, (0, 1, 2)
    end.frames = [(2, frame(REACHED, 0, 5, 0)), (2, frame(REACHED, 0, 5, 0))]
    with pytest.raises(ProtocolError, match="rank 2 broke the protocol"):
        end.poll(0.0)


@pytest.mark.parametrize("size", [11, LARGE])
def test_bytes_that_are_no_whole_elements_of_a_sum(size: int) -> None:
    end = Scripted()
    end.add(2, 0, np.zeros(LARGE, np.float64))
    end.frames = [(2, frame(WHOLE, 0, 0, 11, bytes(11)) if size == 11 else frame(ANNOUNCED, 1, 0, LARGE))]
    with pytest.raises(ProtocolError, match=f"rank 2 .*{size} bytes came to be added to elements of 8"):
        end.poll(0.0)


def reference(segment: int, offset: int, nbytes: int) -> bytes:
    return header(shm._REFERENCE, 24, 0, 1) + struct.pack("<QQQ", segment, offset, nbytes)


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (header(shm._REFERENCE, 0, 0, 0), "a frame of kind 2 with 0 bytes"),
        (header(shm._REFERENCE, 23, 0, 0) + bytes(23), "a frame of kind 2 with 23 bytes"),
        (header(shm._REFERENCE, 25, 0, 0) + bytes(25), "a frame of kind 2 with 25 bytes"),
        (reference(0, 0, 8), "8 bytes of segment 0, which it has not shared"),
        (reference(1 << 63, 1 << 63, 1 << 63), "which it has not shared"),
        (header(shm._DATA, 4097, 0, 0), "a frame of kind 1 with 4097 bytes"),
        (header(shm._DATA, (1 << 56) - 1, 0, 0), "a frame of kind 1"),
        (header(shm._CONSUMED, 0, 0, 12345), "it has consumed message 12345, which it was not sent"),
        (header(shm._CONSUMED, 8, 0, 1) + bytes(8), "a frame of kind 3 with 8 bytes"),
        (header(shm._SEGMENT, 0, 0, BOARD_BYTES), "without its descriptor"),
        (header(shm._SEGMENT, 0, 1, 4096), "segment 1 after 0 others"),
        (header(shm._SEGMENT, 0, (1 << 64) - 1, 4096), "segment 18446744073709551615 after 0 others"),
        (header(shm._SEGMENT, 0, 0, BOARD_BYTES - 1), f"its board has {BOARD_BYTES - 1} bytes"),
        (header(shm._MAPPED, 0, 0, 2), "it has mapped 2 segments of 1"),
        (header(shm._MAPPED, 0, 0, 0), "it has mapped 0 segments of 1"),
        (header(shm._MAPPED, 1, 0, 1) + b"x", "a frame of kind 6 with 1 bytes"),
        (header(shm._BELL, 0, 0, 0), "without its descriptor"),
        (header(shm._BELL, 1, 0, 0) + b"x", "a frame of kind 5 with 1 bytes"),
        (header(9, 0, 0, 0), "a frame of kind 9"),
    ],
    ids=spoken,
)
def test_what_no_peer_in_shared_memory_sends(stream: bytes, said: str) -> None:
    assert said in str(provoke("shm", stream))


def test_a_message_is_consumed_by_its_receiver_only() -> None:
    socks = connected(3, lambda *_: True)
    end = Shm(0, socks[0])
    try:
        end.send(1, 0, np.zeros(10_000, np.uint8))
        socks[2][0].sendall(header(shm._CONSUMED, 0, 0, 1))
        with pytest.raises(ProtocolError, match="rank 2 broke the protocol: it has consumed message 1") as fault:
            poll(end)
        assert fault.value.rank == 2
    finally:
        end.close()
        for sock in (*socks[1].values(), *socks[2].values()):
            sock.close()


@pytest.mark.parametrize(
    ("make", "claimed", "said"),
    [
        (lambda: memory(65536, 0), 65536, "could vanish"),
        (lambda: memory(65536, fcntl.F_SEAL_GROW), 65536, "could vanish"),
        (lambda: memory(65536, SOUND), 65537, "65537 bytes of shared memory that are not there"),
        (lambda: memory(65536, SOUND), (1 << 64) - 1, "of shared memory that are not there"),
        (lambda: memory(1 << 40, SOUND, holes=True), 1 << 40, "of shared memory that are not there"),
        (lambda: os.open(__file__, os.O_RDONLY), 65536, "Invalid argument"),
        (lambda: os.open("/dev/zero", os.O_RDWR), 65536, "Invalid argument"),
    ],
    ids=["unsealed", "half sealed", "short", "endless", "holes", "file", "device"],
)
@pytest.mark.usefixtures("no_old_garbage")
def test_memory_that_could_vanish_is_not_mapped(make: Callable[[], int], claimed: int, said: str) -> None:
    fd = make()
    try:
        with attacked("shm") as (end, raw):
            files = open_files()
            socket.send_fds(raw, [header(shm._SEGMENT, 0, 0, claimed)], [fd])
            with pytest.raises(ProtocolError, match=said):
                poll(end)
            assert open_files() == files - 1  # the connection, and nothing that came
    finally:
        os.close(fd)


def open_files() -> int:
    gc.collect()  # what earlier tests have left in cycles closes its files when it is collected
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_as_many_segments_as_there_may_be_and_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.transports.shm.MOST_SEGMENTS", 40)
    assert MOST_SEGMENTS == 1 << 16
    fd = memory(65536, SOUND)
    with attacked("shm") as (end, raw):
        for number in range(41):
            socket.send_fds(raw, [header(shm._SEGMENT, 0, number, 65536)], [fd])
        with pytest.raises(ProtocolError, match="it shares segment 40 after 40 others"):
            poll(end)
        for _ in range(39):  # one is the board
            end.allocate(1)
        with pytest.raises(SynclineError, match="all 40 shared segments"):
            end.allocate(1)
    os.close(fd)


@pytest.mark.parametrize("make", ["pipe", "blocking", "memory"])
def test_a_bell_that_could_block_is_not_rung(make: str) -> None:
    reading, writing = os.pipe()
    fd = {"pipe": lambda: writing, "blocking": lambda: os.eventfd(0, 0), "memory": lambda: memory(8, 0)}[make]()
    with attacked("shm") as (end, raw):
        socket.send_fds(raw, [header(shm._BELL, 0, 0, 0)], [fd])
        with pytest.raises(ProtocolError, match="the descriptor that it sent is not a bell"):
            poll(end)
    for each in {reading, writing, fd}:
        os.close(each)


def test_a_second_bell_is_refused_and_closed() -> None:
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    with attacked("shm") as (end, raw):
        files = open_files()
        for _ in range(2):
            socket.send_fds(raw, [header(shm._BELL, 0, 0, 0)], [bell])
        with pytest.raises(ProtocolError, match="its bell twice"):
            poll(end)
        assert open_files() == files  # the first bell, less the connection
    os.close(bell)
