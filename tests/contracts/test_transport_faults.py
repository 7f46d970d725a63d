"""A peer that has proved itself and then sends nonsense: a typed error that names it, whatever the bytes are.

One end is a transport, the other a bare socket.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import numpy as np
import pytest
from attacks import KINDS, LARGE, SOUND, attacked, memory, numbers, poll, provoke, spoken, words
from hypothesis import given, settings
from hypothesis import strategies as st

from frames import header
from syncline.errors import ProtocolError, SynclineError
from syncline.transports import Handle, Transport, tcp
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


@pytest.mark.parametrize("kind", KINDS)
@given(stream=streams, fds=st.lists(st.sampled_from(["sound", "holes", "bell", "file"]), max_size=3))
@settings(max_examples=60, deadline=None)
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
