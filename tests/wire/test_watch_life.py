"""Who is alive: processes that are silent or stopped are lost, those that are only busy are not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from watching import BEATS_S, SHORT_S, Table, member

from syncline.wire import watch


@pytest.mark.parametrize(
    ("pid_space", "machine", "seen"),
    [("here", "machine", True), ("elsewhere", "machine", False), ("here", "another network", False), ("", "", False)],
)
def test_proc_is_enough_only_without_a_link_between(pid_space: str, machine: str, seen: bool) -> None:
    assert watch.sees(member(0), member(1, pid_space=pid_space, machine=machine)) is seen


@pytest.mark.parametrize("place", [{"pid_space": "elsewhere"}, {"machine": "another network"}], ids=str)
def test_a_peer_of_another_machine_that_is_silent_is_lost(table: Table, place: dict[str, str]) -> None:
    seat, there = table.beside(member(1, **place), SHORT_S)  # type: ignore[arg-type]
    assert seat.culprit() == 1
    assert "no sign of life" in str(seat.watcher.failure)
    there.setblocking(False)
    assert there.recv(4)[0] == 1  # it was sent heartbeats itself


def test_heartbeats_keep_a_peer_alive(table: Table) -> None:
    """Two watchers that see each other as processes of other machines; one that sends nothing is found meanwhile."""
    members = [member(0, pid_space="a"), member(1, pid_space="b"), member(2, pid_space="c")]
    pairs = {pair: socket.socketpair() for pair in ((0, 1), (0, 2))}
    table.raw.append(pairs[0, 2][1])
    first = table.seat(0, members, {1: pairs[0, 1][0], 2: pairs[0, 2][0]}, BEATS_S)
    table.seat(1, members, {0: pairs[0, 1][1]}, BEATS_S)
    assert first.culprit() == 2


def test_a_bell_that_has_been_closed_is_not_closed_again_in_a_child(table: Table) -> None:
    seat, _ = table.beside(member(1, pid_space="elsewhere"))
    assert seat.watcher._beats is not None
    number = seat.watcher._beats.bell
    seat.watcher.abort("failed: whatever")
    assert seat.watcher._beats.bell == -1
    assert number >= 0


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


def test_a_stopped_process_of_this_machine_is_lost(table: Table, child: subprocess.Popen[bytes]) -> None:
    seat, _ = table.beside(member(1, pid=child.pid), SHORT_S)
    os.kill(child.pid, signal.SIGSTOP)
    assert seat.culprit() == 1
    assert f"rank 1 (host1, pid {child.pid}) is stopped" in str(seat.watcher.failure)


def test_a_busy_process_of_this_machine_is_not_lost(table: Table, child: subprocess.Popen[bytes]) -> None:
    """It answers nothing, but it is not stopped: found guilty is who really is."""
    members = [member(0), member(1, pid=child.pid), member(2, pid_space="elsewhere")]
    pairs = [socket.socketpair() for _ in range(2)]
    table.raw += [there for _, there in pairs]
    seat = table.seat(0, members, {1: pairs[0][0], 2: pairs[1][0]}, SHORT_S)
    assert seat.culprit() == 2
