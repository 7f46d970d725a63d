"""What travels at the meeting: frames in any pieces, lengths within limits, rolls and faults that fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plays import Play, member

from syncline.errors import RollCallError
from syncline.wire.meeting import (
    FAULT_BYTES,
    HEARD,
    RECORD_BYTES,
    Broken,
    Frames,
    Kind,
    fault_frame,
    frame,
    read_roll,
)


@given(st.lists(st.tuples(st.sampled_from(sorted(HEARD)), st.binary(max_size=16))), st.integers(1, 7))
def test_frames_come_out_as_they_went_in_however_they_are_cut(said: list[tuple[Kind, bytes]], part: int) -> None:
    wanted = [(kind, body[: HEARD[kind]]) for kind, body in said]
    data = b"".join(frame(kind, body) for kind, body in wanted)
    frames, found = Frames(HEARD), []
    for start in range(0, len(data), part):
        frames.feed(data[start : start + part])
        while (one := frames.take()) is not None:
            found.append(one)
    assert found == wanted


@pytest.mark.parametrize("kind", sorted(HEARD))
def test_no_length_beyond_a_kinds_limit_is_believed(kind: Kind) -> None:
    """Before a byte of the body has come: nothing is waited for or kept."""
    right, wrong = Frames(HEARD), Frames(HEARD)
    right.feed(frame(kind, bytes(HEARD[kind]))[:5])
    assert (right.take() is None) == (HEARD[kind] > 0)
    wrong.feed(frame(kind, bytes(HEARD[kind] + 1))[:5])
    with pytest.raises(Broken, match=f"where {HEARD[kind]} are the most"):
        wrong.take()


@given(st.integers(0, 255).filter(lambda number: number not in set(HEARD)))
def test_an_unknown_kind_is_refused(number: int) -> None:
    frames = Frames(HEARD)
    frames.feed(bytes([number]) + bytes(4))
    with pytest.raises(Broken, match="unknown"):
        frames.take()


def test_a_fault_is_cut_between_letters() -> None:
    frames = Frames(HEARD)
    frames.feed(fault_frame("\u00e9" * FAULT_BYTES + "x"))
    said = frames.take()
    assert said is not None
    assert said[1].decode() == "\u00e9" * (FAULT_BYTES // 2)


def test_a_roll_of_the_largest_records_fits() -> None:
    world = 3
    play = Play(world)
    texts = [member(rank, world, host="") for rank in range(world)]
    for rank, one in enumerate(texts):
        play.come(rank, host="h" * (RECORD_BYTES - len(one.to_text())))
    assert [kind for kind, _ in play.heard(0)] == [Kind.WELCOME, Kind.ROLL]


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"[1, 2]", b"\xff", b"[" * 10000])
def test_a_roll_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(RollCallError, match="another version"):
        read_roll(body, 2)
