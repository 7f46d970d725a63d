"""The meeting as a state machine: all come together, or all read the same fault, which names who is at fault."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plays import KEY, Play, called, member

from syncline.wire.meeting import (
    Kind,
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
        play.act(play.meeting.leave(rank))
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
    play.act(play.meeting.fail("a later fault"))
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
    assert play.fault().startswith("rank 1 (host\ufffd[2J\ufffd, pid 101) has \ufffd[2J 'x', rank 0 (host0, pid 100)")


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
    play.act(play.meeting.leave(5))
    play.come(0)
    assert play.meeting.fault is None
    assert play.heard(1)[-1][0] is Kind.ROLL


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"world": 4}, "rank 2 (host2, pid 102) counts 4 processes, rank 0 counts 3: give all the same world size"),
        (
            {"terms": {"strategy": "direct", "version": "1"}},
            "rank 2 (host2, pid 102) has strategy 'direct', rank 0 (host0, pid 100) has 'ring': all ranks need",
        ),
        ({"terms": {"strategy": "ring", "version": "1", "more": "x"}}, "rank 2 (host2, pid 102) has more 'x', rank 0"),
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
        " 10.0.0.2:1, and not said who it is), rank 4 (node 2) (one that claims to be it was refused at 10.0.0.9:1: it"
        " does not know this run's secret), rank 5 (node 2); see what they printed, or give more time with"
        " init(timeout=)"
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
        "all have come, but these have no connections to all others within 30 s: rank 1 (host1, pid 101)"
    )


@pytest.mark.parametrize("through", [False, True])
def test_one_that_dies_in_the_meeting_is_named(through: bool) -> None:
    play = called(3)
    if through:
        play.say(1, Kind.THROUGH)
    play.act(play.meeting.leave(1))
    del play.frames[1]
    assert play.fault() == "rank 1 (host1, pid 101) ended while the processes were meeting; see what it printed"


def test_one_that_goes_before_it_has_come_ends_nothing() -> None:
    play = Play(2)
    play.enter(1, 1)
    play.act(play.meeting.leave(1))
    assert play.meeting.fault is None
