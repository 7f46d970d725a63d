"""With checksums a link finds every altered, repeated, missing or exchanged frame, and hands none of it on."""

from __future__ import annotations

import socket
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import AlteredError
from syncline.kernels import streams
from syncline.kernels.checksums import new_state
from syncline.wire.links import _LARGE_BYTES, Frame, Link
from syncline.wire.scratch import address_of

SIZES = st.one_of(st.integers(0, 300), st.sampled_from([4095, 4096, 4097, 3 * _LARGE_BYTES, 300_001]))


class End:
    """A link with checksums of process ``rank`` to the other one of two, and what has arrived there."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self.come: list[tuple[int, bytes]] = []
        self._body = memoryview(b"")
        self.link = Link(sock, 1 - rank, self._sink, self._arrival)
        self.link.sum_frames(rank)

    def _sink(self, _: Link, frame: Frame) -> memoryview:
        self._body = memoryview(bytearray(frame.size))
        return self._body

    def _arrival(self, _: Link, frame: Frame) -> None:
        self.come.append((frame.tag, bytes(self._body) if frame.size else b""))


def tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        first = socket.create_connection(door.getsockname())
        return first, door.accept()[0]


def frames_of(bodies: list[bytes], rank: int = 0) -> list[bytes]:
    """The frames of these bodies, tagged with their numbers, as they travel from ``rank``."""
    found = []
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.settimeout(5.0)
        end = End(mine, rank)
        for tag, body in enumerate(bodies):
            end.link.push(1, tag, body=memoryview(body), priority=0.0)
            come = b""
            while not end.link.flush() or len(come) < 32 + len(body) + 8 * bool(body):
                come += theirs.recv(1 << 20)
            found.append(come)
    return found


def received(stream: bytes) -> tuple[list[tuple[int, bytes]], AlteredError | None]:
    """The frames that rank 1 takes from a stream, and the error that ends it."""
    mine, theirs = tcp()
    with mine, theirs:
        end = End(theirs, 1)
        mine.setblocking(False)
        view, quiet = memoryview(stream), 0
        try:
            while view or quiet < 3:
                quiet += 1
                if view:
                    view, quiet = view[mine.send(view) :], 0
                before = end.link.received_bytes
                end.link.fill()
                quiet = 0 if end.link.received_bytes > before else quiet
        except AlteredError as error:
            return end.come, error
        return end.come, None


def bodies_of(sizes: list[int]) -> list[bytes]:
    draw = np.random.default_rng(7)
    return [draw.integers(0, 256, size, np.uint8).tobytes() for size in sizes]


@settings(deadline=None, max_examples=30)
@given(st.lists(SIZES, min_size=1, max_size=5))
def test_sound_frames_arrive(sizes: list[int]) -> None:
    bodies = bodies_of(sizes)
    assert received(b"".join(frames_of(bodies))) == (list(enumerate(bodies)), None)


@settings(deadline=None, max_examples=60)
@given(st.lists(SIZES, min_size=1, max_size=4), st.data())
def test_altered_bytes_are_found_and_not_handed_on(sizes: list[int], data: st.DataObject) -> None:
    bodies = bodies_of(sizes)
    frames = frames_of(bodies)
    number = data.draw(st.integers(0, len(frames) - 1))
    altered = bytearray(frames[number])
    places = data.draw(st.lists(st.integers(0, len(altered) - 1), min_size=1, max_size=3, unique=True))
    for at in places:
        altered[at] ^= data.draw(st.integers(1, 255))
    come, error = received(b"".join([*frames[:number], altered, *frames[number + 1 :]]))
    assert come == list(enumerate(bodies))[:number]
    assert error is not None
    assert error.rank == 0
    assert "from rank 0 was altered on its way" in str(error)


@pytest.mark.parametrize("order", [[1], [0, 0], [1, 0], [0, 2, 1]], ids=str)
@pytest.mark.parametrize("size", [0, 100, 3 * _LARGE_BYTES])
def test_frames_that_repeat_are_missing_or_change_places(order: list[int], size: int) -> None:
    frames = frames_of([bytes(size)] * 3)
    _, error = received(b"".join(frames[number] for number in order))
    assert error is not None


def test_a_frame_of_another_direction_is_found() -> None:
    _, error = received(frames_of([b"abc"], rank=1)[0])
    assert error is not None


def words(data: bytes) -> int:
    array = np.frombuffer(data, np.uint8)
    return int(streams.sum_all(new_state(), address_of(array), array.nbytes, 3))


@settings(deadline=None)
@given(st.integers(1, 10_000), st.data())
def test_two_changes_that_a_sum_of_words_would_not_show(size: int, data: st.DataObject) -> None:
    """The same bit in two words, one set and one cleared, or two words that change places."""
    draw = np.random.default_rng(size)
    found = draw.integers(0, 256, 4 * size + 8, np.uint8)
    first, second = data.draw(st.lists(st.integers(0, size + 1), min_size=2, max_size=2, unique=True))
    array = found.view(np.uint32)
    before = words(found.tobytes())
    bit = np.uint32(1 << data.draw(st.integers(0, 31)))
    array[[first, second]] ^= bit
    assert words(found.tobytes()) != before
    array[[first, second]] ^= bit
    assert words(found.tobytes()) == before
    if array[first] != array[second]:
        array[[first, second]] = array[[second, first]]
        assert words(found.tobytes()) != before


@given(st.integers(0, 9000), st.integers(0, 7), st.lists(st.integers(0, 9000), max_size=6))
def test_neither_the_place_in_memory_nor_the_parts_matter(size: int, offset: int, cuts: list[int]) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    room = np.zeros(size + 8, np.uint8)
    room[offset : offset + size] = data
    state = new_state()
    streams.sum_all(state, 0, 0, 3)
    for begin, end in pairwise([0, *sorted(min(cut, size) for cut in cuts), size]):
        streams.sum_more(state, address_of(room) + offset + begin, end - begin)
    assert streams.sum_end(state) == words(data.tobytes())
    assert words(data.tobytes() + bytes(1)) != words(data.tobytes())
