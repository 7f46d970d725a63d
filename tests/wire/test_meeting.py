"""The rendezvous as a state machine: frames, records, notes and rules; every fault names the process to blame."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plays import KEY, Play, called, member

from syncline.errors import RollCallError
from syncline.wire.meeting import (
    AMOUNT,
    FAULT_BYTES,
    HEARD,
    KEY_BYTES,
    NOTES_BYTES,
    RECORD_BYTES,
    VALUE_BYTES,
    Broken,
    Frames,
    Kind,
    Member,
    Roll,
    check_member,
    fault_frame,
    frame,
    note,
    read_member,
    read_roll,
)


@given(st.permutations(range(5)), st.permutations(range(5)))
def test_all_come_in_any_order_and_leave_together(coming: list[int], leaving: list[int]) -> None:
    play = Play(5)
    for number, rank in enumerate(coming):
        play.come(rank)
        assert [kind for kind, _ in play.heard(rank)] == [Kind.WELCOME] + [Kind.ROLL] * (number == 4)
    for rank in coming[:4]:
        ((kind, body),) = play.heard(rank)
        assert kind is Kind.ROLL
        assert read_roll(body, 5) == tuple(member(index, 5) for index in range(5))
    for number, rank in enumerate(leaving):
        assert not play.meeting.over
        play.say(rank, Kind.THROUGH)
        if number < 4:
            assert play.heard(rank) == []
    assert play.meeting.over
    assert play.meeting.fault is None
    for rank in range(5):
        assert play.heard(rank) == [(Kind.OVER, b"")]
        play.act(play.meeting.leave, rank)
    assert play.meeting.fault is None


def test_the_key_comes_first() -> None:
    play = Play(2)
    play.enter(7, 1)
    assert play.heard(7) == [(Kind.WELCOME, KEY)]


def test_the_first_fault_is_the_one_that_all_read() -> None:
    play = Play(4)
    play.come(0)
    play.come(2)
    play.say(2, Kind.FAULT, b"burnt down")
    play.act(play.meeting.fail, "a later fault")
    assert play.fault() == "rank 2 (host2, pid 102): burnt down"
    assert play.meeting.awaited
    for late in (1, 3):
        play.enter(late, late)
        assert play.heard(late) == [(Kind.FAULT, b"rank 2 (host2, pid 102): burnt down")]
        assert late in play.dismissed
    assert not play.meeting.awaited


def test_a_fault_may_come_before_a_record() -> None:
    play = Play(2)
    play.come(0)
    play.enter(1, 1)
    play.say(1, Kind.FAULT, b"there is no such interface")
    assert play.fault() == "rank 1 (from 10.0.0.1:1): there is no such interface"


def test_a_fault_steers_no_terminal() -> None:
    """Whatever it says, it is said in the name of the process that has said it."""
    play = called(2)
    play.say(1, Kind.FAULT, b"\x1b[2J\x1b[Hrank 0: see\nhttp://elsewhere\x07")
    assert play.fault() == "rank 1 (host1, pid 101): \ufffd[2J\ufffd[Hrank 0: see\nhttp://elsewhere\ufffd"
    play = Play(2)
    play.come(0)
    play.come(1, host="host\x1b[2J\n", terms={"strategy": "ring", "version": "1", "\x1b[2J": "x"})
    assert play.fault().startswith(
        "rank 1 (host\ufffd[2J\ufffd, pid 101) has \ufffd[2J 'x', but rank 0 (host0, pid 100)"
    )


def test_a_duplicate_rank_names_both() -> None:
    play = Play(3)
    play.come(1)
    play.come(1, caller=9, host="elsewhere", pid=7)
    assert play.fault() == (
        "rank 1 is taken by host1, pid 101; elsewhere, pid 7 claims it too: give every process its own"
    )


def test_a_second_connection_that_says_nothing_is_no_duplicate() -> None:
    play = Play(2)
    play.enter(5, 1)
    play.come(1)
    play.act(play.meeting.leave, 5)
    play.come(0)
    assert play.meeting.fault is None
    assert play.heard(1)[-1][0] is Kind.ROLL


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"world": 4},
            "rank 2 (host2, pid 102) counts 4 processes, but rank 0 counts 3: give all processes the same world size",
        ),
        (
            {"terms": {"strategy": "direct", "version": "1"}},
            "rank 2 (host2, pid 102) has strategy 'direct', but rank 0 (host0, pid 100) has 'ring': all ranks need",
        ),
        (
            {"terms": {"strategy": "ring", "version": "1", "more": "x"}},
            "rank 2 (host2, pid 102) has more 'x', but rank 0",
        ),
    ],
    ids=["world", "strategy", "term"],
)
def test_one_that_disagrees_with_rank_0_is_named(order: tuple[int, ...], changes: dict[str, Any], text: str) -> None:
    play = Play(3)
    for rank in order:
        if play.meeting.fault is None:
            play.come(rank, **(changes if rank == 2 else {}))
    assert play.fault().startswith(text)


def test_the_missing_are_named_with_what_is_known_of_them() -> None:
    play = Play(6, hint=lambda rank: f" (node {rank // 2})")
    for rank in (0, 3):
        play.come(rank)
    play.enter(8, 2)
    play.meeting.refused[4] = "one that claims to be it was refused at 10.0.0.9:1: it does not know this run's secret"
    play.say(3, Kind.LATE, b"120")
    assert play.fault() == (
        "after 120 s 4 of 6 processes have not come: rank 1 (node 0), rank 2 (node 1) (it has connected, from"
        " 10.0.0.2:1, but has not identified itself), rank 4 (node 2) (one that claims to be it was refused at"
        " 10.0.0.9:1: it does not know this run's secret), rank 5 (node 2); see what they printed, or give more time"
        " with init(timeout=)"
    )


def test_of_many_missing_some_are_named() -> None:
    play = Play(2000)
    play.come(0)
    play.say(0, Kind.LATE, b"5")
    text = play.fault()
    assert text.startswith("after 5 s 1999 of 2000 processes have not come: rank 1, rank 2, ")
    assert " and 1983 more; see" in text


def test_one_whose_time_is_over_while_it_enters_breaks_no_rule() -> None:
    play = Play(3)
    play.come(0)
    play.enter(1, 1)
    play.say(1, Kind.LATE, b"2")
    assert play.fault().startswith(
        "after 2 s 2 of 3 processes have not come: rank 1 (it has connected, from 10.0.0.1:1,"
    )


def test_one_that_comes_when_all_are_through_is_told_nothing() -> None:
    play = called(1)
    play.say(0, Kind.THROUGH)
    play.enter(5, 0)
    assert play.heard(5) == []
    assert 5 in play.dismissed


def test_one_that_does_not_connect_is_named_by_who_waits_for_it() -> None:
    play = called(3)
    for rank in (0, 2):
        play.say(rank, Kind.THROUGH)
    play.say(0, Kind.LATE, b"30")
    assert play.fault() == (
        "all processes have come, but these are not connected to all others after 30 s: rank 1 (host1, pid 101)"
    )


@pytest.mark.parametrize("through", [False, True])
def test_one_that_dies_in_the_meeting_is_named(through: bool) -> None:
    play = called(3)
    if through:
        play.say(1, Kind.THROUGH)
    play.act(play.meeting.leave, 1)
    del play.frames[1]
    assert play.fault() == "rank 1 (host1, pid 101) ended while the processes were meeting; see what it printed"


def test_one_that_goes_before_it_has_come_ends_nothing() -> None:
    play = Play(2)
    play.enter(1, 1)
    play.act(play.meeting.leave, 1)
    assert play.meeting.fault is None


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
    with pytest.raises(Broken, match=f"but {HEARD[kind]} are the maximum"):
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


ONE = Member(1, 4, "host", "machine", 77, "pids", "127.0.0.1", 5000, "syncline-abc", {"strategy": "ring"}, "3")


def member_on(index: int, machine: str) -> Member:
    return Member(index, 4, f"host of {machine}", machine, 1, machine, "127.0.0.1", 1, "", {})


def test_a_record_is_read_as_it_was_written() -> None:
    assert read_member(ONE.to_text()) == ONE
    assert read_member(ONE.to_text().encode()) == ONE


@pytest.mark.parametrize(
    "changes",
    [
        {"index": -1},
        {"index": True},
        {"index": 1.0},
        {"world": "4"},
        {"port": 65536},
        {"pid": 1 << 32},
        {"host": None},
        {"terms": {"strategy": 1}},
        {"terms": ["strategy"]},
        {"mask": ""},
        {"mask": "0x1"},
        {"mask": "-1"},
        {"mask": "f" * 2049},
        {"more": 1},
    ],
    ids=str,
)
def test_a_record_with_a_wrong_field_is_none(changes: dict[str, Any]) -> None:
    with pytest.raises(RollCallError, match="does not fit this version"):
        read_member(json.dumps(asdict(ONE) | changes))


@pytest.mark.parametrize("name", asdict(ONE))
def test_a_record_without_a_field_is_none(name: str) -> None:
    found = asdict(ONE)
    del found[name]
    with pytest.raises(RollCallError):
        check_member(found)


@given(st.binary(max_size=200))
def test_noise_is_no_record(noise: bytes) -> None:
    with pytest.raises(RollCallError):
        read_member(noise)


def test_what_is_nested_too_deeply_is_no_record() -> None:
    with pytest.raises(RollCallError):
        read_member("[" * 16000)


def test_nodes_are_numbered_as_they_appear() -> None:
    roll = Roll(0, tuple(member_on(index, machine) for index, machine in enumerate("baab")), "a run", b"")
    assert roll.nodes == (0, 1, 1, 0)
    assert roll.hosts == 2
    assert roll.near == {3}
    assert replace(roll, index=1).near == {2}


@pytest.mark.parametrize(
    ("masks", "crowded"),
    [
        (("3", "1", "1", "3"), False),  # a host of two processes with the same two cores
        (("1", "1", "1", "1"), True),
        (("1", "1", "1", "2"), False),  # bound to a core each
        (("3", "0", "1", "3"), True),
        (("f" * 2048, "1", "1", "f" * 2048), False),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_host_is_crowded_when_its_processes_outnumber_its_cores(masks: tuple[str, ...], crowded: bool) -> None:
    placed = zip("abca", masks, strict=True)
    members = [replace(member_on(index, machine), mask=mask) for index, (machine, mask) in enumerate(placed)]
    read = tuple(read_member(one.to_text()) for one in members)
    assert Roll(0, read, "a run", b"").crowded is crowded


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
    assert "counted beyond the limit" in play.fault()
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
        with pytest.raises(ValueError, match="are the maximum"):
            note(key, value)


@pytest.mark.parametrize("kind", sorted(set(HEARD) - {Kind.RECORD, Kind.FAULT, Kind.LATE}))
def test_nothing_may_be_said_before_the_record(kind: Kind) -> None:
    play = Play(2)
    play.come(0)
    play.enter(1, 1)
    play.say(1, kind)
    assert play.fault().startswith(
        f"rank 1 (from 10.0.0.1:1) broke the rules of the meeting: it sent {kind.name.lower()} before its record;"
    )


@pytest.mark.parametrize("kind", [Kind.RECORD, Kind.THROUGH, Kind.SET, Kind.GET, Kind.ADD])
def test_who_has_come_waits_for_the_roll(kind: Kind) -> None:
    play = Play(2)
    play.come(1)
    play.say(1, kind, member(1, 2).to_text().encode())
    assert "rank 1 (host1, pid 101) broke the rules of the meeting: it sent" in play.fault()


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
    assert "it is not one of the 3 processes" in play.fault()
    play = Play(3)
    play.come(2)
    assert play.meeting.fault is None


@pytest.mark.parametrize("record", [b"", b"no JSON", b"[]", b"{}", b"\xff\xfe", b"[" * 10000])
def test_a_record_that_is_none_ends_the_start(record: bytes) -> None:
    play = Play(2)
    play.enter(1, 1)
    play.say(1, Kind.RECORD, record)
    assert play.fault() == (
        "rank 1 (from 10.0.0.1:1): its record does not fit this version: does it run another version of Syncline?"
    )


@given(st.binary(max_size=400))
def test_noise_never_harms_more_than_the_start(noise: bytes) -> None:
    play, frames = called(2), Frames(HEARD)
    frames.feed(noise)
    try:
        while (said := frames.take()) is not None:
            play.say(1, *said)
    except Broken as broken:
        play.act(play.meeting.break_off, 1, str(broken))
    if play.meeting.fault is not None:
        play.fault()
