"""Notes that processes leave at the meeting: kept and counted, their writers' own, and within limits."""

from __future__ import annotations

import pytest
from plays import called

from syncline.wire.meeting import (
    AMOUNT,
    KEY_BYTES,
    NOTES_BYTES,
    VALUE_BYTES,
    Kind,
    note,
)


def test_notes_are_kept_and_counted() -> None:
    play = called(2)
    play.say(0, Kind.GET, note("key"))
    play.say(0, Kind.SET, note("key", b"\0any bytes\xff"))
    play.say(1, Kind.GET, note("key"))
    for rank, amount in ((0, 2), (1, 3), (0, 0)):
        play.say(rank, Kind.ADD, note("count", AMOUNT.pack(amount)))
    assert play.heard(0) == [
        (Kind.NOTHING, b""),
        (Kind.VALUE, b""),
        (Kind.VALUE, AMOUNT.pack(2)),
        (Kind.VALUE, AMOUNT.pack(5)),
    ]
    assert play.heard(1) == [(Kind.VALUE, b"\0any bytes\xff"), (Kind.VALUE, AMOUNT.pack(5))]


def test_a_note_is_its_writers() -> None:
    play = called(2)
    play.say(0, Kind.SET, note("key", b"one"))
    play.say(0, Kind.SET, note("key", b"two"))
    assert play.meeting.fault is None
    play.say(1, Kind.SET, note("key", b"three"))
    assert "rank 1 (host1, pid 101) broke the rules of the meeting: it wrote over a note of rank 0" in play.fault()


def test_what_one_process_may_leave_is_bounded() -> None:
    play = called(2)
    for number in range(2):
        play.say(1, Kind.SET, note(f"{number}", bytes(NOTES_BYTES // 2 - 65)))
        assert play.meeting.fault is None
    play.say(0, Kind.SET, note("others", b"have room of their own"))
    assert play.meeting.fault is None
    play.say(1, Kind.SET, note("2"))
    assert f"it left more than {NOTES_BYTES} bytes in notes" in play.fault()


def test_what_is_written_again_takes_no_more_room() -> None:
    play = called(1)
    for _ in range(10):
        play.say(0, Kind.SET, note("key", bytes(VALUE_BYTES)))
    assert play.meeting.fault is None


def test_counters_take_room_too_and_stay_numbers() -> None:
    play = called(2)
    play.say(1, Kind.ADD, note("count", AMOUNT.pack((1 << 63) - 1)))
    play.say(0, Kind.ADD, note("count", AMOUNT.pack(1)))
    assert "counted too far" in play.fault()
    play = called(1)
    number = 0
    while play.meeting.fault is None and number < NOTES_BYTES:
        play.say(0, Kind.ADD, note(f"{number:0500}", AMOUNT.pack(1)))
        number += 1
    assert number == NOTES_BYTES // (500 + 64) + 1


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.GET, b""),
        (Kind.GET, b"\x05\x00key"),
        (Kind.GET, note("key", b"value")),
        (Kind.SET, b"\xff\xff"),
        (Kind.ADD, note("key", b"1")),
        (Kind.LATE, b"soon"),
    ],
)
def test_a_note_that_is_none_ends_the_start(kind: Kind, body: bytes) -> None:
    play = called(2)
    play.say(1, kind, body)
    assert "rank 1 (host1, pid 101) broke the rules" in play.fault()


def test_a_note_is_refused_where_it_is_written() -> None:
    assert note("k" * KEY_BYTES, bytes(VALUE_BYTES))
    for key, value in (("k" * (KEY_BYTES + 1), b""), ("k", bytes(VALUE_BYTES + 1))):
        with pytest.raises(ValueError, match="are the most"):
            note(key, value)
