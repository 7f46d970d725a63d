"""``syncline lab`` as a user calls it: output, status, and every way to end it; none leaves anything behind."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from syncline_bench.lab import Lab, namespaces
from syncline_bench.lab.records import Record, Registry

LIMIT_S = 60.0
FOREVER = "import os, signal; print('pid', os.getpid(), flush=True); signal.pause()"
# Daemonizes as prted and others do: a session of its own, no parent that waits, no request to die with anyone.
DAEMON = (
    "import os, signal\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        print('daemon', os.getpid(), flush=True)\n"
    "        [os.close(fd) for fd in range(3)]\n"
    "        signal.pause()\n"
    "    os._exit(0)\n"
) + FOREVER

pytestmark = pytest.mark.usefixtures("able")


def lab(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "syncline", "lab", *arguments]


def python(script: str) -> list[str]:
    return ["--", sys.executable, "-I", "-S", "-c", script]


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(lab(*arguments), capture_output=True, text=True, timeout=LIMIT_S, check=False)


@contextmanager
def started(*arguments: str, lines: int) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A call that has printed so many lines and is still running."""
    with subprocess.Popen(lab(*arguments), stdout=-1, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, [process.stdout.readline() for _ in range(lines)]
        finally:
            process.kill()


def pids(lines: list[str], word: str) -> list[int]:
    return [int(number) for line in lines for number in re.findall(rf"{word} (\d+)", line)]


def gone(pid: int) -> bool:
    """Wait until the process has ended, which need not be our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(1e3 * LIMIT_S))
    finally:
        os.close(fd)


def record_of(name: str) -> Record:
    found = Registry().read(name)
    assert found is not None
    return found


@pytest.fixture
def name() -> str:
    return f"test{os.getpid()}"


def nothing_is_left(name: str, mark: str) -> bool:
    return Registry().read(name) is None and not list(namespaces._marked(mark))


def test_every_host_runs_the_command_and_its_lines_carry_the_hosts_name(name: str) -> None:
    script = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'SYNCLINE_INTERFACE')))"
    done = call("--hosts", "2", "--rate", "100Mbit", "--name", name, *python(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{name}-h{rank} | {rank} 0 2 eth0" for rank in range(2)]
    assert Registry().read(name) is None


def test_several_ranks_of_a_host_are_local_to_each_other(name: str) -> None:
    script = "import os; print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])"
    done = call("--hosts", "2", "--per-host", "2", "--rate", "none", "--name", name, *python(script))
    assert sorted(done.stdout.splitlines()) == [
        f"{name}-h{rank // 2}.{rank % 2} | {rank} {rank % 2} 2" for rank in range(4)
    ]


def test_the_first_failure_is_the_status_and_is_named() -> None:
    done = call("--hosts", "2", *python("import os; raise SystemExit(7 * int(os.environ['RANK']))"))
    assert done.returncode == 7
    assert re.search(r"rank 1 \(\S+-h1\) ended with status 7", done.stderr)


def test_servers_are_the_last_ranks() -> None:
    names = ("SYNCLINE_PROCESS", "RANK", "WORLD_SIZE", "SYNCLINE_SERVERS", "SYNCLINE_STRATEGY")
    script = f"import os; print(*map(os.environ.get, {names}))"
    done = call("--hosts", "3", "--strategy", "ps(servers=1)", *python(script))
    assert [line.split("| ")[1] for line in sorted(done.stdout.splitlines())] == [
        f"{rank} {min(rank, 1)} 2 1 ps(servers=1)" for rank in range(3)
    ]


def test_a_time_limit_ends_it(name: str) -> None:
    done = call("--hosts", "1", "--timeout", "0.5", "--name", name, *python(FOREVER))
    assert done.returncode == 124
    assert Registry().read(name) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_everything(name: str, number: signal.Signals) -> None:
    with started("--hosts", "2", "--name", name, *python(FOREVER), lines=2) as (process, lines):
        mark = record_of(name).mark
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 128 + number
    assert all(gone(pid) for pid in pids(lines, "pid"))
    assert nothing_is_left(name, mark)


def test_a_daemon_of_a_command_ends_with_the_lab(name: str) -> None:
    with started("--hosts", "1", "--name", name, *python(DAEMON), lines=2) as (process, lines):
        mark = record_of(name).mark
        process.terminate()
        process.wait(LIMIT_S)
    assert all(gone(pid) for pid in pids(lines, "(?:pid|daemon)"))
    assert nothing_is_left(name, mark)


def test_after_sigkill_the_next_start_removes_the_leftovers_and_no_other_lab(name: str) -> None:
    with started("--hosts", "2", "--name", name, *python(DAEMON), lines=4) as (process, lines), Lab(1) as other:
        dead = record_of(name)
        process.kill()
        process.wait(LIMIT_S)
        assert all(gone(pid) for pid in pids(lines, "pid"))  # the kernel ended the ranks
        assert all(gone(holder) for holder in dead.holders)  # and let go of the hosts
        assert f"{name}: 2 hosts, rate 1Gbit, dead" in call("--list").stdout
        done = call("--hosts", "1", "--name", name, *python("print('again')"))
        assert (done.returncode, done.stdout) == (0, f"{name}-h0 | again\n"), done.stderr
        assert all(gone(pid) for pid in pids(lines, "daemon"))
        assert nothing_is_left(name, dead.mark)
        assert f"{other.name}: 1 hosts, rate none, process {os.getpid()}" in call("--list").stdout


def test_clean_removes_what_a_killed_one_left(name: str) -> None:
    with started("--hosts", "1", "--name", name, *python(DAEMON), lines=2) as (process, lines):
        process.kill()
        process.wait(LIMIT_S)
        assert f"removed {name}" in call("--clean").stdout.splitlines()
        assert all(gone(pid) for pid in pids(lines, "daemon"))
    assert Registry().read(name) is None


def test_a_name_in_use_is_refused_with_the_process_that_has_it(name: str) -> None:
    with Lab(1, name=name):
        done = call("--hosts", "1", "--name", name, "--", "true")
        assert done.returncode == 2
        assert f"{name!r} is running (process {os.getpid()})" in done.stderr


def test_a_command_that_is_not_there_is_reported() -> None:
    done = call("--hosts", "1", "--", "/no/such/program")
    assert done.returncode == 127
    assert "/no/such/program" in done.stdout
