"""What tests of peers that send nonsense share: a transport whose peer is a bare socket, and what is sent there."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import strategies as st

from syncline.errors import PeerLost, ProtocolError
from syncline.nouns import Rate, Seconds
from syncline.testing.network import connected
from syncline.transports import INLINE_BYTES, Transport
from syncline.transports.shm import Shm
from syncline.transports.tcp import Tcp

QUIET = 8
"""Polls without a byte after which nothing more is on its way."""
KINDS = ("tcp", "shaped", "checked", "shm")


@contextmanager
def attacked(kind: str) -> Iterator[tuple[Transport, socket.socket]]:
    """Process 0's transport, and process 1's end of its connection."""
    mine, theirs = connected(2, lambda *_: kind == "shm")
    raw = theirs[0]
    raw.setblocking(False)
    end: Transport = (
        Shm(0, mine)
        if kind == "shm"
        else Tcp(0, mine)
        if kind == "tcp"
        else Tcp(0, mine, checksum="on")
        if kind == "checked"
        else Tcp(0, mine, rate=Rate(8e9), delay=Seconds(0.0001))
    )
    try:
        yield end, raw
    finally:
        end.close()
        raw.close()


def poll(end: Transport) -> None:
    """Turn until a fault is raised, or nothing moves any more."""
    quiet, before = 0, -1
    while quiet < QUIET:
        quiet += 1
        if end.poll(0.0005) or sum(end.traffic()[1].values()) != before:
            quiet, before = 0, sum(end.traffic()[1].values())


def provoke(kind: str, stream: bytes, prepare: Callable[[Transport], object] = lambda _: None) -> ProtocolError:
    """The fault that a stream of bytes is; afterwards the peer is gone, and the transport goes on without it."""
    with attacked(kind) as (end, raw):
        prepare(end)
        raw.sendall(stream)
        with pytest.raises(ProtocolError) as fault:
            poll(end)
        assert fault.value.rank == 1
        late = end.recv(1, 99, np.zeros(8, np.uint8))
        poll(end)
        assert isinstance(late.error, PeerLost)
        return fault.value


def spoken(value: object) -> str:
    """Names of cases: what is said of them, not their bytes."""
    return value if isinstance(value, str) else "bytes"


LARGE = INLINE_BYTES + 1


def memory(size: int, seals: int, holes: bool = False) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    (os.ftruncate if holes else lambda fd, size: os.posix_fallocate(fd, 0, size))(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


SOUND = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
numbers = st.sampled_from([0, 1, 2, 3, 8, 24, 100, 4096, 4097, INLINE_BYTES, LARGE, 1 << 20, 1 << 32, (1 << 56) - 1])
words = st.one_of(st.integers(0, 4), st.sampled_from([1 << 32, 1 << 63, (1 << 64) - 1]), st.integers(0, 2**64 - 1))
