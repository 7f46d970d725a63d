"""Watchers of a group: heartbeats, which process failed first, questions, and malformed messages."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from watching import ANSWER, BEATS_S, LIMIT_S, QUESTION, RESTS, SHORT_S, Seat, Table, member, numbered

from syncline.errors import PeerLost
from syncline.wire import watch
from syncline.wire.culprit import ANSWER_BYTES, Answer, pack
from syncline.wire.watch import Heartbeats


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


def test_a_process_without_memory_for_another_thread_ends_all_the_same(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, insists = [], threading.Event()
    monkeypatch.setattr(watch, "GRACE_S", 0.0)
    monkeypatch.setattr(watch.Watcher, "_end", lambda _, text: [ended.append(text), insists.set()])
    seat, there = table.beside(member(1), liveness_s=SHORT_S)
    seat.watcher._came_back.clear()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        there.close()
        assert insists.wait(LIMIT_S)
    assert "after the failure of rank 1" in ended[0]


def test_a_thread_that_cannot_handle_its_own_fault_ends_the_process() -> None:
    lines = (
        "import os, threading, time",
        "from syncline.wire.reports import needed",
        "def run():",
        "    raise MemoryError('of a thread')",
        "threading.Thread(target=needed(run), daemon=True).start()",
        "time.sleep(60)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1
    assert b"MemoryError: of a thread" in done.stderr
    assert b"can neither go on nor handle its failure" in done.stderr


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


BEATING_LIMIT_S = 20.0
FRAME = b"beat"
POLLFD = struct.Struct("=ihh")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    here.setblocking(False)
    there.settimeout(BEATING_LIMIT_S)
    with here, there:
        yield here, there


def test_they_come_while_another_thread_holds_the_interpreter_lock(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    beats = Heartbeats({1: here}, FRAME, 0.01)
    beats.start()
    held = ctypes.PyDLL(None)  # calls without giving the lock away
    descriptor = ctypes.create_string_buffer(POLLFD.pack(there.fileno(), select.POLLIN, 0))
    for _ in range(3):
        while select.select([there], [], [], 0)[0]:
            there.recv(4096)
        assert held.poll(descriptor, 1, int(BEATING_LIMIT_S * 1000)) == 1
    beats.end()


def test_the_first_comes_at_once_and_none_after_the_end(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    beats = Heartbeats({1: here}, FRAME, 1000 * BEATING_LIMIT_S)
    beats.start()
    assert there.recv(100) == FRAME
    assert beats.end() == {}
    assert beats.end() == {}
    here.close()
    assert there.recv(100) == b""


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_what_has_begun_is_handed_over(pair: tuple[socket.socket, socket.socket], taken: int) -> None:
    """A socket may take a part of a frame; whoever writes next has to begin with the rest."""
    beats = Heartbeats({1: pair[0], 2: pair[1]}, FRAME, 1.0)
    beats._begun[:] = taken, 0
    assert beats.end() == {1: FRAME[taken:]}


def test_a_rest_goes_before_the_next_beat(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    beats = Heartbeats({1: here}, FRAME, 1000 * BEATING_LIMIT_S)
    beats._begun[0] = 3
    beats.start()
    assert there.recv(100) == FRAME[3:]
    assert beats.end() == {}


def test_a_peer_that_takes_nothing_holds_nobody_up(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    full, unread = socket.socketpair()
    full.setblocking(False)
    with full, unread:
        while select.select([], [full], [], 0)[1]:
            full.send(bytes(1 << 16))
        beats = Heartbeats({1: full, 2: here}, FRAME, 0.01)
        beats.start()
        for _ in range(3):
            assert there.recv(4) == FRAME
        assert beats.end() == {}


def test_heartbeats_leave_nothing_behind(pair: tuple[socket.socket, socket.socket]) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    beats = Heartbeats({1: pair[0]}, FRAME, 1.0)
    beats.start()
    beats.end()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


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


def test_frames_may_come_in_pieces(table: Table) -> None:
    seat, there = table.beside(member(1))
    text = struct.pack("<I", 1) + b"in pieces"
    for byte in struct.pack("<BxH", 3, len(text)) + text:
        there.sendall(bytes([byte]))
    assert seat.culprit() == 1
    assert "in pieces" in str(seat.watcher.failure)


@pytest.mark.parametrize(
    "said",
    [
        numbered(ANSWER, 1, pack(RESTS) + b"\0"),
        numbered(ANSWER, 1, pack(RESTS) + struct.pack("<IB", 2, 0)),
        numbered(ANSWER, 1, pack(RESTS) + struct.pack("<IB", 0, 9)),
        numbered(ANSWER, 2, pack(RESTS)),
        numbered(ANSWER, 1, pack(RESTS)) * 2,
    ],
    ids=["cut off", "no such rank", "a cut label", "to another question", "twice"],
)
def test_a_nonsensical_answer_is_the_fault_of_who_gives_it(table: Table, said: bytes) -> None:
    seat, there = table.beside(member(1))
    asker = threading.Thread(target=seat.watcher.ask, args=(1,))
    asker.start()
    assert there.recv(8) == numbered(QUESTION, 1)
    there.sendall(said)
    assert seat.culprit() == 1
    assert "broke the protocol" in str(seat.failures[0])
    asker.join(LIMIT_S)


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("<BxH", 3, 0),
        struct.pack("<BxH", 3, 3) + b"abc",
        struct.pack("<BxHI", 3, 4, 2),
        struct.pack("<BxHI", 3, 4, 2**32 - 1),
        struct.pack("<BxH", 3, 65535) + bytes(65535),
        struct.pack("<BxH", 2, 1) + b"x",
        struct.pack("<BxH", 1, 65535) + bytes(65535),
        struct.pack("<BxH", 0, 0),
        struct.pack("<BxH", 200, 9) + b"whatever!",
        struct.pack("<BxH", QUESTION, 0),
        numbered(QUESTION, 2),
        numbered(QUESTION, 1) * 2,
        struct.pack("<BxH", ANSWER, 0),
        numbered(ANSWER, 0, pack(RESTS)),
        numbered(ANSWER, 1, pack(RESTS)),
        numbered(ANSWER, 1, bytes(ANSWER_BYTES.stop)),
    ],
    ids=lambda said: f"{said[0]}-{len(said)}",
)
def test_nonsense_is_the_fault_of_who_says_it(table: Table, said: bytes) -> None:
    seat, there = table.beside(member(1))
    there.sendall(said)
    assert seat.culprit() == 1
    assert "rank 1 (host1" in str(seat.failures[0])
    assert "broke the protocol: a control message of kind" in str(seat.failures[0])


def test_what_a_terminal_would_act_on_is_not_printed(table: Table, capfd: pytest.CaptureFixture[str]) -> None:
    seat, there = table.beside(member(1))
    reason = b"failed: \x1b[2J\x07 line\nline"
    there.sendall(struct.pack("<BxHI", 3, 4 + len(reason), 1) + reason)
    assert seat.culprit() == 1
    seat.watcher.close()
    assert "\x1b" not in str(seat.failures[0])
    assert "\x1b" not in capfd.readouterr().err
    assert str(seat.failures[0]).endswith(" line\nline")
