"""Heartbeats do not need the interpreter, and leave the connection as a writer of whole frames would."""

from __future__ import annotations

import ctypes
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from syncline.wire.watch import Heartbeats

LIMIT_S = 20.0
FRAME = b"beat"
POLLFD = struct.Struct("=ihh")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    here.setblocking(False)
    there.settimeout(LIMIT_S)
    with here, there:
        yield here, there


def test_they_come_while_another_thread_holds_the_interpreter_lock(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    beats = Heartbeats({1: here}, FRAME, 0.01)
    beats.start()
    held = ctypes.PyDLL(None)  # calls without giving the lock away
    descriptor = ctypes.create_string_buffer(POLLFD.pack(there.fileno(), select.POLLIN, 0))
    for _ in range(3):
        while select.select([there], [], [], 0)[0]:
            there.recv(4096)
        assert held.poll(descriptor, 1, int(LIMIT_S * 1000)) == 1
    beats.end()


def test_the_first_comes_at_once_and_none_after_the_end(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    beats = Heartbeats({1: here}, FRAME, 1000 * LIMIT_S)
    beats.start()
    assert there.recv(100) == FRAME
    assert beats.end() == {}
    assert beats.end() == {}
    here.close()
    assert there.recv(100) == b""


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_what_has_begun_is_handed_over(pair: tuple[socket.socket, socket.socket], taken: int) -> None:
    """A socket may take a part of a frame; whoever writes next has to begin with the rest."""
    beats = Heartbeats({1: pair[0], 2: pair[1]}, FRAME, 1.0)
    beats._begun[:] = taken, 0
    assert beats.end() == {1: FRAME[taken:]}


def test_a_rest_goes_before_the_next_beat(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    beats = Heartbeats({1: here}, FRAME, 1000 * LIMIT_S)
    beats._begun[0] = 3
    beats.start()
    assert there.recv(100) == FRAME[3:]
    assert beats.end() == {}


def test_a_peer_that_takes_nothing_holds_nobody_up(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    full, unread = socket.socketpair()
    full.setblocking(False)
    with full, unread:
        while select.select([], [full], [], 0)[1]:
            full.send(bytes(1 << 16))
        beats = Heartbeats({1: full, 2: here}, FRAME, 0.01)
        beats.start()
        for _ in range(3):
            assert there.recv(4) == FRAME
        assert beats.end() == {}


def test_nothing_is_left_behind(pair: tuple[socket.socket, socket.socket]) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    beats = Heartbeats({1: pair[0]}, FRAME, 1.0)
    beats.start()
    beats.end()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
