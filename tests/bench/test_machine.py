from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from syncline_bench import machine


def test_a_machine_is_described_without_its_name() -> None:
    found = machine.describe()
    assert found.cores == len(os.sched_getaffinity(0))
    assert set(found.versions) == {"python", "torch", "numpy", "syncline"}
    assert found.commit is None or re.fullmatch("[0-9a-f]{40,64}", found.commit)
    assert (found.modified is None) == (found.commit is None)
    assert "GiB" in found.description
    if len(socket.gethostname()) > 8:
        assert socket.gethostname() not in found.description


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.invalid", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a package in src and the same package installed into an environment inside it."""
    for folder in ("src/package", ".venv/lib/package"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file.py").write_text("1")
    git(tmp_path, "init")
    return tmp_path


def test_only_the_checkout_of_the_package_itself_gives_a_commit(checkout: Path) -> None:
    package = checkout / "src" / "package"
    assert machine._commit(package) is None  # no commit yet
    git(checkout, "add", "src")
    git(checkout, "commit", "-m", "one")
    assert re.fullmatch("[0-9a-f]{40,64}", machine._commit(package) or "")
    assert machine._commit(checkout / ".venv" / "lib" / "package") is None
    assert machine._modified(package) is False
    (package / "file.py").write_text("2")
    assert machine._modified(package) is True


def test_without_git_there_is_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    assert machine._commit(checkout / "src" / "package") is None
