"""What a machine lacks is said, with the package and the way around it; a host that cannot be made says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.errors import UsageError
from syncline_bench.lab import namespaces
from syncline_bench.lab.namespaces import TOOLS, Host, check_able, run_tool


def everything(name: str) -> str:
    return f"/usr/bin/{name}"


def test_an_ordinary_user_is_told_what_needs_root_and_what_does_not() -> None:
    with pytest.raises(UsageError, match=r"needs root.*tcp\(rate=1Gbit, delay=5ms\)"):
        check_able(euid=1000, find=everything)


@pytest.mark.parametrize("missing", TOOLS)
def test_a_missing_program_is_named_with_its_package(missing: str) -> None:
    with pytest.raises(UsageError, match=rf"program {missing} \(Debian: apt-get install {TOOLS[missing]}\)") as caught:
        check_able(euid=0, find=lambda name: None if name == missing else everything(name))
    assert "tcp(rate=1Gbit" in str(caught.value)


def test_several_missing_programs_are_named_at_once() -> None:
    with pytest.raises(UsageError, match=r"programs ip, tc \(Debian: apt-get install iproute2\)"):
        check_able(euid=0, find=lambda name: None if name in ("ip", "tc") else everything(name))


def test_root_with_all_programs_is_able() -> None:
    check_able(euid=0, find=everything)


def test_a_tool_that_fails_is_quoted() -> None:
    with pytest.raises(UsageError, match=r"cannot make the lab: sh -c .*: no such qdisc; .*user space"):
        run_tool("sh", "-c", "cat >&2; exit 3", feed="no such\nqdisc\n")


@pytest.mark.usefixtures("able")
def test_a_host_that_cannot_be_made_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    mark = f"syncline-test-{tmp_path.name}"
    with pytest.raises(UsageError, match=r"cannot make a lab's host: .*mount"):
        Host("never", mark, tmp_path / "no-such-hosts-file")
    assert list(namespaces._marked(mark)) == []
