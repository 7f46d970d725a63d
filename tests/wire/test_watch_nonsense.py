"""What a peer may say to a watcher, in any pieces: nonsense is the fault of who says it, and does no harm."""

from __future__ import annotations

import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from watching import ANSWER, LIMIT_S, QUESTION, RESTS, SHORT_S, Table, member, numbered

from syncline.wire.culprit import ANSWER_BYTES, pack


def test_frames_may_come_in_pieces(table: Table) -> None:
    seat, there = table.beside(member(1))
    text = struct.pack("<I", 1) + b"in pieces"
    for byte in struct.pack("<BxH", 3, len(text)) + text:
        there.sendall(bytes([byte]))
    assert seat.culprit() == 1
    assert "in pieces" in str(seat.watcher.failure)


@pytest.mark.parametrize(
    "said",
    [
        numbered(ANSWER, 1, pack(RESTS) + b"\0"),
        numbered(ANSWER, 1, pack(RESTS) + struct.pack("<IB", 2, 0)),
        numbered(ANSWER, 1, pack(RESTS) + struct.pack("<IB", 0, 9)),
        numbered(ANSWER, 2, pack(RESTS)),
        numbered(ANSWER, 1, pack(RESTS)) * 2,
    ],
    ids=["cut off", "no such rank", "a cut label", "to another question", "twice"],
)
def test_a_nonsensical_answer_is_the_fault_of_who_gives_it(table: Table, said: bytes) -> None:
    seat, there = table.beside(member(1))
    asker = threading.Thread(target=seat.watcher.ask, args=(1,))
    asker.start()
    assert there.recv(8) == numbered(QUESTION, 1)
    there.sendall(said)
    assert seat.culprit() == 1
    assert "broke the protocol" in str(seat.failures[0])
    asker.join(LIMIT_S)


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("<BxH", 3, 0),
        struct.pack("<BxH", 3, 3) + b"abc",
        struct.pack("<BxHI", 3, 4, 2),
        struct.pack("<BxHI", 3, 4, 2**32 - 1),
        struct.pack("<BxH", 3, 65535) + bytes(65535),
        struct.pack("<BxH", 2, 1) + b"x",
        struct.pack("<BxH", 1, 65535) + bytes(65535),
        struct.pack("<BxH", 0, 0),
        struct.pack("<BxH", 200, 9) + b"whatever!",
        struct.pack("<BxH", QUESTION, 0),
        numbered(QUESTION, 2),
        numbered(QUESTION, 1) * 2,
        struct.pack("<BxH", ANSWER, 0),
        numbered(ANSWER, 0, pack(RESTS)),
        numbered(ANSWER, 1, pack(RESTS)),
        numbered(ANSWER, 1, bytes(ANSWER_BYTES.stop)),
    ],
    ids=lambda said: f"{said[0]}-{len(said)}",
)
def test_nonsense_is_the_fault_of_who_says_it(table: Table, said: bytes) -> None:
    seat, there = table.beside(member(1))
    there.sendall(said)
    assert seat.culprit() == 1
    assert "rank 1 (host1" in str(seat.failures[0])
    assert "broke the protocol: a control message of kind" in str(seat.failures[0])


def test_what_a_terminal_would_act_on_is_not_printed(table: Table, capfd: pytest.CaptureFixture[str]) -> None:
    seat, there = table.beside(member(1))
    reason = b"failed: \x1b[2J\x07 line\nline"
    there.sendall(struct.pack("<BxHI", 3, 4 + len(reason), 1) + reason)
    assert seat.culprit() == 1
    seat.watcher.close()
    assert "\x1b" not in str(seat.failures[0])
    assert "\x1b" not in capfd.readouterr().err
    assert str(seat.failures[0]).endswith(" line\nline")


@given(said=st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_after_any_bytes_the_watcher_still_watches(said: bytes) -> None:
    found = Table()
    seat, there = found.beside(member(1))
    try:
        there.sendall(said)
        there.close()
        left = b"\x02" in said  # perhaps a goodbye
        assert seat.failed.wait(SHORT_S if left else LIMIT_S) or seat.left.is_set()
    finally:
        seat.watcher.close()
