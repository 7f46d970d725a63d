"""Who failed first: deaths and aborts are told apart from leaving, and everybody names the same culprit."""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path

import pytest
from watching import LIMIT_S, Table, member

from syncline.errors import PeerLost
from syncline.wire import watch


def test_a_connection_that_closes_without_a_goodbye_is_a_death(table: Table, capfd: pytest.CaptureFixture[str]) -> None:
    seat, there = table.beside(member(1, pid=4711))
    there.close()
    assert seat.culprit() == 1
    error = seat.watcher.verdict(0)
    assert isinstance(error, PeerLost)
    assert error.host == "host1"
    assert "rank 1 (host1, pid 4711) died" in str(error)
    seat.watcher.close()
    assert "syncline: rank 0 (host0" in capfd.readouterr().err  # although no call has raised it


def test_a_goodbye_is_no_failure(table: Table) -> None:
    one, other = table.group(2)
    other.watcher.goodbye()
    other.watcher.close()
    assert one.left.wait(LIMIT_S)
    one.watcher.close()  # reads what there is to the end
    assert one.watcher.left == {1}
    assert one.watcher.failure is None
    assert not one.failures


def test_everybody_names_the_first_culprit(table: Table) -> None:
    """Only rank 3 sees rank 4 die; the others learn of rank 4, and nobody blames a messenger that leaves."""
    members = [member(index) for index in range(5)]
    socks: list[dict[int, socket.socket]] = [{} for _ in range(5)]
    for low, high in ((0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3), (3, 4)):
        socks[low][high], socks[high][low] = socket.socketpair()
    seats = [table.seat(index, members, socks[index], LIMIT_S) for index in range(4)]
    socks[4][3].close()
    assert [seat.culprit() for seat in seats] == [4, 4, 4, 4]
    seats[3].watcher.close()
    for seat in seats[:3]:
        assert len(seat.failures) == 1
        assert "rank 4 (host4" in str(seat.watcher.failure)


def test_an_abort_carries_reason_and_culprit(table: Table) -> None:
    seats = table.group(3)
    seats[2].watcher.abort("failed: ValueError: the data are wrong")
    for seat in seats[:2]:
        assert seat.culprit() == 2
        assert "failed: ValueError: the data are wrong" in str(seat.watcher.failure)
    assert seats[2].watcher.failure is None  # its own news come back to it in vain


def test_who_has_told_of_its_own_failure_blames_nobody_who_ends_because_of_it(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has to end all the same: its script may not come back."""
    ended, insists = [], threading.Event()
    monkeypatch.setattr(watch, "GRACE_S", 0.0)
    monkeypatch.setattr(watch.Watcher, "_end", lambda _, text: [ended.append(text), insists.set()])
    seat, there = table.beside(member(1))
    seat.watcher._came_back.clear()
    seat.watcher.abort("failed: ValueError: the data are wrong")
    there.close()
    assert insists.wait(LIMIT_S)
    assert seat.watcher.failure is None
    assert not seat.failures
    assert "after the failure of this process" in ended[0]


def test_the_accused_learns_of_it(table: Table) -> None:
    seats = table.group(3)
    seats[0].watcher.abort("was late", culprit=1)
    assert [seats[1].culprit(), seats[2].culprit()] == [1, 1]
    assert str(seats[1].watcher.failure).startswith("this process, rank 1")


def test_long_reasons_are_cut(table: Table) -> None:
    one, other = table.group(2)
    other.watcher.abort("\u00e9" * 100_000)
    assert one.culprit() == 1
    assert str(one.watcher.failure).endswith("\u00e9" * 2000)


def test_names_and_reasons_that_cannot_be_encoded_are_spelled_out(
    table: Table, capfd: pytest.CaptureFixture[str]
) -> None:
    """Names of files are bytes: Python gives those that are no text as halves of characters."""
    one, other, third = table.group(3, host="caf\udce9")
    one.watcher.abort("failed: ValueError: cannot read caf\udce9.jpg")
    for seat in (other, third):
        assert seat.culprit() == 0
        assert str(seat.failures[0]).endswith("cannot read caf\\udce9.jpg")
        seat.watcher.close()
    said = capfd.readouterr().err
    assert "rank 0 (caf\\udce90, pid" in said
    assert said.count("cannot read caf\\udce9.jpg") == 1


def test_who_has_to_know_of_a_failure_does_before_it_is_printed(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may be reading what is printed."""
    read = threading.Event()
    monkeypatch.setattr(watch, "say", lambda _: read.wait(LIMIT_S))
    seat, there = table.beside(member(1))
    there.shutdown(socket.SHUT_WR)
    assert seat.failed.wait(LIMIT_S / 2)
    assert there.recv(4)[0] == 3
    read.set()


@pytest.mark.parametrize("said", [b"", struct.pack("<BxH", 2, 0)], ids=["nothing", "goodbye"])
def test_who_dies_while_this_process_ends_is_found(table: Table, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(watch, "_LINGER_S", LIMIT_S)
    seat, there = table.beside(member(1))
    closer = threading.Thread(target=seat.watcher.close)
    closer.start()
    assert there.recv(4) == b""  # it ends
    there.sendall(said)
    there.close()
    closer.join(LIMIT_S)
    failure = seat.watcher.failure
    assert failure is None if said else failure is not None and failure.rank == 1


def test_who_waits_for_the_last_words_sleeps_meanwhile(table: Table) -> None:
    seat, there = table.beside(member(1))
    select, turns = seat.watcher._selector.select, list[float]()
    seat.watcher._selector.select = lambda timeout: turns.append(timeout) or select(timeout)  # type: ignore
    closer = threading.Thread(target=seat.watcher.close)
    closer.start()
    assert there.recv(4) == b""  # it ends
    closer.join(LIMIT_S)
    assert len(turns) < 10


def test_nothing_is_left_behind() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    files, threads = open_files(), threading.active_count()
    table = Table()
    seats = table.group(3)
    for seat in seats:
        seat.watcher.goodbye()
    closers = [threading.Thread(target=seat.watcher.close) for seat in seats]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(LIMIT_S)
    assert open_files() == files
    assert threading.active_count() == threads
