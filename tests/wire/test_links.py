"""Links deliver frames whole and by urgency, however the stream is cut, and lose none when they end."""

from __future__ import annotations

import os
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from frames import header
from syncline.errors import ProtocolError
from syncline.kernels.passes import CODES
from syncline.kernels.rows import PIECE_BYTES
from syncline.wire.links import _LARGE_BYTES, CONTROL, Frame, Link, Loop, broken, leave_unpaced, moved_bytes
from syncline.wire.scratch import Adding, Scratch, can_add


class Received:
    """The owner of a link: bodies go into fresh memory, or nowhere for ``ignored`` kinds."""

    def __init__(self, ignored: int = 255) -> None:
        self.frames: list[tuple[Frame, bytes]] = []
        self.fds: list[int] = []
        self._ignored = ignored
        self._body: memoryview | None = None

    def sink(self, link: Link, frame: Frame) -> memoryview | None:  # noqa: ARG002
        self._body = None if frame.kind == self._ignored else memoryview(bytearray(frame.size))
        return self._body

    def arrival(self, link: Link, frame: Frame) -> None:
        self.fds.extend(link.fds)
        link.fds.clear()
        body = b"" if frame.size == 0 or self._body is None else bytes(self._body)
        self.frames.append((frame, body))


@contextmanager
def ends(unix: bool = True) -> Iterator[tuple[socket.socket, socket.socket]]:
    if unix:
        a, b = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as door:
            a = socket.create_connection(door.getsockname())
            b, _ = door.accept()
    with a, b:
        yield a, b


def pump(sender: Link, receiver: Link, received: Received, count: int) -> None:
    """Write and read in turn until all frames are there; gives up when nothing moves any more."""
    idle = 0
    while len(received.frames) < count:
        before = receiver.received_bytes
        sender.flush()
        assert receiver.fill()
        idle = 0 if receiver.received_bytes > before else idle + 1
        assert idle < 10_000, received.frames


bodies = st.one_of(
    st.binary(max_size=64), st.integers(0, 70_000).map(lambda size: (bytes(range(251)) * (size // 251 + 1))[:size])
)
frames = st.lists(
    st.tuples(st.integers(0, 254), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), bodies), max_size=8
)


@given(frames, st.lists(st.integers(1, 20_000), min_size=1, max_size=10))
@settings(max_examples=100, deadline=None)
def test_any_split_of_the_stream_gives_the_same_frames(
    sent: list[tuple[int, int, int, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(header(kind, len(body), tag, argument) + body for kind, tag, argument, body in sent)
    received = Received()
    with ends() as (raw, sock):
        link = Link(sock, 1, received.sink, received.arrival)
        at, turn = 0, 0
        while at < len(stream):
            step = cuts[turn % len(cuts)] if turn < 100 else 70_000
            raw.sendall(stream[at : at + step])
            at, turn = at + step, turn + 1
            assert link.fill()
        assert link.received_bytes == len(stream)
    assert received.frames == [(Frame(kind, len(body), tag, argument), body) for kind, tag, argument, body in sent]


@given(frames)
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("unix", [True, False], ids=["unix", "tcp"])
def test_what_one_link_writes_the_other_reads(unix: bool, sent: list[tuple[int, int, int, bytes]]) -> None:
    received, done = Received(), []
    with ends(unix) as (a, b):
        sender, receiver = Link(a, 1, received.sink, received.arrival), Link(b, 0, received.sink, received.arrival)
        assert sender.idle
        for number, (kind, tag, argument, body) in enumerate(sent):
            sender.push(kind, tag, argument, memoryview(body), 0.0, after=lambda number=number: done.append(number))
        pump(sender, receiver, received, len(sent))
        assert sender.idle
        assert sender.sent_bytes == receiver.received_bytes == sum(24 + len(body) for *_, body in sent)
    assert received.frames == [(Frame(kind, len(body), tag, argument), body) for kind, tag, argument, body in sent]
    assert done == list(range(len(sent)))


@given(st.lists(st.sampled_from([CONTROL, -1.0, 0.0, 0.5, 7.0]), min_size=1, max_size=12))
@settings(deadline=None)
def test_the_urgent_go_first_and_equals_in_order(priorities: list[float]) -> None:
    received = Received()
    with ends() as (a, b):
        sender, receiver = Link(a, 1, received.sink, received.arrival), Link(b, 0, received.sink, received.arrival)
        for tag, priority in enumerate(priorities):
            sender.push(1, tag, body=memoryview(b"body"), priority=priority)
        pump(sender, receiver, received, len(priorities))
    tags = [frame.tag for frame, _ in received.frames]
    assert tags == sorted(range(len(priorities)), key=lambda tag: (priorities[tag], tag))


def test_a_frame_that_has_begun_is_finished_first() -> None:
    received = Received()
    with ends() as (a, b):
        sender, receiver = Link(a, 1, received.sink, received.arrival), Link(b, 0, received.sink, received.arrival)
        large = os.urandom(5_000_000)
        sender.push(1, 1, body=memoryview(large), priority=5.0)
        assert not sender.flush()  # begun, but the kernel does not take all of it
        sender.push(1, 2, body=memoryview(b"later"), priority=1.0)
        sender.push(1, 3, body=memoryview(b"urgent"), priority=CONTROL)
        pump(sender, receiver, received, 3)
    assert [frame.tag for frame, _ in received.frames] == [1, 3, 2]
    assert received.frames[0][1] == large


def test_unwanted_bodies_are_thrown_away() -> None:
    received = Received(ignored=9)
    with ends() as (a, b):
        sender, receiver = Link(a, 1, received.sink, received.arrival), Link(b, 0, received.sink, received.arrival)
        sender.push(9, 0, body=memoryview(bytes(100_000)))
        sender.push(1, 0, body=memoryview(b"wanted"))
        pump(sender, receiver, received, 2)
    assert [body for _, body in received.frames] == [b"", b"wanted"]


@given(st.lists(st.booleans(), min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_descriptors_keep_their_order_beside_frames(carries: list[bool]) -> None:
    """More of them than one read can take, each still belongs to its frame."""
    received = Received()
    with ends() as (a, b):
        sender, receiver = Link(a, 1, received.sink, received.arrival), Link(b, 0, received.sink, received.arrival)
        mine = [os.memfd_create("test") for carried in carries if carried]
        waiting = list(mine)
        for tag, carried in enumerate(carries):
            sender.push(2, tag, body=memoryview(b"b" * tag), fd=waiting.pop(0) if carried else None)
        pump(sender, receiver, received, len(carries))
        assert [os.fstat(fd).st_ino for fd in received.fds] == [os.fstat(fd).st_ino for fd in mine]
        assert all(not os.get_inheritable(fd) for fd in received.fds)
        for fd in (*mine, *received.fds):
            os.close(fd)


@pytest.mark.parametrize("stream", [header(1, 0, 0, 0), header(1, 9, 0, 0) + b"a"], ids=["whole", "begun"])
@pytest.mark.parametrize("passed", [2, 30])
def test_descriptors_that_nobody_asked_for_are_closed(stream: bytes, passed: int) -> None:
    """Several at once, or beside frames whose owner takes none: none of them stays open."""
    with ends() as (raw, sock):
        link = Link(sock, 1, lambda *_: None, lambda *_: None)
        files = open_files()
        for count in (passed, 1, 1):
            socket.send_fds(raw, [stream], [raw.fileno()] * count)
        with pytest.raises(ProtocolError, match=r"rank 1 .* descriptor"):
            link.fill()
        link.close()
        assert open_files() == files - 1  # the link's own socket


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_size_that_came_takes_no_memory() -> None:
    """A body that nobody wants is read and forgotten, however large it says it is."""
    with ends() as (raw, sock):
        link = Link(sock, 1, lambda *_: None, lambda *_: None)
        raw.sendall(header(1, (1 << 56) - 1, 0, 0) + bytes(100_000))
        tracemalloc.start()
        assert link.fill()
        assert link.fill()
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()
        assert link.received_bytes == 100_024


@pytest.mark.parametrize("size", [(1 << 32) - 1, 1 << 32, 5 << 30])
def test_messages_of_4_gib_and_more_keep_their_size(size: int) -> None:
    came: list[Frame] = []
    with ends() as (a, b):
        sender = Link(a, 1, lambda *_: None, lambda *_: None)
        receiver = Link(b, 0, lambda _, frame: came.append(frame), lambda *_: None)
        sender.push(1, 7, 8, memoryview(np.zeros(size, np.uint8)))  # pages that nobody touches take no memory
        sender.flush()
        assert receiver.fill()
    assert came == [Frame(1, size, 7, 8)]


def test_the_end_of_a_connection() -> None:
    received = Received()
    with ends() as (a, b):
        receiver = Link(b, 0, received.sink, received.arrival)
        a.sendall(header(1, 100, 0, 0) + b"not all of it")
        a.close()
        assert not receiver.fill() or not receiver.fill()
        receiver.push(1, 0)
        with pytest.raises(OSError, match="pipe"):
            receiver.flush()
    assert received.frames == []


BODY = bytes(range(256)) * 700  # more than one reading takes


class Owner:
    """The end of a link in a loop: loop_bodies into fresh memory."""

    def __init__(self, sock: socket.socket) -> None:
        self.bodies: list[bytes] = []
        self.lost: list[int] = []
        self._body = memoryview(b"")
        self.link = Link(sock, 1, self._sink, self._arrival)
        self.loop = Loop([self.link], self.lost.append)

    def _sink(self, link: Link, frame: Frame) -> memoryview:  # noqa: ARG002
        self._body = memoryview(bytearray(frame.size))
        return self._body

    def _arrival(self, link: Link, frame: Frame) -> None:  # noqa: ARG002
        self.bodies.append(bytes(self._body))


def test_what_a_peer_sent_before_it_went_arrives_although_one_still_writes() -> None:
    """Between processes of one host; TCP may drop what is still under way when somebody writes to a closed socket."""
    mine, theirs = socket.socketpair()
    owner = Owner(mine)
    for sock in (mine, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    peer = Link(theirs, 0, lambda *_: None, lambda *_: None)
    peer.push(1, 0, body=memoryview(BODY))
    while not peer.flush():
        owner.loop.turn(0.0)
    peer.close()
    owner.link.push(1, 0, body=memoryview(b"an answer"))
    owner.loop.write()
    owner.loop.close()
    assert owner.bodies == [BODY]
    assert owner.lost == [1]


def test_a_peer_that_takes_nothing_and_sends_without_end_is_let_go() -> None:
    mine, theirs = socket.socketpair()
    owner = Owner(mine)

    def send_again(_link: Link, _frame: Frame) -> None:
        owner.bodies.append(b"")
        assert len(owner.bodies) < 1000, "without end"
        theirs.sendall(header(1, 0, 0, 0))

    owner.link._arrival = send_again
    theirs.shutdown(socket.SHUT_RD)
    theirs.sendall(header(1, 0, 0, 0))
    owner.link.push(1, 0, body=memoryview(b"an answer"))
    owner.loop.write()
    assert owner.lost == [1]
    owner.loop.close()
    theirs.close()


@contextmanager
def tcp() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        one = socket.create_connection(door.getsockname())
        other, _ = door.accept()
    with one, other:
        yield one, other


SUMMED, KEPT, FORGOTTEN = 1, 2, 3


class Taker:
    """A link in a loop: loop_bodies are added to arrays of ones, kept, or forgotten, by the kind of their frames."""

    def __init__(self, sock: socket.socket, dtype: str = "float32") -> None:
        self.dtype, self.scratch = np.dtype(dtype), Scratch()
        self.done: list[tuple[int, NDArray[np.uint8]]] = []
        self.lost: list[int] = []
        self._into: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.link = Link(sock, 1, self._sink, self._arrival)
        self.loop = Loop([self.link], self.lost.append)

    def _sink(self, link: Link, frame: Frame) -> memoryview | Adding | None:  # noqa: ARG002
        if frame.kind == FORGOTTEN:
            self._into = np.empty(0, np.uint8)
            return None
        if frame.kind == KEPT:
            self._into = np.empty(frame.size, np.uint8)
            return memoryview(self._into)
        array = np.ones(-(-frame.size // self.dtype.itemsize), self.dtype)
        self._into = array.view(np.uint8)
        return Adding(array, self.scratch)

    def _arrival(self, link: Link, frame: Frame) -> None:  # noqa: ARG002
        self.done.append((frame.kind, self._into))


def around(*sizes: int) -> st.SearchStrategy[int]:
    """Sizes in elements of 8 bytes, of which some differ by one from where something changes."""
    near = [size + more for size in sizes for more in (-1, 0, 1)]
    return st.one_of(st.sampled_from(near), st.integers(1, 2 * max(sizes)))


loop_bodies = st.lists(
    st.tuples(st.sampled_from((SUMMED, KEPT, FORGOTTEN)), around(_LARGE_BYTES // 8, PIECE_BYTES // 8, 40_000)),
    min_size=1,
    max_size=6,
)


@given(
    loop_bodies,
    st.sampled_from(["float32", "int64", "float16"]),
    st.lists(st.integers(1, 300_000), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_compiled_of_a_turn_bodies_are_kept_and_added_whole(
    frames: list[tuple[int, int]], dtype: str, cuts: list[int]
) -> None:
    made = [np.arange(8 * words, dtype=np.uint8) if kind == KEPT else counted(words, dtype) for kind, words in frames]
    stream = b"".join(
        header(kind, body.nbytes, 0, 0) + body.tobytes() for (kind, _), body in zip(frames, made, strict=True)
    )
    with tcp() as (raw, sock):
        taker = Taker(sock, dtype)
        sender = threading.Thread(target=send_cut, args=(raw, stream, cuts))
        sender.start()
        while len(taker.done) < len(frames):
            taker.loop.turn(5.0)
            assert not taker.lost
        sender.join()
        assert taker.link.received_bytes == len(stream)
        taker.loop.close()
    for (kind, body), (_, found) in zip(zip([kind for kind, _ in frames], made, strict=True), taker.done, strict=True):
        if kind == KEPT:
            np.testing.assert_array_equal(found, body)
        elif kind == SUMMED:
            np.testing.assert_array_equal(found.view(dtype), body + np.ones(1, dtype))


def counted(words: int, dtype: str) -> NDArray[np.uint8]:
    """Small whole numbers, ``words`` times 8 bytes of them."""
    return (np.arange(8 * words // np.dtype(dtype).itemsize) % 97).astype(dtype)


def send_cut(raw: socket.socket, stream: bytes, cuts: list[int]) -> None:
    at, turn = 0, 0
    while at < len(stream):
        step = cuts[turn % len(cuts)] if turn < 50 else len(stream)
        raw.sendall(stream[at : at + step])
        at, turn = at + step, turn + 1


@pytest.mark.parametrize("dtype", [name for name in CODES if name != "bfloat16"])
@pytest.mark.parametrize("beyond", [0, 1])
def test_pieces_that_end_within_an_element_are_added_whole(dtype: str, beyond: int) -> None:
    """With ``beyond``, so does the body: what is left of it is added to nothing."""
    item = np.dtype(dtype).itemsize
    body = np.ones(PIECE_BYTES // item + 5, np.dtype(dtype))
    stream = header(SUMMED, body.nbytes + beyond, 0, 0) + body.tobytes() + bytes(beyond)
    cuts = [0, 25, 25 + item, PIECE_BYTES + 25, len(stream)]
    with tcp() as (raw, sock):
        taker = Taker(sock, dtype)
        for start, stop in pairwise(cuts):
            assert not taker.done
            raw.sendall(stream[start:stop])
            while taker.link.received_bytes < stop:
                taker.loop.turn(0.01)  # compiled code that takes a part of a body goes on waiting for the rest of it
        while not taker.done:
            taker.loop.turn(5.0)
        taker.loop.close()
    found = taker.done[0][1].view(np.dtype(dtype))
    assert (found[: body.size] == 2).all()
    assert (found[body.size :] == 1).all()


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
@pytest.mark.parametrize("kind", [KEPT, SUMMED])
def test_a_peer_that_goes_in_the_middle_of_a_large_body_is_lost(kind: int, reset: bool) -> None:
    with tcp() as (raw, sock):
        taker = Taker(sock)
        raw.sendall(header(kind, 8_000_000, 0, 0) + bytes(100_000))
        while taker.link.received_bytes < 100_000:
            taker.loop.turn(5.0)
        if reset:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()
        while not taker.lost:
            taker.loop.turn(5.0)
        taker.loop.close()
    assert taker.lost == [1]
    assert not taker.done


def test_a_peer_that_goes_while_a_large_body_is_written_is_lost() -> None:
    with tcp() as (raw, sock):
        taker = Taker(sock)
        taker.link.push(KEPT, 0, body=memoryview(bytes(20_000_000)))
        taker.loop.write()
        assert taker.loop.idle is False
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()
        while not taker.lost:
            taker.loop.turn(5.0)
        taker.loop.close()
    assert taker.lost == [1]


def test_two_loops_write_and_read_large_bodies_at_once_and_count_their_bytes() -> None:
    rng = np.random.default_rng(0)
    sent = [rng.integers(0, 256, size, np.uint8) for size in (5_000_000, _LARGE_BYTES, _LARGE_BYTES - 1, 1, 3_000_001)]
    written: list[tuple[int, int]] = []
    with tcp() as pair:
        ends = [Taker(sock) for sock in pair]
        for one, end in enumerate(ends):
            for number, body in enumerate(sent):
                end.link.push(KEPT, 0, 0, memoryview(body), 0.0, lambda at=(one, number): written.append(at))
            end.loop.write()
        while any(len(end.done) < len(sent) or not end.loop.idle for end in ends):
            for end in ends:
                end.loop.turn(0.001)
                assert moved_bytes([end.link]) == end.link.sent_bytes + end.link.received_bytes
        for end in ends:
            assert end.link.sent_bytes == end.link.received_bytes == sum(24 + body.nbytes for body in sent)
            for (_, found), body in zip(end.done, sent, strict=True):
                np.testing.assert_array_equal(found, body)
            end.loop.close()
    assert sorted(written) == [(one, number) for one in (0, 1) for number in range(len(sent))]


def test_a_turn_ends_when_its_time_is_over_though_a_body_keeps_coming() -> None:
    with tcp() as (raw, sock):
        taker, came_back = Taker(sock), threading.Event()
        stream = header(KEPT, 2_000_000, 0, 0) + bytes(1_000_000)
        raw.sendall(stream[:200_000])
        while taker.link.received_bytes < 200_000:
            taker.loop.turn(0.01)

        def trickle() -> None:
            for at in range(200_000, len(stream), 1000):
                if came_back.wait(0.005):
                    return
                raw.sendall(stream[at : at + 1000])

        sender = threading.Thread(target=trickle)
        sender.start()
        taker.loop.turn(0.04)
        came_back.set()
        sender.join()
        assert taker.link.received_bytes < len(stream)  # it was not the sender who ended it
        taker.loop.close()


def test_a_turn_ends_when_it_is_woken_though_a_body_is_coming() -> None:
    with tcp() as (raw, sock):
        taker = Taker(sock)
        raw.sendall(header(KEPT, 1_000_000, 0, 0) + bytes(200_000))
        while taker.link.received_bytes < 200_024:
            taker.loop.turn(0.01)
        taker.loop.turn(0.0)
        taker.loop.wake()
        taker.loop.turn(1e9)  # more than the kernel can be asked for: it would not end otherwise
        assert not taker.done
        assert not taker.lost
        taker.loop.close()


def turn_on(loop: Loop) -> None:
    while True:
        loop.turn(5.0)


@pytest.mark.parametrize("refused_first", [True, False])
def test_a_body_that_is_complete_is_not_forgotten_where_another_link_breaks_the_protocol(refused_first: bool) -> None:
    """Compiled code has read all of it: the kernel will not say again that there is something."""
    with tcp() as (one, mine), tcp() as (other, yours):
        taker, lost = Taker(mine), list[int]()

        def refuse(link: Link, frame: Frame) -> memoryview:  # noqa: ARG001
            raise broken(link.peer, "it sends what nobody wants")

        loop = Loop([taker.link, Link(yours, 2, refuse, lambda *_: None)], lost.append)
        one.sendall(header(KEPT, 150_000, 0, 0) + bytes(100_000))
        while taker.link.received_bytes < 100_024:
            loop.turn(5.0)
        loop.turn(0.0)  # so that the kernel lists those that become ready in that order
        ends = {yours: (other, header(KEPT, 1, 0, 0) + b"x"), mine: (one, bytes(50_000))}
        for end in (yours, mine) if refused_first else (mine, yours):
            sender, data = ends[end]
            sender.sendall(data)
            while len(end.recv(len(data), socket.MSG_PEEK)) < len(data):
                pass
        with pytest.raises(ProtocolError, match="nobody wants"):
            turn_on(loop)
        while not taker.done:
            loop.turn(5.0)
        assert lost == [2]
        assert not taker.lost
        loop.close()
        taker.loop.close()


def test_a_wait_that_fails_raises() -> None:
    with tcp() as (_, sock):
        taker = Taker(sock)
        taker.loop._epoll.close()
        with pytest.raises((OSError, ValueError)):
            taker.loop.turn(0.0)


def test_numbers_in_another_byte_order_are_not_added_while_they_come() -> None:
    assert can_add(np.dtype("<f4"))
    assert not can_add(np.dtype(">f4"))


@pytest.mark.parametrize(("source", "paced"), [("127.0.0.1", False), ("127.0.0.2", True)])
def test_only_a_connection_from_an_address_to_itself_leaves_the_default_congestion_control(
    source: str, paced: bool
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        socket.create_connection(door.getsockname(), source_address=(source, 0)) as mine,
    ):

        def control() -> bytes:
            return mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

        if (before := control()) == b"reno":
            pytest.skip("reno is this kernel's default")
        leave_unpaced(mine)
        assert control() == (before if paced else b"reno")
