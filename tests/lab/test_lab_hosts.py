"""Real hosts: each apart from the others and from the machine, joined by links that keep their rate."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from syncline.errors import UsageError
from syncline.launch.local import launch
from syncline.nouns import Rate
from syncline_bench.lab import Lab, namespaces
from syncline_bench.lab.lab import stream
from syncline_bench.lab.records import Registry

LIMIT_S = 60.0
MEETING = Path(__file__).with_name("meeting.py")

pytestmark = pytest.mark.usefixtures("able")


def on(lab: Lab, host: int, *command: str) -> str:
    """What a command prints on a host."""
    done = subprocess.run([*lab.enter(host), *command], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def connect(lab: Lab) -> tuple[socket.socket, socket.socket]:
    """A connection from host 0 to host 1; both ends are here."""
    with lab.bind(1) as listener:
        listener.listen(1)
        listener.settimeout(LIMIT_S)
        sender = lab.bind(0)
        sender.settimeout(LIMIT_S)
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
    receiver.settimeout(LIMIT_S)
    return sender, receiver


@pytest.mark.parametrize("kind", ["net", "mnt", "uts", "ipc"])
def test_every_host_has_namespaces_of_its_own(lab: Lab, kind: str) -> None:
    found = {on(lab, host, "readlink", f"/proc/self/ns/{kind}") for host in range(2)}
    assert len(found) == 2
    assert str(Path(f"/proc/self/ns/{kind}").readlink()) not in found


def test_hosts_know_their_name_and_each_others(lab: Lab) -> None:
    for host in range(2):
        assert on(lab, host, "uname", "-n") == lab.host_name(host)
        assert lab.address(1 - host) in on(lab, host, "getent", "ahostsv4", lab.host_name(1 - host))
    assert socket.gethostname() != lab.host_name(0)


def test_hosts_share_no_memory_by_name(lab: Lab) -> None:
    on(lab, 0, "touch", "/dev/shm/of-host-0")
    assert on(lab, 0, "ls", "/dev/shm") == "of-host-0"
    assert on(lab, 1, "ls", "/dev/shm") == ""
    assert not Path("/dev/shm/of-host-0").exists()


def test_commands_run_in_the_callers_directory_as_the_process_that_was_started(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert on(lab, 1, "pwd") == str(tmp_path)
    with subprocess.Popen([*lab.enter(1), "sh", "-c", "echo $$; read line"], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.terminate()
        assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_a_host_sees_its_own_interfaces_and_nothing_beyond(lab: Lab) -> None:
    assert on(lab, 0, "ls", "/sys/class/net").split() == ["eth0", "lo"]
    with lab.bind(0) as sock, pytest.raises(OSError, match="unreachable"):
        sock.connect(("198.51.100.1", 9))  # reserved for documentation, and no route leads anywhere
    here = subprocess.run(["ip", "-json", "link"], capture_output=True, check=True, timeout=LIMIT_S)
    names = {link["ifname"] for link in json.loads(here.stdout)}
    assert not names & {"br0", "p0", "p1"}


def test_links_carry_no_more_than_their_rate(lab: Lab) -> None:
    """The other bound is a matter of how busy the machine is."""
    assert lab.rate is not None
    nbytes = 5_000_000
    for sender, receiver in (connect(lab), connect(lab)[::-1]):  # both directions
        with sender, receiver:
            thread = threading.Thread(target=sender.sendall, args=(bytes(nbytes),))
            start = time.monotonic()
            thread.start()
            left = nbytes
            while left:
                left -= len(receiver.recv(min(left, 1 << 20)))
            elapsed = time.monotonic() - start
            thread.join(LIMIT_S)
        assert nbytes * 8 / elapsed < 1.2 * lab.rate


def test_both_ends_of_every_link_are_shaped(lab: Lab) -> None:
    assert " tbf " in on(lab, 0, "tc", "qdisc", "show", "dev", "eth0")
    assert lab._switch is not None
    switch = subprocess.run(
        [*lab._switch.enter(), "tc", "qdisc"], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    shaped = [line.split()[4] for line in switch.stdout.splitlines() if " tbf " in line]
    assert shaped == ["p0", "p1"]


@pytest.mark.parametrize("own", [True, False], ids=["own stream", "iperf3"])
def test_goodput_lies_below_the_rate(lab: Lab, own: bool) -> None:
    if not own and shutil.which("iperf3") is None:
        pytest.skip("iperf3 is not installed")
    assert lab.rate is not None
    found = stream(lab, 0.2) if own else lab.goodput(1)
    assert 0 < found * 8 < lab.rate * 1.02


@pytest.mark.slow
def test_syncline_and_torch_meet_and_reduce_in_it(lab: Lab) -> None:
    """Each through a store of its own."""
    lines: list[str] = []
    outcome = launch(
        [sys.executable, str(MEETING)],
        2,
        on_output=lambda rank, line: lines.append(f"{rank}: {line}"),
        place=lab.placement,
        timeout_s=LIMIT_S,
    )
    assert outcome.status == 0, lines
    assert sorted(lines) == [f"{rank}: {lab.host_name(rank)} 3.0 3.0 local 0" for rank in (0, 1)]


def test_ranks_fill_one_host_after_the_other(lab: Lab) -> None:
    hosts = [lab.placement(rank, per_host=2).host for rank in range(4)]
    assert hosts == [lab.host_name(host) for host in (0, 0, 1, 1)]
    with pytest.raises(UsageError, match="no place on 2 hosts"):
        lab.placement(4, per_host=2)
    with pytest.raises(UsageError, match="at least one rank"):
        lab.placement(0, per_host=0)


def test_a_name_in_use_is_refused(lab: Lab) -> None:
    with pytest.raises(UsageError, match=f"{lab.name!r} is running"):
        Lab(1, name=lab.name).__enter__()
    assert on(lab, 0, "uname", "-n") == lab.host_name(0)  # and still there


def test_hosts_that_are_not_there_are_refused(lab: Lab) -> None:
    for call in (lab.address, lab.enter, lab.host_name, lab.bind):
        with pytest.raises(UsageError, match="no host 2"):
            call(2)


def test_nothing_is_left_of_a_lab_that_ended() -> None:
    """Not even of processes that nobody waits for."""
    with Lab(1) as made:
        assert made.rate is None
        with subprocess.Popen([*made.enter(0), "sh", "-c", "echo started; read line"], stdin=-1, stdout=-1) as process:
            assert process.stdout is not None
            process.stdout.readline()
            name, record = made.name, Registry().read(made.name)
            assert record is not None
            made.close()
            assert process.wait(LIMIT_S) == -signal.SIGKILL
    assert list(namespaces._marked(record.mark)) == []
    assert Registry().read(name) is None
    for call in (made.address, made.enter, made.bind):
        with pytest.raises(UsageError, match="context is entered"):
            call(0)


def test_an_exception_while_it_is_made_takes_it_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*argv: str, feed: str = "") -> None:  # noqa: ARG001
        raise UsageError("no tc today")

    monkeypatch.setattr("syncline_bench.lab.lab.run_tool", fail)
    made = Lab(1, Rate(1e9), name=f"broken{os.getpid()}")
    with pytest.raises(UsageError, match="no tc today"):
        made.__enter__()
    assert Registry().read(f"broken{os.getpid()}") is None


@pytest.mark.parametrize(
    ("hosts", "rate", "name"), [(0, None, None), (1000, None, None), (2, 5.0, None), (2, 1e9, "A")]
)
def test_labs_that_make_no_sense_are_refused_at_once(hosts: int, rate: float | None, name: str | None) -> None:
    with pytest.raises(UsageError):
        Lab(hosts, None if rate is None else Rate(rate), name)


def test_goodput_needs_two_hosts() -> None:
    with pytest.raises(UsageError, match="two hosts"):
        Lab(1).goodput()
