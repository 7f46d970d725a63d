"""Workers of another launcher in an elastic run: who gets in, what is passed on, and every end."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from test_relay import BEGUN, LIMIT_S, TALK

from syncline.errors import GroupError, ProtocolError, SecretError, UsageError
from syncline.launch import joining
from syncline.launch.joining import FRAME_BYTES, Frames, Guest, Link, Reception, in_frame
from syncline.launch.local import LocalRun, Outcome
from syncline.launch.relay import Name, Relay
from syncline.version import __version__
from syncline.wire.listener import dial

SECRET = "of the run"
WAITS = "import time\nwhile True: hear()\n"


GUESTS: list[Guest] = []
"""They are closed after each test."""


def command(script: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", TALK + BEGUN + script]


@contextmanager
def received(tls: str | None = None) -> Iterator[Relay]:
    """The relay of a run of one process, which may become four."""
    found = Relay(1, 1, 4)
    found.reception = Reception(found, SECRET, "127.0.0.1", tls=tls)
    found.shared = {"SYNCLINE_SECRET": SECRET}
    yield found
    found.close()
    while GUESTS:
        GUESTS.pop().close()


@pytest.fixture
def relay() -> Iterator[Relay]:
    with received() as found:
        yield found


def place(relay: Relay) -> str:
    assert isinstance(relay.reception, Reception)
    return relay.reception.place


def asked(relay: Relay, first: LocalRun, workers: int = 1, **more: Any) -> Guest:
    """What a launcher gets that asks to join, while the other one is served."""
    with serving(first):
        GUESTS.append(Guest.ask(place(relay), workers, **{"secret": SECRET, **more}))
    return GUESTS[-1]


@contextmanager
def serving(run: LocalRun) -> Iterator[None]:
    """Serve a run in a thread meanwhile. Its processes are started already."""
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            run.poll(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def both(first: LocalRun, second: LocalRun) -> tuple[Outcome, Outcome]:
    """Serve two runs to their ends."""
    limit_s, outcomes = time.monotonic() + LIMIT_S, dict[LocalRun, Outcome]()
    while len(outcomes) < 2:
        assert time.monotonic() < limit_s
        for run in (first, second):
            if run not in outcomes and (outcome := run.poll(0.01)) is not None:
                outcomes[run] = outcome
    return outcomes[first], outcomes[second]


def until(true: Callable[[], bool], *runs: LocalRun) -> None:
    """Serve runs until something holds."""
    limit_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < limit_s
        for run in runs:
            run.poll(0.01)


def test_packets_reach_workers_of_another_launcher_and_theirs_the_members(relay: Relay) -> None:
    first = "assert hear() == {'from': 2, 'message': ['Join']}; send(view=2, members=[0, 1, 2])\n"
    first += "send(to=1, message=[3]); assert hear() == {'ended': 1}; assert hear() == {'done': 2}\n"
    script = "if rank == 1: assert hear() == {'from': 0, 'message': [3]}; sys.exit(7)\n"
    script += "send(join=['Join']); assert hear() == {'ended': 1}; send(done=1)\n"
    script += "assert [os.environ[n] for n in ('WORLD_SIZE', 'RANK', 'SYNCLINE_SECRET')] == ['1', '0', 'of the run']\n"
    script += "assert os.environ['SYNCLINE_STRATEGY'] == 'tree'; print(os.environ['SYNCLINE_RUN_ID'])"
    lines: list[tuple[int, str]] = []
    with LocalRun(command(first), 1, relay=relay, env={"SYNCLINE_STRATEGY": "tree"}) as run:
        guest = asked(relay, run, 2)
        assert guest.numbers == (1, 2)
        with LocalRun(command(script), 2, relay=guest, on_output=lambda *line: lines.append(line)) as joined:
            ends = both(run, joined)
        assert lines == [(2, run._shared["SYNCLINE_RUN_ID"])]
    assert [end.status for end in ends] == [0, 0], ends
    assert ends[1].text == "worker 1 ended with status 7"


def test_a_run_goes_on_with_workers_of_other_launchers_alone(relay: Relay) -> None:
    """Its launcher waits for them, and has their status."""
    first = "assert hear(); send(view=2, members=[0, 1, 2]); sys.exit(5)"
    script = "send(join=[rank]) if rank == 1 else None\nassert hear() == {'ended': 0}\nsend(view=3, members=[1, 2])\n"
    script += "time = __import__('time'); time.sleep(0.3)\n"
    relay._next_s = float("inf")  # no replacement is due meanwhile
    with LocalRun(command(first), 1, relay=relay, grace_s=0.1) as run:
        guest = asked(relay, run, 2)
        with LocalRun(command(script), 2, relay=guest) as joined:
            ends = both(run, joined)
    assert [end.status for end in ends] == [0, 0], ends


def test_another_secret_is_refused_and_the_run_goes_on(relay: Relay) -> None:
    with LocalRun(command(WAITS), 1, relay=relay) as run:
        with pytest.raises(SecretError, match=r"has another secret: set SYNCLINE_SECRET to that of its run"):
            asked(relay, run, secret="of another run")
        assert run.poll() is None
        assert relay.members == {0}


@pytest.mark.parametrize("where", ["host", ":1", "host:", "host:x", "host:0", "host:65536", "host:" + "9" * 5000, ""])
def test_an_address_that_is_none_is_refused(where: str) -> None:
    with pytest.raises(UsageError, match=r"^--join .* is not HOST:PORT"):
        Guest.ask(where, 1, SECRET)


def test_nobody_at_the_address_is_an_error_with_a_remedy() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(GroupError, match=r"no launcher can be reached at .*refused.*does its run still go on"):
            Guest.ask(f"127.0.0.1:{free.getsockname()[1]}", 1, SECRET, timeout_s=1.0)


def test_no_more_workers_join_than_the_most(relay: Relay, capfd: pytest.CaptureFixture[str]) -> None:
    with LocalRun(command(WAITS), 1, relay=relay) as run:
        why = r"it has 1 of at most 4 workers: ask for 3 at most \(-n\), or start the run with --elastic 1:5"
        with pytest.raises(GroupError, match=why):
            asked(relay, run, 4)
        assert "refused 4 workers of the launcher at 127.0.0.1:" in capfd.readouterr().err
        full = asked(relay, run, 3)
        with pytest.raises(GroupError, match="it has 4 of at most 4 workers: start the run with --elastic 1:5"):
            asked(relay, run)
        full.close()
        until(lambda: not relay.away, run)
        assert asked(relay, run).numbers == (4,)  # nobody gets a number again


def test_nobody_joins_a_run_that_is_over_or_writes_a_timeline(relay: Relay) -> None:
    with LocalRun(command(WAITS), 1, relay=relay) as run:
        relay.obey(0, {"done": 1})
        with pytest.raises(GroupError, match="its training has ended"):
            asked(relay, run)
        assert isinstance(relay.reception, Reception)
        relay.reception._refuses = "it writes a timeline"
        with pytest.raises(GroupError, match=r"does not let these workers join: it writes a timeline"):
            asked(relay, run)


@contextmanager
def tapped(where: str, seen: list[bytes]) -> Iterator[str]:
    """An address that leads to another one. All bytes of the first connection through it are ``seen``."""
    host, _, port = where.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection((host, int(port))) as there:

        def carry(source: socket.socket, target: socket.socket) -> None:
            with suppress(OSError):
                while data := source.recv(1 << 16):
                    seen.append(data)
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        def serve() -> None:
            with door.accept()[0] as here:
                back = threading.Thread(target=carry, args=(there, here))
                back.start()
                carry(here, there)
                back.join()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{door.getsockname()[1]}"
        there.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("tls", [None, "on"])
def test_with_tls_nobody_on_the_way_reads_what_launchers_say(tls: str | None) -> None:
    pytest.importorskip("cryptography")
    first = "assert hear() == {'from': 1, 'message': 'legible'}; send(to=1, message='answered'); assert hear()"
    script = "send(join='legible'); assert hear() == {'from': 0, 'message': 'answered'}"
    seen: list[bytes] = []
    with received(tls) as relay, LocalRun(command(first), 1, relay=relay, env={"SYNCLINE_STRATEGY": "tree"}) as run:
        relay._next_s = float("inf")  # no replacement is due meanwhile
        with tapped(place(relay), seen) as between:
            with serving(run):
                guest = Guest.ask(between, 1, SECRET, tls)
            with LocalRun(command(script), 1, relay=guest) as joined:
                ends = both(run, joined)
            guest.close()
        assert [end.status for end in ends] == [0, 0], ends
        said = b"".join(seen)
        words = [b"legible", b"answered", b"tree", run._shared["SYNCLINE_RUN_ID"].encode()]
        assert [word in said for word in words] == [tls is None] * len(words)
        assert SECRET.encode() not in said


@pytest.mark.parametrize(("tls", "other"), [(None, "on"), ("on", None)])
def test_launchers_with_and_without_tls_do_not_meet(tls: str | None, other: str | None) -> None:
    pytest.importorskip("cryptography")
    its, own = ("without", "with") if other else ("with", "without")
    why = f"does not let this one in: it runs {its} TLS, but this process {own} TLS: give all the same --tls"
    with received(tls) as relay, LocalRun(command(WAITS), 1, relay=relay) as run:
        with pytest.raises(GroupError, match=why):
            asked(relay, run, tls=other)
        assert run.poll() is None


def called(relay: Relay) -> socket.socket:
    """The connection of a launcher that has proved the secret."""
    host, _, port = place(relay).rpartition(":")
    return dial((host, int(port)), joining._ANY_RUN, SECRET.encode(), 0, 0, "join", LIMIT_S)


def test_another_version_is_refused_by_name(relay: Relay) -> None:
    with LocalRun(command(WAITS), 1, relay=relay) as run, called(relay) as sock:
        sock.sendall(in_frame({"workers": 1, "version": "0.1"}))
        with serving(run):
            answer = Link(sock, "the run").wait(LIMIT_S)
    assert answer == {"refused": f"this run has version {__version__} of Syncline, and the launcher that joins has 0.1"}
    assert relay._fresh == 1


HELLO = {"workers": 2, "version": __version__}
STRANGE = [
    struct.pack("!I", FRAME_BYTES + 1), struct.pack("!I", 3) + b"[1]", struct.pack("!I", 2) + b"{]",
    struct.pack("!I", 60_000) + b"[" * 60_000, in_frame({}), in_frame({"workers": 0, "version": __version__}),
    in_frame({"workers": "2", "version": __version__}), in_frame(HELLO) * 2,
    in_frame(HELLO) + in_frame({"from": 1}) + in_frame({"nothing": 1}),
]  # fmt: skip


@pytest.mark.parametrize("data", STRANGE)
def test_a_launcher_that_sends_nonsense_is_cut_off_and_its_workers_are_lost(relay: Relay, data: bytes) -> None:
    with LocalRun(command(WAITS), 1, relay=relay) as run, called(relay) as sock:
        sock.sendall(data)
        with serving(run):
            sock.settimeout(LIMIT_S)
            with suppress(ConnectionResetError):
                while sock.recv(1 << 16):
                    pass
        assert not relay.away
        assert run.poll() is None
        assert len(run._selector.get_map()) == 4  # the bells of the run and the reception, a process and its line


def test_nobody_speaks_for_workers_of_another_launcher(relay: Relay) -> None:
    with LocalRun(command(WAITS), 1, relay=relay) as run, called(relay) as sock:
        guest = asked(relay, run)
        sock.sendall(in_frame(HELLO) + b"".join(map(in_frame, (
            {"ended": 1, "status": 0}, {"ended": 0, "status": 0}, {"from": 1, "packet": {"done": 1}},
            {"from": 0, "packet": {"view": 9, "members": [1]}}, {"from": 3, "packet": {"begun": 1}},
            {"ended": 2, "status": 3},
        ))))  # fmt: skip
        until(lambda: relay.away == 2, run)
        assert relay.members == {0}
        assert relay.refusal(1) == ""
        assert relay._ended == {2: 3}
        guest.close()
        until(lambda: relay.away == 1, run)


def test_the_loss_of_a_launcher_is_that_of_its_workers(relay: Relay, capfd: pytest.CaptureFixture[str]) -> None:
    first = "assert hear() == {'from': 1, 'message': 'x'}; send(view=2, members=[0, 1, 2])\n"
    first += "assert [hear(), hear()] == [{'ended': 1}, {'ended': 2}]; send(view=3, members=[0])"
    relay._next_s = float("inf")
    with LocalRun(command(first), 1, relay=relay) as run:
        guest = asked(relay, run, 2)
        guest._link.send({"from": 1, "packet": {"join": "x"}})
        until(lambda: relay.members == {0, 1, 2}, run)
        guest.close()
        assert run.wait(LIMIT_S).status == 0
    assert "with workers 1, 2: its connection has ended" in capfd.readouterr().err


@pytest.mark.parametrize("tls", [None, "on"])
def test_a_launcher_that_is_killed_takes_nobody_along(tls: str | None) -> None:
    """What the run sends meanwhile goes nowhere, and ends nothing."""
    pytest.importorskip("cryptography")
    with received(tls) as relay, LocalRun(command(WAITS), 1, relay=relay) as run:
        guest = asked(relay, run, tls=tls)
        guest._link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        socket.socket.close(guest._link._sock)  # with a reset
        assert isinstance(relay.reception, Reception)
        (link,) = relay.reception._guests
        for _ in range(2):
            link.send({"ended": 0})
        until(lambda: not relay.away, run)
        assert run.poll() is None


def test_a_launcher_whose_run_is_lost_says_so_and_ends_its_workers(
    relay: Relay, capfd: pytest.CaptureFixture[str]
) -> None:
    with LocalRun(command(WAITS), 1, relay=relay) as run:
        guest = asked(relay, run)
        with LocalRun(command(WAITS), 1, relay=guest, stop_s=0.5) as joined:
            assert isinstance(relay.reception, Reception)
            for link in relay.reception._guests:  # as if its process was killed
                link._sock.shutdown(socket.SHUT_RDWR)
            outcome = joined.wait(LIMIT_S)
    assert outcome.status == 1
    said = capfd.readouterr().err
    assert f"syncline: the launcher at {place(relay)}, whose run these workers have joined, has ended or cannot" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_of_the_run_ends_the_workers_that_have_joined(relay: Relay, tmp_path: Path, number: int) -> None:
    waits = "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    waits += f"open(os.path.join({str(tmp_path)!r}, str(os.getpid())), 'w')\nsignal.pause()"
    with LocalRun(command(waits), 1, relay=relay) as run:
        guest = asked(relay, run, 2)
        with LocalRun(command(waits), 2, relay=guest) as joined:
            until(lambda: len(list(tmp_path.iterdir())) == 3, run, joined)
            run.stop(number)
            ends = both(run, joined)
    assert [end.status for end in ends] == [128 + number] * 2
    assert [ending.status for ending in ends[1].endings] == [128 + number] * 2


def test_an_interrupt_of_both_launchers_leaves_workers_the_time_to_end(relay: Relay, tmp_path: Path) -> None:
    """As batch systems do: the second word, of the first launcher, kills nobody."""
    ends = "def end(*_):\n    import time; time.sleep(0.5); sys.exit(5)\n"
    waits = f"{ends}signal.signal(signal.SIGTERM, end)\nsend(join='x')\nwhile True: signal.pause()"
    heard = tmp_path / "heard"
    with LocalRun(command(f"hear(); open({str(heard)!r}, 'w'); signal.pause()"), 1, relay=relay) as run:
        guest = asked(relay, run)
        with LocalRun(command(waits), 1, relay=guest) as joined:
            until(heard.exists, run, joined)
            joined.stop(signal.SIGTERM)
            run.stop(signal.SIGTERM)
            _, outcome = both(run, joined)
    assert [ending.status for ending in outcome.endings] == [5]


def test_nonsense_of_a_worker_costs_its_launcher_nothing(relay: Relay) -> None:
    """A packet that is longer in a frame, and one that is too deep, are left out; the next one is passed on."""
    first = "assert hear() == {'from': 1, 'message': 'x'}\nassert hear() == {'ended': 1}"
    script = "line.send(('{\"a\": \"' + 'é' * 30000 + '\"}').encode())\n"
    script += "line.send(b'{\"a\": ' + b'[' * 30000 + b']' * 30000 + b'}')\n"
    script += "line.send(b'{\"a\": [' + b','.join([b'1e9'] * 12000) + b']}')\nsend(join='x')"
    relay._next_s = float("inf")
    with LocalRun(command(first), 1, relay=relay) as run:
        guest = asked(relay, run)
        with LocalRun(command(script), 1, relay=guest) as joined:
            ends = both(run, joined)
    assert [end.status for end in ends] == [0, 0]


@contextmanager
def linked() -> Iterator[tuple[Link, socket.socket]]:
    """A link, and the other end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as there:
        link = Link(door.accept()[0], "there")
        yield link, there
        link.close()


def test_frames_behind_the_answer_are_heard() -> None:
    with selectors.DefaultSelector() as selector, linked() as (link, there):
        there.sendall(in_frame({"numbers": [1]}) + in_frame({"stop": 15}) + in_frame({"over": True}))
        assert link.wait(LIMIT_S) == {"numbers": [1]}
        heard: list[Any] = []
        link.attach(selector, heard.append, heard.append)
        assert heard == [{"stop": 15}, {"over": True}]


def test_an_end_that_sends_without_a_pause_does_not_hold_the_loop() -> None:
    frame, over = in_frame({"over": True}), threading.Event()

    def flood() -> None:
        with suppress(OSError):
            while not over.is_set():
                there.sendall(frame * 10_000)

    with selectors.DefaultSelector() as selector, linked() as (link, there):
        heard: list[Any] = []
        link.attach(selector, heard.append, heard.append)
        thread = threading.Thread(target=flood, daemon=True)
        thread.start()
        assert selector.select(LIMIT_S)
        link._turn(selectors.EVENT_READ)
        assert 0 < len(heard) <= FRAME_BYTES // len(frame) + 1
        over.set()
        link.close()
        thread.join(LIMIT_S)


def test_an_interrupt_where_workers_have_joined_ends_these_only(relay: Relay) -> None:
    first = "assert hear() == {'ended': 1}"
    with LocalRun(command(first), 1, relay=relay) as run:
        guest = asked(relay, run)
        with LocalRun(command("signal.pause()"), 1, relay=guest) as joined:
            joined.stop(signal.SIGTERM)
            ends = both(run, joined)
    assert [end.status for end in ends] == [0, 143]


def test_who_has_joined_without_becoming_a_member_is_ended_with_the_run(relay: Relay) -> None:
    with LocalRun(command("hear()"), 1, relay=relay) as run:
        guest = asked(relay, run)
        relay.send(0, {"go": 1})
        with LocalRun(command("signal.pause()"), 1, relay=guest) as joined:
            ends = both(run, joined)
    assert ends[0].status == 0
    assert ends[1].status == 143


def test_a_reception_keeps_few_callers_that_ask_for_nothing(relay: Relay) -> None:
    with LocalRun(command(WAITS), 1, relay=relay) as run, ExitStack() as stack:
        socks = [stack.enter_context(called(relay)) for _ in range(joining._UNDECIDED + 4)]
        assert isinstance(relay.reception, Reception)
        reception = relay.reception
        most = joining._UNDECIDED
        until(lambda: len(select.select(socks, [], [], 0)[0]) == 4 and len(reception._guests) == most, run)
        assert asked(relay, run).numbers == (1,)


def test_a_launcher_that_takes_nothing_is_cut_off(relay: Relay) -> None:
    with LocalRun(command(WAITS), 1, relay=relay) as run, called(relay) as sock:
        sock.sendall(in_frame(HELLO))
        until(lambda: relay.away == 2, run)
        while relay.away:
            relay.obey(0, {"to": 1, "message": "x" * 60_000})
            run.poll()


def test_frames_come_whole_however_they_are_cut() -> None:
    said = [{"from": 1, "packet": {"message": "é" * 400}}, {}, {"over": True}]
    data = b"".join(map(in_frame, said))
    for size in (1, 3, 100, len(data)):
        frames = Frames()
        assert [one for at in range(0, len(data), size) for one in frames.feed(data[at : at + size])] == said


def test_the_largest_packet_fits_a_frame() -> None:
    """One byte more than a frame may have does not."""
    packet = {"message": "\0" * ((1 << 16) // 6 - 8)}
    assert Frames().feed(in_frame({"from": (1 << 31) - 1, "packet": packet}))
    full = json.dumps({"m": ""})
    assert Frames().feed(in_frame({"m": "x" * (FRAME_BYTES - len(full))}))
    with pytest.raises(ProtocolError, match=f"a frame of {FRAME_BYTES + 1} bytes: at most {FRAME_BYTES}"):
        Frames().feed(in_frame({"m": "x" * (FRAME_BYTES + 1 - len(full))}))


LIMITS = {"processes": 1, "least": 1, "most": 2, "servers": 0}


@pytest.mark.parametrize(
    "answer",
    [
        {}, {"numbers": [1, 2], "run": "r", "told": {}, **LIMITS},
        {"numbers": [1.0], "run": "r", "told": {}, **LIMITS},
        {"numbers": [1], "run": "r", "told": {"LD_PRELOAD": "x"}, **LIMITS},
        {"numbers": [1], "run": "r", "told": {"SYNCLINE_STRATEGY": 1}, **LIMITS},
        {"numbers": [1, 1], "run": "r", "told": {}, **LIMITS},
        {"numbers": [-1], "run": "r", "told": {}, **LIMITS},
    ],
)  # fmt: skip
def test_an_answer_that_no_launcher_gives_is_refused(answer: dict[str, Any]) -> None:
    """In particular it sets no other variables of the workers than those in which all agree."""
    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        socket.create_connection(door.getsockname()) as here,
        pytest.raises(ProtocolError, match="gives an answer of no known form"),
    ):
        Guest(Link(here, "there"), answer, 2 if answer.get("numbers") == [1, 1] else 1, SECRET)


@pytest.mark.parametrize("text", ["1@host:2", "0@::1:40000", "123456789@a.b:65535"])
def test_names_say_number_and_place(text: str) -> None:
    name = Name.read(text)
    assert str(name) == text


@pytest.mark.parametrize(
    "text", ["", "1", "1@", "@h:1", "1@h", "x@h:1", "-1@h:1", "1@h:x", "1@a@b:1", "1@a b:1", "1" * 10 + "@h:1", "١@h:1",
             "1@" + "h" * 301 + ":1"]
)  # fmt: skip
def test_other_names_are_none(text: str) -> None:
    assert Name.read(text) is None


def test_descriptors_are_free_after_joins(relay: Relay) -> None:
    with LocalRun(command(WAITS), 1, relay=relay) as run:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        for _ in range(20):
            asked(relay, run, 2).close()
            until(lambda: not relay.away, run)
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
        assert len(relay._ended) <= 64
