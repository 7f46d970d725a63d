"""``syncline doctor`` on real hosts: six faults are planted at once, and each is found and named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from syncline.launch.local import Placement, launch
from syncline.nouns import Rate
from syncline_bench.lab import Lab

LIMIT_S = 90.0
HOSTS = 4
DOCTORED = Path(__file__).with_name("doctored.py")

SLOW = pytest.mark.slow  # a process takes a whole core, or frames are waited for in vain

pytestmark = pytest.mark.usefixtures("able")


def on(lab: Lab, host: int, command: str) -> None:
    words = [*lab.enter(host), *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def taker() -> Iterator[int]:
    """A process that takes a core, ahead of all others."""
    core = max(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}]); os.nice(-20)\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


@SLOW
def test_a_link_that_loses_large_frames_is_found(tmp_path: Path) -> None:
    """Both hosts believe in frames that the switch between them does not pass on."""
    path = tmp_path / "found.json"
    with Lab(2, Rate(1e9)) as lab:
        for host in range(2):
            on(lab, host, "ip link set eth0 mtu 9000 gso_max_segs 1")
        command = [sys.executable, "-m", "syncline", "doctor", "--json", str(path)]
        outcome = launch(command, 2, place=lab.placement, on_output=lambda *_: None, timeout_s=LIMIT_S)
    assert outcome.status == 1
    (first, second) = [one["text"] for one in json.loads(path.read_text())["findings"] if one["status"] == "fail"]
    assert all("receives small messages of" in text and "a large one stalls" in text for text in (first, second))


@SLOW
def test_six_planted_faults_are_found_and_named(taker: int, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    with Lab(HOSTS, Rate(1e9)) as lab:
        on(lab, 0, "mount -o remount,size=8m /dev/shm")
        on(lab, 1, "ip link add vpn0 type veth peer name vpn1")
        on(lab, 1, "ip address add 10.99.0.1/24 dev vpn0")
        on(lab, 1, "ip link set vpn0 up")
        on(lab, 1, "ip link set vpn1 up")
        on(lab, 2, "tc qdisc replace dev eth0 root tbf rate 100mbit burst 32k limit 200k")
        on(lab, 3, "ip link set eth0 mtu 1400")

        def place(rank: int) -> Placement:
            there = lab.placement(rank)
            return replace(there, env={**there.env, "SYNCLINE_INTERFACE": "vpn0"}) if rank == 1 else there

        command = [sys.executable, str(DOCTORED), "3", "5", "--json", str(path)]
        lines: list[str] = []
        outcome = launch(command, HOSTS, place=place, on_output=lambda _, line: lines.append(line), timeout_s=LIMIT_S)
        names = [lab.host_name(host) for host in range(HOSTS)]
    assert outcome.status == 1, lines
    faults = [one for one in json.loads(path.read_text())["findings"] if one["status"] != "ok"]
    assert all(one["remedy"] for one in faults)

    def told(check: str) -> list[str]:
        return [one["text"] for one in faults if one["check"] == check]

    (shm,) = told("shm")
    assert shm.startswith(f"{names[0]}: /dev/shm has 8.00 MiB")
    (reach,) = told("reach")
    assert f"{names[0]}, {names[2]}, {names[3]} cannot reach {names[1]} at 10.99.0.1 (vpn0" in reach
    assert any(text.startswith(f"{names[2]} sends at most ") for text in told("bandwidth"))
    (mtu,) = told("mtu")
    assert mtu == f"eth0 of {names[3]} has MTU 1400, other hosts have 1500"
    (clock,) = told("clocks")
    assert clock.startswith(f"the clock of {names[3]} is ")
    assert 4.5 < float(clock.split(" is ")[1].split()[0]) < 5.5
    (cores,) = (text for text in told("cores") if "other processes take" in text)
    assert re.search(rf"process {taker} \(\S+, python", cores)
