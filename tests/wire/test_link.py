"""Frames arrive whole, in order of urgency and unchanged, however the stream is cut."""

from __future__ import annotations

import os
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frames import header
from syncline.errors import ProtocolError
from syncline.wire.links import CONTROL, Frame, Link


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
