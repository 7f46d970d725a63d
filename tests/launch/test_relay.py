"""An elastic run as its launcher sees it: who is told what, and with which status it ends."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from syncline.errors import GroupError
from syncline.launch import relay as relays
from syncline.launch.local import LocalRun, Outcome
from syncline.launch.relay import Relay, RelayLine

LIMIT_S = 30.0
TALK = """
import json, os, signal, socket, sys
fd, rank, *_ = map(int, os.environ["SYNCLINE_ELASTIC"].split(":"))
line = socket.socket(fileno=fd)
send = lambda **packet: line.send(json.dumps(packet).encode())
hear = lambda: json.loads(line.recv(65536))
"""
BEGUN = "send(begun=1)\n"


def run(script: str, processes: int = 2, least: int = 1, begun: str = BEGUN) -> Outcome:
    command = [sys.executable, "-I", "-S", "-c", TALK + begun + script]
    with LocalRun(command, processes, relay=Relay(processes, least), grace_s=0.1) as started:
        return started.wait(LIMIT_S)


def test_the_end_of_a_process_is_told_and_ends_no_other_one() -> None:
    outcome = run("if rank: sys.exit(3)\nassert hear() == {'ended': 1}\nsend(view=2, members=[0])")
    assert outcome.status == 0
    assert [(ending.rank, ending.status, ending.told) for ending in outcome.endings] == [(1, 3, False), (0, 0, False)]
    assert outcome.text == "rank 1 ended with status 3"


def test_a_run_without_survivors_has_the_status_of_the_first_that_failed() -> None:
    assert run("if rank == 0: hear()\nsys.exit(4 + rank)").status == 5


def test_who_is_left_behind_is_ended_with_the_last_member() -> None:
    outcome = run("if rank: signal.pause()\nsend(view=2, members=[0])")
    assert outcome.status == 0
    assert [(ending.rank, ending.told) for ending in outcome.endings] == [(0, False), (1, True)]


def test_packets_reach_whom_they_are_for_and_name_their_sender() -> None:
    outcome = run(
        "if rank == 2: send(to=0, message=['hello']); send(done=True)\n"
        "if rank == 0: assert hear() == {'from': 2, 'message': ['hello']}; assert hear() == {'done': 2}\n"
        "if rank == 1: assert hear() == {'done': 2}",
        3,
    )
    assert outcome.status == 0, outcome.text


def test_one_half_of_a_view_is_favoured() -> None:
    found = Relay(4, 1)
    ends = [RelayLine(socket.socket(fileno=os.dup(found.inherited(rank))), rank, 4, 1) for rank in range(4)]
    for rank, half in ((2, [2, 3]), (0, [0, 1]), (3, [2, 3])):
        ends[rank].send({"ask": 1, "half": half})
        found.read(rank)
        assert ends[rank].receive(LIMIT_S) == {"view": 1, "half": [2, 3]}
    ends[0].send({"ask": 2, "half": [0]})
    found.read(0)
    assert ends[0].receive(LIMIT_S) == {"view": 2, "half": [0]}
    assert ends[1].receive(0.01) is None
    nonsense = [b"nonsense", b"[]", b"{}", b"[" * 60_000, b'{"to": 1e999, "message": 1}', b'{"to": 9, "message": []}']
    for packet in [*nonsense, b'{"view": 5, "members": [9]}', b'{"view": 5, "members": []}']:
        ends[1]._sock.send(packet)
        found.read(1)
    assert found.members == {0, 1, 2, 3}
    assert all(ends[rank].receive(0.01) is None for rank in range(4))
    found.close()
    for end in ends:
        with pytest.raises(GroupError, match="syncline run has ended"):
            end.receive(LIMIT_S)
        end._sock.close()


@pytest.mark.parametrize("value", ["", "3", "a:0:2:1", "999999:0:2:1"])
def test_there_is_no_line_without_a_valid_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(relays.VARIABLE, value)
    assert RelayLine.inherit() is None


def test_a_line_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Relay(2, 2)
    monkeypatch.setenv(relays.VARIABLE, f"{os.dup(found.inherited(1))}:1:2:2")
    line = RelayLine.inherit()
    assert line is not None
    assert (line.number, line.processes, line.least) == (1, 2, 2)
    line._sock.close()
    found.close()


@pytest.mark.parametrize(("processes", "least"), [(3, 1), (2, 2)])
def test_a_run_ends_when_too_few_members_are_left(processes: int, least: int) -> None:
    outcome = run("if rank: sys.exit(5)\nsignal.pause()", processes, least)
    assert outcome.status == 5
    assert [(ending.rank, ending.told) for ending in outcome.endings][-1] == (0, True)


def test_a_run_goes_on_while_the_members_of_a_later_view_do() -> None:
    outcome = run("if rank: sys.exit(5)\nsend(view=2, members=[0, 1]); time = __import__('time'); time.sleep(0.5)", 3)
    assert (outcome.status, outcome.endings[-1].told) == (0, False), outcome.text


def test_a_failure_before_the_first_call_ends_the_run() -> None:
    outcome = run("if rank: sys.exit(5)\nsignal.pause()", begun="")
    assert outcome.status == 5
    assert [(ending.rank, ending.told) for ending in outcome.endings] == [(1, False), (0, True)]
