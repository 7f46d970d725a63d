"""Local runs with real processes: environment, output, and every way to end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from syncline.errors import UsageError
from syncline.launch.local import Ending, LocalRun, Outcome, Placement, launch
from syncline.wire.listener import bind_here

LIMIT_S = 30.0
FOREVER = "import signal; signal.pause()"
DEAF = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print('deaf', flush=True); signal.pause()"


class Lines:
    """What the processes print."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def __call__(self, rank: int, line: str) -> None:
        self.seen.append((rank, line))


def python(script: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", script]


def until(run: LocalRun, lines: Lines, count: int) -> None:
    """Go on until so many lines have come."""
    deadline = time.monotonic() + LIMIT_S
    while len(lines.seen) < count:
        assert time.monotonic() < deadline
        assert run.poll(1.0) is None, lines.seen


def gone(pid: int) -> bool:
    """Wait until the process has ended, which need not be our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], LIMIT_S)[0])
    finally:
        os.close(fd)


def test_each_process_is_told_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of an outer run")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    lines = Lines()
    names = ["SYNCLINE_PROCESS", "SYNCLINE_PROCESSES", "MASTER_ADDR", "SYNCLINE_SERVERS"]
    names += ["SYNCLINE_LAUNCHER", "OMP_NUM_THREADS", "EXTRA", "TORCHELASTIC_RUN_ID"]
    show = f"import os; print([os.environ.get(name) for name in {names}], len(os.environ['SYNCLINE_SECRET']))"
    outcome = launch(python(show), 3, servers=1, env={"EXTRA": "x"}, on_output=lines)
    assert outcome.status == 0
    assert outcome.text == "all processes ended with status 0"
    me = str(os.getpid())
    expected = [(rank, f"{[str(rank), '3', '127.0.0.1', '1', me, '1', 'x', None]} 64") for rank in range(3)]
    assert sorted(lines.seen) == expected


def test_scripts_see_a_world_of_workers() -> None:
    """A server sees the last worker's place, and no port for a group of which it would be one too many."""
    lines = Lines()
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    show = f"import os; print(*map(os.environ.get, {names}), os.environ['MASTER_PORT'].isdigit())"
    assert launch(python(show), 4, servers=2, on_output=lines).status == 0
    assert sorted(lines.seen) == [
        (0, "0 2 0 2 True"),
        (1, "1 2 1 2 True"),
        (2, "1 2 1 2 False"),
        (3, "1 2 1 2 False"),
    ]


def test_the_command_line_of_the_machine_decides_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    lines = Lines()
    launch(python("import os; print(os.environ['OMP_NUM_THREADS'])"), 1, on_output=lines)
    assert lines.seen == [(0, "7")]


def test_rank_zero_gets_the_listening_socket_and_no_other() -> None:
    lines = Lines()
    script = (
        "import os, socket\n"
        "fd, port = os.environ.get('SYNCLINE_MEETING_FD'), int(os.environ['SYNCLINE_MEETING_PORT'])\n"
        "if os.environ['SYNCLINE_PROCESS'] == '0':\n"
        "    server = socket.socket(fileno=int(fd))\n"
        "    assert server.getsockname() == ('127.0.0.1', port)\n"
        "    print(server.accept()[0].recv(9).decode())\n"
        "else:\n"
        "    assert fd is None\n"
        "    socket.create_connection(('127.0.0.1', port)).sendall(b'well met!')\n"
    )
    assert launch(python(script), 2, on_output=lines, timeout_s=LIMIT_S).status == 0
    assert lines.seen == [(0, "well met!")]


def test_rank_zero_may_listen_again_on_the_port_of_the_meeting() -> None:
    """A later start meets at the same port, which nobody else has been given meanwhile."""
    lines = Lines()
    script = (
        "import os, socket, time\n"
        "if os.environ['SYNCLINE_PROCESS'] != '0': raise SystemExit\n"
        "socket.socket(fileno=int(os.environ['SYNCLINE_MEETING_FD'])).close()\n"
        "place = os.environ['MASTER_ADDR'], int(os.environ['SYNCLINE_MEETING_PORT'])\n"
        "limit = time.monotonic() + 20\n"
        "while True:\n"
        "    try:\n"
        "        with socket.socket() as server:\n"
        "            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "            server.bind(place)\n"
        "            server.listen()\n"
        "            break\n"
        "    except OSError:  # the launcher has the first one's socket until it has started the others\n"
        "        if time.monotonic() > limit: raise\n"
        "        time.sleep(0.01)\n"
        "print('listens')\n"
    )
    assert launch(python(script), 2, on_output=lines).status == 0
    assert lines.seen == [(0, "listens")]


def test_one_process_alone_gets_no_listening_socket() -> None:
    """It meets nobody, so it would keep it, and give it to its children."""
    lines = Lines()
    assert launch(python("import os; print('SYNCLINE_MEETING_FD' in os.environ)"), 1, on_output=lines).status == 0
    assert lines.seen == [(0, "False")]


def test_a_program_may_open_a_store_of_its_own_on_the_masters_port() -> None:
    lines = Lines()
    script = (
        "import os, socket\n"
        "with socket.socket() as server:\n"
        "    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "    server.bind((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])))\n"
        "    server.listen()\n"
        "print('listens')\n"
    )
    assert launch(python(script), 1, on_output=lines).status == 0
    assert lines.seen == [(0, "listens")]


def test_ranks_are_placed_and_counted_per_host() -> None:
    lines = Lines()

    def place(rank: int) -> Placement:
        prefix = ("env", f"WHERE={rank}") if rank else ()
        return Placement(f"host{rank // 2}", prefix, {"EXTRA": f"of {rank}"})

    names = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "WHERE", "EXTRA"]
    show = f"import os; print(*map(os.environ.get, {names})); raise SystemExit(int(os.environ['RANK']) // 2 * 3)"
    outcome = launch(python(show), 3, on_output=lines, place=place)
    assert sorted(lines.seen) == [(0, "0 2 None of 0"), (1, "1 2 1 of 1"), (2, "0 1 2 of 2")]
    assert outcome.text == "rank 2 (host1) ended with status 3"


def test_rank_zeros_host_is_where_the_processes_meet() -> None:
    lines = Lines()

    def place(rank: int) -> Placement:
        def bind(port: int) -> socket.socket:
            return bind_here("127.0.0.7", port) if rank == 0 else pytest.fail("only rank 0 serves")

        return Placement(bind=bind)

    script = (
        "import os, socket; print(os.environ['MASTER_ADDR']); fd = os.environ.get('SYNCLINE_MEETING_FD');"
        "fd and print(socket.socket(fileno=int(fd)).getsockname()[0])"
    )
    assert launch(python(script), 2, on_output=lines, place=place).status == 0
    assert sorted(lines.seen) == [(0, "127.0.0.7"), (0, "127.0.0.7"), (1, "127.0.0.7")]


def test_a_command_that_starts_the_ranks_itself_is_told_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNCLINE_TUNING")
    monkeypatch.delenv("SYNCLINE_FLIGHT", raising=False)
    for name in ("SYNCLINE_LAUNCHER", "SYNCLINE_ELASTIC", "SYNCLINE_SAMPLES"):
        monkeypatch.setenv(name, "of an outer run")
    monkeypatch.setenv("RANK", "5")
    lines = Lines()
    script = (
        "import os; print([n for n in os.environ if n.startswith(('RANK', 'WORLD', 'LOCAL_', 'MASTER_', 'SYNCLI'))])"
    )
    outcome = launch(python(script + "; raise SystemExit(3)"), 1, on_output=lines, ranked=False)
    assert lines.seen == [(0, "[]")]
    assert outcome.text == f"{Path(sys.executable).name} ended with status 3"


def test_extra_descriptors_are_inherited() -> None:
    here, there = socket.socketpair()
    with here, there:
        script = f"import os; os.write({there.fileno()}, os.environ['RANK'].encode())"
        with LocalRun(python(script), 2, pass_fds=[there.fileno()]) as run:
            assert run.wait(LIMIT_S).status == 0
        assert sorted(here.recv(1) + here.recv(1)) == sorted(b"01")


def test_output_comes_whole_in_lines() -> None:
    lines = Lines()
    script = (
        "import sys; print('a' * 200_000); sys.stderr.write('no end \\u00e9\\u00e9'); sys.stdout.buffer.write(b'\\xff')"
    )
    assert launch([sys.executable, "-X", "utf8", "-c", script], 1, on_output=lines).status == 0
    text = "".join(line for _, line in lines.seen)
    assert sorted(text) == sorted("a" * 200_000 + "no end \u00e9\u00e9\ufffd")


def test_the_first_failure_decides_the_status_and_is_named_first() -> None:
    lines = Lines()
    script = (
        "import os, signal, sys\n"
        "rank = int(os.environ['SYNCLINE_PROCESS'])\n"
        "print('up', flush=True)\n"
        "if rank == 2: sys.stdin.read(); os._exit(7)\n"
        "signal.pause()\n"
    )
    with LocalRun(python(script), 3, servers=1, on_output=lines, grace_s=0.1) as run:
        outcome = run.wait(LIMIT_S)
    assert outcome.status == 7
    assert outcome.text.startswith("rank 2 (server 0) ended with status 7; ")
    assert "rank 0 was ended by the launcher" in outcome.text
    assert outcome.endings[0].rank == 2


def test_the_others_may_say_why_they_fail_too() -> None:
    """Within the grace they end by themselves, so nobody is told."""
    reader, writer = os.pipe()
    script = (
        f"import os, signal\n"
        f"if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        f"os.close({writer}); os.read({reader}, 1); os._exit(3)\n"
    )
    with LocalRun(python(script), 2, pass_fds=[reader, writer]) as run:
        os.close(reader)
        while not (outcome := run.poll(0.05)):
            if gone(run.pids[1]) and writer >= 0:
                run.poll()
                os.close(writer)
                writer = -1
    assert outcome.status == 128 + signal.SIGKILL
    assert outcome.text == "rank 1 was killed by SIGKILL; rank 0 ended with status 3"


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (128, "ended with status 128"),
        (129, "was killed by SIGHUP"),
        (192, "was killed by SIGRTMAX"),
        (193, "ended with status 193"),
    ],
)
def test_a_status_beyond_the_last_signal_is_a_status(status: int, how: str) -> None:
    """Open MPI's launcher ends with 213 where it does not know an option."""
    assert Ending(0, "rank 0", status, told=False).how == how


def test_a_process_that_ends_well_does_not_end_the_run() -> None:
    script = "import os, sys; sys.exit(0 if os.environ['RANK'] else 1)"
    assert launch(python(script), 3).status == 0


def test_one_that_cannot_be_started_says_so() -> None:
    lines = Lines()
    outcome = launch(["/no/such/program"], 1, on_output=lines)
    assert outcome.status != 0
    assert lines.seen == [(0, "syncline: cannot start /no/such/program: No such file or directory")]


def test_the_deaf_are_killed() -> None:
    lines = Lines()
    with LocalRun(python(DEAF), 2, on_output=lines) as run:
        until(run, lines, 2)
        run.stop(signal.SIGTERM)
        run.stop(signal.SIGTERM)  # the second call does not wait any longer
        outcome = run.wait(LIMIT_S)
    assert outcome.status == 128 + signal.SIGTERM
    assert {ending.status for ending in outcome.endings} == {128 + signal.SIGKILL}


def test_a_time_limit_ends_the_run() -> None:
    outcome = launch(python(FOREVER), 2, timeout_s=0.05)
    assert outcome.status == 124


def test_leaving_the_context_ends_the_processes() -> None:
    with LocalRun(python(FOREVER), 2) as run:
        pids = run.pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_a_process_has_started_ends_with_a_failed_run() -> None:
    lines = Lines()
    script = (
        "import os, signal, sys\n"
        "child = os.fork()\n"
        "if child == 0: signal.pause()\n"
        "print(child, flush=True)\n"
        "signal.pause()\n"
    )
    with LocalRun(python(script), 1, on_output=lines) as run:
        until(run, lines, 1)
        run.stop(signal.SIGTERM)
        assert run.wait().status == 128 + signal.SIGTERM
    assert gone(int(lines.seen[0][1]))


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(UsageError, match="no command"):
        LocalRun([], 1)
    with pytest.raises(UsageError, match="leave no worker"):
        LocalRun(["true"], 2, servers=2)


def test_launching_works_outside_the_main_thread() -> None:
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.append(launch(python("pass"), 1)))
    thread.start()
    thread.join(LIMIT_S)
    assert found[0].status == 0


LAUNCHER = (
    "import sys\n"
    "from syncline.launch.local import launch\n"
    "say = lambda rank, line: print(line, flush=True)\n"
    "sys.exit(launch([sys.executable, '-c', sys.argv[1]], 2, on_output=say).status)\n"
)


@pytest.fixture
def launched() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A launcher of its own with two processes, whose numbers it has printed."""
    script = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()
    process.stdout.close()


def test_no_process_outlives_a_killed_launcher(launched: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = launched
    process.kill()
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_everything(
    launched: tuple[subprocess.Popen[str], list[int]], number: signal.Signals
) -> None:
    process, pids = launched
    process.send_signal(number)
    assert process.wait(LIMIT_S) == 128 + number
    assert all(gone(pid) for pid in pids)


def test_the_terminal_reaches_the_launcher_only(launched: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = launched
    groups = {os.getpgid(pid) for pid in (process.pid, *pids)}
    assert len(groups) == 3
    assert {os.getsid(pid) for pid in pids} == set(pids)


def test_no_descriptor_is_left() -> None:
    before = sorted(path.name for path in Path("/proc/self/fd").iterdir())
    launch(python("pass"), 2, on_output=Lines())
    assert sorted(path.name for path in Path("/proc/self/fd").iterdir()) == before


def test_the_culprit_comes_first_whoever_ends_first() -> None:
    """It may need longer for its end than those that end because of it; its error and its status are the run's."""
    told, tells = os.pipe()
    note = "import os, sys; from syncline.wire.reports import blame; "
    note += f"own = os.environ['RANK'] == '0'; os.close({tells}) if own else None; "
    note += "blame(0, 'rank 0', 'failed: ValueError: the data are spoilt\\nby whom?', own=own); "
    script = f"{note} sys.exit(os.read({told}, 1) or 3 if own else 1)"
    with LocalRun([sys.executable, "-c", script], 2, pass_fds=(told, tells)) as run:
        os.close(tells)
        outcome = run.wait(LIMIT_S)
    os.close(told)
    assert outcome.status == 3
    assert outcome.text == "rank 0 failed: ValueError: the data are spoilt; rank 1 ended with status 1"


def test_how_a_culprit_has_ended_is_more_than_what_others_saw() -> None:
    note = "import os; from syncline.wire.reports import blame; "
    script = note + "os.environ['RANK'] == '1' and os._exit(7); blame(1, 'rank 1', 'died: whatever', own=False); 1 / 0"
    outcome = launch([sys.executable, "-c", script], 2, timeout_s=LIMIT_S, on_output=lambda *_: None)
    assert (outcome.status, outcome.text) == (7, "rank 1 ended with status 7; rank 0 ended with status 1")
