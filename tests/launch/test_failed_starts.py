"""Starts that fail: all are told why, also those who come late, and nobody is waited for who will not come."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starts import LIMIT_S, Case, environment, free_port, meet, serving

from syncline.errors import RollCallError, UsageError
from syncline.launch.meeting import Joined, MeetingPoint


def fails(joined: Joined) -> Any:
    """Rank 1 cannot join; the others come as always."""
    if joined.environment.rank == 1:
        raise UsageError("no such interface")
    return meet(joined)


def test_what_one_rank_cannot_do_is_told_to_all(start: Case) -> None:
    port = free_port()
    found = start(*(environment(rank, 3, port) for rank in range(3)), body=fails, secret="text")
    named = str(found[0]).removesuffix(": no such interface")
    assert named.startswith("rank 1 (from 127.0.0.1")
    assert [str(error) for error in found] == [
        f"{named}: no such interface",
        "no such interface",
        f"{named}: no such interface",
    ]
    assert [type(error) for error in found] == [RollCallError, UsageError, RollCallError]


def test_those_who_come_late_read_why_and_the_next_start_is_not_disturbed(start: Case) -> None:
    port = free_port()
    places = [environment(rank, 3, port) for rank in range(3)]

    def gives_up(_: Joined) -> None:
        raise UsageError("no such interface")

    assert str(start(places[0], body=gives_up, secret="text")[0]) == "no such interface"
    assert len(serving()) == 1
    late = str(start(places[1], secret="text")[0])
    assert late == f"rank 0 (serving at 127.0.0.1:{port}): no such interface"
    assert start(*places, run="the next", secret="text") == [b"text"] * 3
    assert not serving()


@pytest.mark.parametrize("launcher", ["syncline", "torchrun", "mpirun"])
def test_where_the_launcher_ends_all_nobody_is_waited_for(start: Case, launcher: str) -> None:
    (error,) = start(environment(0, 3, free_port(), launcher=launcher), body=fails, secret="text", timeout=1.0)
    assert "2 of 3 processes have not come" in str(error)
    for thread in serving():
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_nobody_is_waited_for_whose_time_is_over(start: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute for others would outlast this test."""
    monkeypatch.setattr("syncline.launch.meeting._LATE_S", 60.0)
    (error,) = start(environment(0, 3, free_port()), secret="text", timeout=1.0)
    assert "2 of 3 processes have not come" in str(error)
    for thread in serving():
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_an_interrupt_on_the_way_in_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meeting is served already, and nobody has come in."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("syncline.launch.meeting.MeetingClient.limit", interrupted)
    point = MeetingPoint(environment(0, 3, free_port()))
    with pytest.raises(KeyboardInterrupt), point.join("run", "text", None, LIMIT_S):
        pass
    for thread in serving():
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    point.close()


def test_an_interrupt_is_told_and_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.launch.meeting._LATE_S", 60.0)
    point = MeetingPoint(environment(0, 3, free_port()))

    def interrupted() -> None:
        with point.join("run", "text", None, LIMIT_S):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    for thread in serving():
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    point.close()


def test_a_process_of_another_start_is_not_taken_for_one_of_this(start: Case) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(start, environment(1, port=port), run="the start after", secret="text", timeout=0.5)
        (mine,) = start(environment(0, port=port), run="this start", secret="text", timeout=0.7)
        assert "cannot reach the meeting" in str(other.result(LIMIT_S)[0])
    assert "1 of 2 processes have not come: rank 1" in str(mine)
