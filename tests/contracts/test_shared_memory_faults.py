"""A peer in shared memory that sends nonsense, or what is no memory and no bell: it is named, and nothing is kept."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import struct
from collections.abc import Callable

import numpy as np
import pytest
from attacks import SOUND, attacked, memory, poll, provoke, spoken

from frames import header
from syncline.errors import ProtocolError, SynclineError
from syncline.kernels.board import BOARD_BYTES, MOST_SEGMENTS
from syncline.testing.network import connected
from syncline.transports import shm
from syncline.transports.shm import Shm


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
    for module in ("shm", "_segments"):
        monkeypatch.setattr(f"syncline.transports.{module}.MOST_SEGMENTS", 40)
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
        with pytest.raises(ProtocolError, match="what it gives for a bell is none"):
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
