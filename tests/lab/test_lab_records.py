"""Records of labs: names are taken by living labs only, and only dead ones are removed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from syncline.errors import UsageError
from syncline_bench.lab import records
from syncline_bench.lab.records import Owner, Record, Registry, this_process


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
