"""Links end in order, nothing that a peer had sent before it went is lost, and large bodies arrive whole."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from frames import header
from syncline.errors import ProtocolError
from syncline.kernels.passes import CODES
from syncline.kernels.rows import PIECE_BYTES
from syncline.wire.links import _LARGE_BYTES, Frame, Link, Loop, broken, moved_bytes
from syncline.wire.scratch import Adding, Scratch, can_add

BODY = bytes(range(256)) * 700  # more than one reading takes


class Owner:
    """The end of a link in a loop: bodies into fresh memory."""

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
    """A link in a loop: bodies are added to arrays of ones, kept, or forgotten, by the kind of their frames."""

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


bodies = st.lists(
    st.tuples(st.sampled_from((SUMMED, KEPT, FORGOTTEN)), around(_LARGE_BYTES // 8, PIECE_BYTES // 8, 40_000)),
    min_size=1,
    max_size=6,
)


@given(
    bodies, st.sampled_from(["float32", "int64", "float16"]), st.lists(st.integers(1, 300_000), min_size=1, max_size=8)
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
