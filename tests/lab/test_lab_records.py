"""Records of labs: names are taken by living labs only, and only dead ones are removed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline_bench.lab import records
from syncline_bench.lab.records import Owner, Record, Registry, this_process

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,30}", fullmatch=True)
HOSTS = st.integers(0, records.MAX_HOSTS - 1)


@given(NAMES, HOSTS)
def test_a_hosts_name_tells_its_lab(lab: str, host: int) -> None:
    assert records.read_host_name(records.host_name(records.check_name(lab), host)) == (lab, host)
    assert len(records.host_name(lab, host)) <= 64  # the kernel's limit


@given(NAMES)
def test_addresses_are_private_and_differ(lab: str) -> None:
    found = {IPv4Address(records.address(lab, host)) for host in range(records.MAX_HOSTS)}
    assert len(found) == records.MAX_HOSTS
    network = records.network(lab)
    assert network.subnet_of(IPv4Network("10.0.0.0/8"))
    assert found <= set(network.hosts())


@pytest.mark.parametrize("name", ["", "Lab", "1st", "a" * 32, "a_b", "a.b", "../x", "a\n", "-a"])
def test_names_that_hosts_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="small letters"):
        records.check_name(name)


@pytest.mark.parametrize("name", ["vm", "lab0-h", "lab0-h1234", "lab0-h-1", "Lab-h0"])
def test_other_hosts_are_no_labs(name: str) -> None:
    with pytest.raises(UsageError, match="not a host of a lab"):
        records.read_host_name(name)


def test_the_first_free_name_is_taken() -> None:
    assert records.free_name([]) == "lab0"
    assert records.free_name(["lab1", "lab0", "mine", "lab3"]) == "lab2"


def test_every_host_is_in_the_hosts_file_under_its_name() -> None:
    lines = [line.split() for line in records.hosts_file("a", 3).splitlines()]
    for host in range(3):
        assert [records.address("a", host), records.host_name("a", host)] in lines
    assert ["127.0.0.1", "localhost"] in lines


class Ended:
    """Stands for the end of a dead lab's processes."""

    def __init__(self) -> None:
        self.marks: list[str] = []

    def __call__(self, mark: str) -> None:
        self.marks.append(mark)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "labs")


@pytest.fixture
def ended() -> Ended:
    return Ended()


def die(registry: Registry, record: Record) -> None:
    """Let a lab's owner be one that was never alive."""
    registry._write(replace(record, owner=replace(record.owner, started=record.owner.started - 1)))


def test_a_living_process_is_alive_until_it_ends() -> None:
    with subprocess.Popen([sys.executable, "-ISc", "input()"], stdin=subprocess.PIPE) as process:
        owner = records._process(process.pid)
        assert owner is not None
        assert owner.alive
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not owner.alive  # a zombie
    assert not owner.alive


def test_a_later_process_with_the_same_number_is_not_the_owner() -> None:
    me = this_process()
    assert me.alive
    assert not Owner(me.pid, me.started + 1, me.boot).alive
    assert not Owner(me.pid, me.started, "another boot").alive


def test_a_claimed_lab_is_found_until_it_is_released(registry: Registry, ended: Ended) -> None:
    record = registry.claim("mine", 3, 1e9, ended)
    assert registry.labs() == [record] == [registry.read("mine")]
    known = registry.complete(record, (1, 2, 3))
    assert registry.read("mine") == known
    registry.release(known)
    assert registry.labs() == []
    assert registry.read("mine") is None
    assert ended.marks == []


def test_a_name_in_use_is_refused_and_names_the_owner(registry: Registry, ended: Ended) -> None:
    registry.claim("mine", 3, None, ended)
    with pytest.raises(UsageError, match=rf"'mine' is running \(process {os.getpid()}\).*another name"):
        registry.claim("mine", 1, None, ended)


def test_labs_without_a_name_get_different_ones(registry: Registry, ended: Ended) -> None:
    names = [registry.claim(None, 1, None, ended).name for _ in range(3)]
    assert names == ["lab0", "lab1", "lab2"]


def test_a_dead_labs_name_is_free_and_its_processes_are_ended(registry: Registry, ended: Ended) -> None:
    dead = registry.claim("mine", 3, None, ended)
    die(registry, dead)
    fresh = registry.claim("mine", 1, None, ended)
    assert ended.marks == [dead.mark]
    assert fresh.mark != dead.mark


def test_only_dead_labs_are_removed(registry: Registry, ended: Ended) -> None:
    alive, dead = (registry.claim(name, 1, None, ended) for name in ("alive", "dead"))
    die(registry, dead)
    assert registry.clean(ended) == ["dead"]
    assert ended.marks == [dead.mark]
    assert registry.labs() == [alive]
    assert registry.clean(ended) == []


@pytest.mark.parametrize("text", [None, "", "{}", '{"owner": 3}', "[]"])
def test_what_a_start_left_half_done_is_removed(registry: Registry, ended: Ended, text: str | None) -> None:
    folder = registry.folder("half")
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "lab.json").write_text(text)
    assert registry.labs() == []
    assert registry.claim("half", 1, None, ended).name == "half"


def test_a_release_leaves_another_lab_of_that_name_alone(registry: Registry, ended: Ended) -> None:
    old = registry.claim("mine", 1, None, ended)
    die(registry, old)
    fresh = registry.claim("mine", 1, None, ended)
    registry.release(old)
    assert registry.read("mine") == fresh


def test_two_starts_never_take_one_name(registry: Registry, ended: Ended) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(registry.claim(None, 1, None, ended).name)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sorted(found) == [f"lab{number}" for number in range(8)]


def test_a_lock_that_is_held_too_long_is_reported(
    registry: Registry, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_LOCK_S", 0.0)
    with registry._locked(), pytest.raises(UsageError, match="another process has held"):
        registry.clean(ended)
