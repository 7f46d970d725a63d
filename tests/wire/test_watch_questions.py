"""Watchers ask each other for whom they wait: answers come in time or not at all, and beats go on meanwhile."""

from __future__ import annotations

import socket
import struct
import threading
import time

import pytest
from watching import ANSWER, BEATS_S, LIMIT_S, QUESTION, RESTS, SHORT_S, Seat, Table, member, numbered

from syncline.wire import watch
from syncline.wire.culprit import Answer, pack


def test_who_is_asked_says_for_whom_it_waits(table: Table) -> None:
    """All ask at once, as processes of one machine and of several do, and again; nobody has failed by that."""
    said = [Answer({1: "bucket 3"}, 7, 3), Answer({2: "bucket 3", 0: "bucket 4"}, 6, 2), Answer({}, 5)]
    members = [member(0), member(1), member(2, pid_space="elsewhere")]
    socks: list[dict[int, socket.socket]] = [{} for _ in said]
    for low, high in ((0, 1), (0, 2), (1, 2)):
        socks[low][high], socks[high][low] = socket.socketpair()
    seats = [table.seat(index, members, socks[index], LIMIT_S, said[index]) for index in range(3)]
    heard: dict[tuple[int, int], list[Answer | None]] = {}

    def ask(seat: Seat) -> None:
        for peer in seat.watcher._socks:
            heard[seat.index, peer] = [seat.watcher.ask(peer) for _ in range(3)]

    askers = [threading.Thread(target=ask, args=(seat,)) for seat in seats]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(LIMIT_S)
    assert heard == {(seat.index, peer): [said[peer]] * 3 for seat in seats for peer in range(3) if peer != seat.index}
    assert all(seat.watcher.failure is None for seat in seats)


def test_who_does_not_answer_within_the_limit_has_said_nothing(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ANSWER_S", SHORT_S)
    seat, there = table.beside(member(1))
    assert seat.watcher.ask(1) is None
    assert there.recv(8) == numbered(QUESTION, 1)
    there.sendall(numbered(ANSWER, 1, pack(Answer({0: "bucket 1"}))))  # it comes too late, and does no harm
    there.sendall(numbered(QUESTION, 1))
    assert there.recv(100) == numbered(ANSWER, 1, pack(RESTS))
    assert seat.watcher.ask(1) is None  # what it said before is no answer to this
    assert seat.watcher.failure is None


def test_who_does_not_read_gets_one_answer_and_then_no_more(table: Table) -> None:
    """Of a peer that asks on and on no more is kept here than one answer."""
    answer = Answer(dict.fromkeys(range(256), "x" * 100))
    here, there = socket.socketpair()
    table.raw.append(there)
    seat = table.seat(0, [member(0), member(1)], {1: here}, LIMIT_S, answer)
    for number in range(1, 1000):
        there.sendall(numbered(QUESTION, number))
    there.sendall(struct.pack("<BxH", 2, 0))
    assert seat.left.wait(LIMIT_S)  # it has read all that
    assert 0 < len(seat.watcher._unsent[1]) <= 8 + len(pack(answer))


def test_who_has_left_waits_for_nobody(table: Table) -> None:
    seat, there = table.beside(member(1))
    there.sendall(struct.pack("<BxH", 2, 0))
    assert seat.left.wait(LIMIT_S)
    assert seat.watcher.ask(1) == RESTS


def test_a_failure_ends_the_wait_for_an_answer(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ANSWER_S", 2 * LIMIT_S)
    seat, there = table.beside(member(1))
    asker = threading.Thread(target=seat.watcher.ask, args=(1,), daemon=True)
    asker.start()
    assert there.recv(8) == numbered(QUESTION, 1)
    there.close()
    asker.join(LIMIT_S)
    assert not asker.is_alive()


def test_who_has_asked_or_answered_is_alive_for_others(table: Table) -> None:
    members = [member(0, pid_space="a"), member(1, pid_space="b"), member(2, pid_space="c")]
    pairs = {pair: socket.socketpair() for pair in ((0, 1), (0, 2))}
    table.raw.append(pairs[0, 2][1])
    first = table.seat(0, members, {1: pairs[0, 1][0], 2: pairs[0, 2][0]}, BEATS_S)
    second = table.seat(1, members, {0: pairs[0, 1][1]}, BEATS_S)
    assert first.watcher.ask(1) == RESTS  # for a moment neither has beats
    assert [first.culprit(), second.culprit()] == [2, 2]


def test_who_has_asked_leaves_the_beats_to_compiled_code_again(table: Table) -> None:
    """The run may go on, and a busy interpreter is not to be taken for a dead one then either."""
    members = [member(0, pid_space="a"), member(1, pid_space="b")]
    mine, theirs = socket.socketpair()
    seats = [
        table.seat(0, members, {1: mine}, BEATS_S),
        table.seat(1, members, {0: theirs}, BEATS_S),
    ]
    before = [seat.watcher._beats for seat in seats]
    assert seats[0].watcher.ask(1) == RESTS
    for seat, ended in zip(seats, before, strict=True):
        assert ended is not None
        assert ended.bell == -1
        seat.watcher._look(time.monotonic())
        assert seat.watcher._beats is not ended
        assert seat.watcher._beats is not None
        assert seat.watcher._beats._thread.is_alive()
        assert seat.watcher.failure is None


def test_who_is_asked_after_its_goodbye_answers_and_sends_no_more_beats(table: Table) -> None:
    seat, there = table.beside(member(1, pid_space="elsewhere"))
    assert seat.watcher._beats is not None
    ended = seat.watcher._beats
    seat.watcher.goodbye()
    there.sendall(numbered(QUESTION, 1))
    said, answer = b"", numbered(ANSWER, 1, pack(RESTS))
    while not said.endswith(answer):
        said += there.recv(len(answer))
    seat.watcher._look(time.monotonic())
    assert seat.watcher._beats is ended
    assert ended.bell == -1
