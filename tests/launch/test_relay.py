"""An elastic run as its launcher sees it: who is told what, and with which status it ends."""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

import pytest
from test_local import gone

from syncline.errors import GroupError, UsageError
from syncline.launch import local
from syncline.launch import relay as relays
from syncline.launch.child import Child
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


def run(script: str, processes: int = 2, least: int = 1, most: int | None = None, begun: str = BEGUN) -> Outcome:
    command = [sys.executable, "-I", "-S", "-c", TALK + begun + script]
    with LocalRun(command, processes, relay=Relay(processes, least, most), grace_s=0.1) as started:
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
    ends = [RelayLine(socket.socket(fileno=os.dup(found.inherited(rank))), rank, 4, 1, 0) for rank in range(4)]
    for rank, half in ((2, [2, 3]), (0, [0, 1]), (3, [2, 3])):
        ends[rank].send({"ask": 1, "half": half})
        found.read(rank)
        assert ends[rank].receive(LIMIT_S) == {"view": 1, "half": [2, 3]}
    ends[0].send({"ask": 2, "half": [0]})
    found.read(0)
    assert ends[0].receive(LIMIT_S) == {"view": 2, "half": [0]}
    assert ends[1].receive(0.01) is None
    found._pairs[0][0].send(b"[1]")  # of no launcher
    assert ends[0].receive(LIMIT_S) is None
    nonsense = [
        b"nonsense",
        b"[]",
        b"{}",
        b'{"ask": 3, "half": 7}',
        b'{"view": 1e999, "members": [0]}',
        b"[" * 60_000,
        b'{"to": 1e999, "message": 1}',
        b'{"to": 9, "message": []}',
    ]
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


@pytest.mark.parametrize("value", ["", "3", "a:0:2:1:0", "999999:0:2:1:0", f"{'9' * 5000}:0:2:1:0"])
def test_there_is_no_line_without_a_valid_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(relays.VARIABLE, value)
    assert RelayLine.inherit() is None


def test_a_line_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Relay(2, 2)
    monkeypatch.setenv(relays.VARIABLE, f"{os.dup(found.inherited(1))}:1:2:2:0")
    line = RelayLine.inherit()
    assert line is not None
    assert (line.number, line.processes, line.least, line.most, line.joins) == (1, 2, 2, 0, False)
    line._sock.close()
    found.close()


SERVED = "5:0:4:2:8"  # 4 processes, of 2 to 8 members
CLOSED = "5:0:4:2:0"  # nobody joins
APART = "5:0:6:2:8:2:0"  # two processes more, which are servers


@pytest.mark.parametrize(
    ("given", "variable", "found"),
    [
        (None, "", None),
        (None, SERVED, None),
        ((2, 8), SERVED, (2, 8)),
        ((3, 6), SERVED, (3, 6)),
        ([2, 4], CLOSED, (2, 4)),
        ((4, 4), APART, (4, 4)),
        (2, SERVED, (2, None)),
        ((2, None), CLOSED, (2, None)),
    ],
)
def test_a_script_asks_for_numbers_that_its_launcher_serves(
    monkeypatch: pytest.MonkeyPatch, given: Any, variable: str, found: Any
) -> None:
    monkeypatch.setenv(relays.VARIABLE, variable)
    assert relays.range_asked(given) == found


ASKED, REMEDY = "the script asks for an elastic run of", "start it with syncline run -n 8 --elastic 2:8, or leave"


@pytest.mark.parametrize(
    ("given", "variable", "words"),
    [
        ((2, 8), "", f"{ASKED} 2 to 8 workers, but its launcher lets no run go on when a worker is lost: {REMEDY}"),
        (None, "2:8", REMEDY),
        (2, "", f"{ASKED} at least 2 workers, but .* syncline run -n 2 --elastic 2, or leave"),
        ((1, 8), SERVED, "the launcher ends it when fewer than 2 are left: use syncline run --elastic 1:8"),
        ((2, 9), SERVED, "the launcher lets at most 8 take part: use syncline run --elastic 2:9"),
        ((2, 8), CLOSED, "the launcher lets at most 4 take part: use syncline run --elastic 2:8"),
        ((2, 3), SERVED, "but 4 were started: use syncline run -n 3"),
        ((6, 8), SERVED, "but 4 were started: use syncline run -n 8"),
        (None, "2;8", "SYNCLINE_ELASTIC: 2;8 is not LEAST or LEAST:MOST"),
        (None, "3:2", "SYNCLINE_ELASTIC=3:2: give the least and the greatest number of workers"),
        *(
            (wrong, SERVED, "give the least and the greatest number of workers, two numbers from 1 in this order")
            for wrong in ((0, 2), 0, -1, (3, 2), (2, 3, 4), "2:8", True, (2.0, 8), (True, 8))
        ),
    ],
)
def test_numbers_of_workers_that_cannot_be_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, given: Any, variable: str, words: str
) -> None:
    monkeypatch.setenv(relays.VARIABLE, variable)
    with pytest.raises(UsageError, match=words):
        relays.range_asked(given)


def test_members_are_no_more_and_no_fewer_than_a_script_asks_for() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for most, asked, found in ((8, (3, 6), (3, 6)), (8, (3, None), (3, 8)), (0, (3, 4), (3, 0))):
            line = RelayLine(theirs, 0, 4, 2, most)
            line.narrow(asked)
            assert (line.least, line.most) == found


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


def test_a_lost_process_is_replaced_and_asks_the_first_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "_PAUSE_S", 0.0)
    outcome = run(
        "if rank == 1: assert hear() == {'ended': 0}; send(view=2, members=[1])\n"
        "if rank == 2: assert os.environ['WORLD_SIZE'] == '1'; send(join=['Join']); assert hear() == {'ended': 1}\n"
        "if rank == 1: assert hear() == {'from': 2, 'message': ['Join']}; send(view=3, members=[1, 2])\n"
        "sys.exit(3 * (rank == 0))",
        most=2,
    )
    assert outcome.status == 0, outcome.text
    assert outcome.text == "rank 0 ended with status 3"
    assert sorted(ending.name for ending in outcome.endings) == ["rank 0", "rank 1", "worker 2 (a replacement)"]


def test_replacements_that_end_early_come_to_an_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(relays, "_PAUSE_S", 0.0)
    ended = "if rank == 0: assert [hear() for _ in range(4)] == [{'ended': number} for number in range(1, 5)]\n"
    outcome = run(ended + "sys.exit(rank)", most=2)
    assert outcome.status == 0, outcome.text
    assert [(ending.rank, ending.status) for ending in outcome.endings[:4]] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    said = capfd.readouterr().err
    assert "3 replacements in turn have ended before they joined, or with an error within 2 s after that" in said


def test_a_thousand_replacements_leave_nothing_in_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one joins and is killed: it is replaced without end. Stubs stand for the processes that it would start."""
    monkeypatch.setattr(relays, "_PAUSE_S", 0.0)
    monkeypatch.setattr(local, "Child", Stub)
    before = descriptors()
    found, held = Relay(2, 1, 2), 0
    with LocalRun(["worker"], 2, relay=found, grace_s=0.1, on_output=lambda *_: None) as started:
        found._obey(0, {"begun": 1})
        Stub.last.end(9)
        for number in range(2, 1002):
            while Stub.last.rank != number:
                assert started.poll(LIMIT_S) is None
            found._obey(0, {"view": number, "members": [0, number]})
            found._obey(0, {"ask": number, "half": [0]})
            Stub.last.end(9)
            if number == 100:
                held = sizes(started)
        assert descriptors() < before + 30
        assert sizes(started) <= held
        Stub.first.end(0)
        outcome = started.wait(LIMIT_S)
    assert outcome.status == 0
    assert "earlier replacements ended too" in outcome.text
    assert len(outcome.endings) < 12
    assert descriptors() == before


def test_an_ended_process_leaves_no_zombie_and_none_of_its_own_processes() -> None:
    """The others go on meanwhile."""
    lines: list[str] = []
    script = (
        "import subprocess\n"
        "if rank: print(os.getpid(), subprocess.Popen(['sleep', '60']).pid, flush=True); sys.exit(3)\n"
        "hear(); os.read(0, 1)"
    )
    command = [sys.executable, "-I", "-S", "-c", TALK + BEGUN + script]
    with LocalRun(command, 2, relay=Relay(2, 1), on_output=lambda _, line: lines.append(line)) as started:
        limit_s = time.monotonic() + LIMIT_S
        while len(started.pids) > 1:
            assert started.poll(1.0) is None
            assert time.monotonic() < limit_s
        worker, child = map(int, lines[0].split())
        assert not Path(f"/proc/{worker}").exists()
        assert gone(child)


class Stub:
    """A process that ends when it is told to, by a pipe in place of the descriptor of a process."""

    first: Stub
    last: Stub

    def __init__(self, rank: int, *_: Any) -> None:
        self.rank, self.status, self.pid = rank, None, 0
        self.pidfd, self._ends = os.pipe()
        end, self._output = os.pipe()
        self.output = os.fdopen(end, "rb", buffering=0)
        Stub.last = self
        if rank == 0:
            Stub.first = self

    def end(self, number: int) -> None:
        """Let it end by a signal, or with status 0."""
        self._ended = 128 + number if number else 0
        os.close(self._ends)
        os.close(self._output)

    def look(self) -> int | None:
        ready = select.select([self.pidfd], [], [], 0)[0]
        return self._ended if ready else None

    def signal(self, number: int) -> None:
        pass

    def close(self) -> None:
        os.close(self.pidfd)
        self.output.close()


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def sizes(run: LocalRun) -> int:
    """The number of items that a run and its relay hold."""
    parts = [*vars(run).values(), *vars(run._relay).values(), run._selector.get_map()]
    return sum(len(part) for part in parts if isinstance(part, Sized))


class Replaced:
    """A relay of three processes, of which number 1 is lost and replaced again and again."""

    def __init__(self) -> None:
        self.relay, self.now_s, self.number, self.view = Relay(3, 1, 3), 0.0, 1, 1
        self.relay._obey(0, {"begun": 1})
        self.relay.note_end(1, 137, self.now_s)

    def pause_s(self) -> float | None:
        return self.relay.due(self.now_s)

    def replace(self) -> None:
        wait_s = self.pause_s()
        assert wait_s is not None
        self.now_s += wait_s
        self.number = self.relay.replace(self.now_s)
        assert self.pause_s() is None

    def join(self) -> None:
        self.view += 1
        self.relay._obey(0, {"view": self.view, "members": [0, 2, self.number]})
        assert self.pause_s() is None

    def end(self, status: int, after_s: float) -> str:
        self.now_s += after_s
        return self.relay.note_end(self.number, status, self.now_s)


@pytest.fixture
def replaced() -> Iterator[Replaced]:
    found = Replaced()
    yield found
    found.relay.close()


@pytest.mark.parametrize("status", [0, 1, 137])
def test_three_replacements_in_turn_that_never_join_are_the_last(replaced: Replaced, status: int) -> None:
    """However late they end, and however."""
    for wait_s, last in ((1.0, ""), (2.0, ""), (4.0, "no more are started")):
        assert replaced.pause_s() == wait_s
        replaced.replace()
        told = replaced.end(status, after_s=100.0)
        assert told.endswith(last)
        assert bool(told) == bool(last)
    assert replaced.pause_s() is None


@pytest.mark.parametrize(
    ("status", "after_s", "fails"), [(1, 1.75, True), (128, 1.75, True), (129, 0.0, False), (1, 2.0, False)]
)
def test_a_replacement_fails_that_ends_by_itself_soon_after_it_has_joined(
    replaced: Replaced, status: int, after_s: float, fails: bool
) -> None:
    """One that a signal has ended, or that had stayed for 2 s, does not: then replacing has no end."""
    for count in range(3 if fails else 20):
        assert replaced.pause_s() == (2.0**count if fails else 1.0)
        replaced.replace()
        replaced.join()
        assert bool(replaced.end(status, after_s)) == (fails and count == 2)
    assert (replaced.pause_s() is None) == fails


def test_a_replacement_that_stays_resets_the_count_once(replaced: Replaced) -> None:
    for _ in range(2):
        replaced.replace()
        assert not replaced.end(1, after_s=1.0)
    replaced.replace()
    replaced.join()
    replaced.now_s += 2.0
    assert replaced.pause_s() is None
    relay, stays = replaced.relay, replaced.number
    relay.note_end(2, 137, replaced.now_s)
    for count in range(3):  # beside one that has stayed and lives
        assert replaced.pause_s() == 2.0**count
        replaced.replace()
        assert bool(replaced.end(1, after_s=1.0)) == (count == 2)
    assert relay.due(1e9) is None
    assert relay._lives(stays)


def test_no_more_processes_live_than_the_most(replaced: Replaced) -> None:
    replaced.relay._obey(0, {"view": 2, "members": [0]})  # worker 2 is left behind and lives
    replaced.replace()
    assert replaced.relay.due(1e9) is None
    replaced.relay.note_end(0, 0, 300.0)
    assert replaced.relay.due(1e9) is None


def test_a_server_takes_the_place_of_a_server() -> None:
    """Servers do not count as workers, of which two live already."""
    found = Relay(4, 1, 2, servers=2)
    found._obey(0, {"begun": 1})
    assert found.environ(3)[relays.VARIABLE].endswith(":3:4:1:2:2:0")
    found.note_end(3, 9, 0.0)
    assert found.refusal(1).startswith("it has 2 of at most 2 workers")
    assert found.due(1.0) == 0.0
    assert (found.replace(1.0), found.serves(4), found.due(9.0)) == (4, True, None)
    assert found.environ(4)[relays.VARIABLE].endswith(":4:4:1:2:2:1")
    found._obey(0, {"view": 2, "members": [0, 1, 2, 4]})
    found.note_end(1, 9, 10.0)
    assert (found.replace(11.0), found.serves(5), found.due(19.0)) == (5, False, None)
    assert found.environ(5)[relays.VARIABLE].endswith(":5:4:1:2:2:0")
    found.close()


def test_nobody_is_replaced_unless_that_is_asked_for() -> None:
    found = Relay(3, 1)
    found._obey(0, {"begun": 1})
    found.note_end(1, 9, 100.0)
    assert found.due(200.0) is None
    found.close()


def test_a_replacement_that_cannot_be_started_ends_no_other_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def child(rank: int, *how: Any) -> Child:
        if rank >= 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return Child(rank, *how)

    monkeypatch.setattr(local, "Child", child)
    monkeypatch.setattr(relays, "_PAUSE_S", 0.01)
    script = "if rank: sys.exit(3)\nassert hear() == {'ended': 1}\n__import__('time').sleep(0.5)"
    command = [sys.executable, "-I", "-S", "-c", TALK + BEGUN + script]
    with LocalRun(command, 2, relay=Relay(2, 1, 2), grace_s=0.1) as started:
        assert started.wait(LIMIT_S).status == 0
    said = capfd.readouterr().err
    assert said.count("no replacement for a lost process could be started") == 3
    assert "it was the last of 3 tries" in said


def test_a_replacement_that_ends_well_before_it_joins_ends_no_training() -> None:
    found = Relay(2, 1, 2)
    found._obey(0, {"begun": 1})
    found.note_end(1, 9, 0.0)
    found._obey(0, {"view": 2, "members": [0]})
    number = found.replace(2.0)
    found.note_end(number, 0, 3.0)
    assert found.due(100.0) == 0.0
    found.close()
