"""The launch agent: what an MPI launcher asks of ssh, in a lab."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from syncline.errors import UsageError
from syncline_bench.lab.agent import command_line
from syncline_bench.lab.records import Registry


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    found = Registry(tmp_path)
    found.complete(found.claim("lab7", 2, None, lambda _: None), (101, 102))
    return found


@pytest.mark.parametrize("options", [[], ["-x"], ["-x", "-q"]])
def test_the_command_is_a_shells_line_on_that_host(registry: Registry, options: list[str]) -> None:
    line = command_line([*options, "lab7-h1", "A=1;", "prted", '"a b"'], registry)
    assert "--target=102" in line
    assert line[-3:] == ["sh", "-c", 'A=1; prted "a b"']
    assert f"--chdir={Path.cwd()}" in line


@pytest.mark.parametrize("arguments", [[], ["-x"], ["lab7-h1"]])
def test_without_a_host_and_a_command_it_says_how_it_is_used(registry: Registry, arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="usage"):
        command_line(arguments, registry)


@pytest.mark.parametrize("host", ["lab7-h2", "lab8-h0"])
def test_hosts_that_are_not_there_are_refused(registry: Registry, host: str) -> None:
    with pytest.raises(UsageError, match=r"no running lab has a host .*lab7 \(2 hosts\)"):
        command_line([host, "true"], registry)


def test_a_dead_labs_hosts_are_not_entered(registry: Registry) -> None:
    record = registry.labs()[0]
    registry._write(replace(record, owner=replace(record.owner, boot="before")))
    with pytest.raises(UsageError, match="no running lab"):
        command_line(["lab7-h0", "true"], registry)
