"""Who holds the secret and breaks the rules of the meeting: it ends the start, is named, and harms nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plays import Play, called, member

from syncline.wire.meeting import (
    HEARD,
    Broken,
    Frames,
    Kind,
)


@pytest.mark.parametrize("kind", sorted(set(HEARD) - {Kind.RECORD, Kind.FAULT, Kind.LATE}))
def test_nothing_may_be_said_before_the_record(kind: Kind) -> None:
    play = Play(2)
    play.come(0)
    play.enter(1, 1)
    play.say(1, kind)
    assert play.fault().startswith(
        f"rank 1 (from 10.0.0.1:1) broke the rules of the meeting: it said {kind.name.lower()} before its record;"
    )


@pytest.mark.parametrize("kind", [Kind.RECORD, Kind.THROUGH, Kind.SET, Kind.GET, Kind.ADD])
def test_who_has_come_waits_for_the_roll(kind: Kind) -> None:
    play = Play(2)
    play.come(1)
    play.say(1, kind, member(1, 2).to_text().encode())
    assert "rank 1 (host1, pid 101) broke the rules of the meeting: it said" in play.fault()


@pytest.mark.parametrize("kind", [Kind.RECORD, Kind.THROUGH, Kind.SET, Kind.GET, Kind.ADD])
def test_who_is_through_has_said_all(kind: Kind) -> None:
    play = called(2)
    play.say(1, Kind.THROUGH)
    play.say(1, kind)
    assert "after its connections stood" in play.fault()


def test_nobody_speaks_for_somebody_else() -> None:
    play = Play(3)
    play.enter(1, 1)
    play.say(1, Kind.RECORD, member(2, 3).to_text().encode())
    assert "rank 1 (from 10.0.0.1:1) broke the rules of the meeting: it says that it is rank 2" in play.fault()


def test_a_rank_beyond_the_world_is_none() -> None:
    play = Play(3)
    play.come(3)
    assert "it is none of the 3 processes" in play.fault()
    play = Play(3)
    play.come(2)
    assert play.meeting.fault is None


@pytest.mark.parametrize("record", [b"", b"no JSON", b"[]", b"{}", b"\xff\xfe", b"[" * 10000])
def test_a_record_that_is_none_ends_the_start(record: bytes) -> None:
    play = Play(2)
    play.enter(1, 1)
    play.say(1, Kind.RECORD, record)
    assert play.fault() == (
        "rank 1 (from 10.0.0.1:1): its record is not one of this version: does it run another version of Syncline?"
    )


@given(st.binary(max_size=400))
def test_noise_never_harms_more_than_the_start(noise: bytes) -> None:
    play, frames = called(2), Frames(HEARD)
    frames.feed(noise)
    try:
        while (said := frames.take()) is not None:
            play.say(1, *said)
    except Broken as broken:
        play.act(play.meeting.break_off(1, str(broken)))
    if play.meeting.fault is not None:
        play.fault()
