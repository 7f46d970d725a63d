"""A peer behind a message library that sends nonsense is named: the frames of a library are made up here."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attacks import LARGE, numbers, words
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import PeerLost, ProtocolError, SynclineError
from syncline.transports import INLINE_BYTES, Bytes, Handle
from syncline.transports._envelope import Enveloped
from syncline.transports._frames import FRAME_BYTES, HEADER_BYTES, SLOTS


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

    def _push(self, peer: int, slot: int, body: Bytes, done: Callable[[], None]) -> None:  # noqa: ARG002
        done()

    def _pull(self, peer: int, slot: int, into: Bytes, done: Callable[[], None]) -> None:
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


WHOLE, ANNOUNCED, ASKED, TURN, END, OFFERED, COMING = range(1, 8)


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
        frame(8, 0, 0, 0),
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


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.builds(
                frame, st.integers(0, 8), st.integers(0, 65535), words, st.one_of(words, numbers), st.binary(max_size=9)
            ),
        ),
        max_size=8,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_frames_of_a_library_are_messages_or_a_fault_of_their_sender(data: list[bytes]) -> None:
    end = Scripted()
    handles = [end.recv(0, tag, np.zeros(LARGE, np.uint8)) for tag in range(2)]
    handles += [end.borrow(0, 2, 8), end.send(0, 3, np.zeros(LARGE, np.uint8))]
    end.frames = [(0, part) for part in data]
    faults: list[ProtocolError] = []
    try:
        end.poll(0.0)
    except ProtocolError as fault:
        faults.append(fault)
    assert all(fault.rank == 0 for fault in faults)
    assert all(handle.error is None or isinstance(handle.error, SynclineError) for handle in handles)


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


@pytest.mark.parametrize("size", [11, LARGE])
def test_bytes_that_are_no_whole_elements_of_a_sum(size: int) -> None:
    end = Scripted()
    end.add(2, 0, np.zeros(LARGE, np.float64))
    end.frames = [(2, frame(WHOLE, 0, 0, 11, bytes(11)) if size == 11 else frame(ANNOUNCED, 1, 0, LARGE))]
    with pytest.raises(ProtocolError, match=f"rank 2 .*{size} bytes came to be added to elements of 8"):
        end.poll(0.0)
