"""``syncline doctor`` and ``syncline run --check`` as a user calls them: output, file, status, and bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from calling import call

from syncline.version import __version__
from syncline_bench.doctor import checks, command
from syncline_bench.doctor.checks import Finding

WARNED = Finding("memory", "warn", "little memory is left", "End other processes.")
FAILED = Finding("network", "fail", "no such interface", "Unset it.")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Puts findings in the place of all checks."""

    def put(*found: Finding) -> None:
        for module in (checks, command):
            monkeypatch.setattr(module, "examined", lambda *_: list(found))

    return put


@pytest.mark.parametrize(("found", "status"), [([WARNED], 0), ([WARNED, FAILED], 1), ([], 0)])
def test_the_status_is_that_of_failures(plant, found: list[Finding], status: int) -> None:  # type: ignore[no-untyped-def]
    plant(*found)
    result = call("doctor")
    assert result.exit_code == status
    assert f"0 ok, {min(1, len(found))} warn, {status} fail" in result.output
    for one in found:
        assert one.text in result.output
        assert one.remedy in result.output


def test_names_that_others_choose_cannot_steer_the_terminal(plant) -> None:  # type: ignore[no-untyped-def]
    plant(Finding("cores", "warn", "process 7 (a\x1b[2J\rb) takes a core", "End process 7 (a\x1b[2J\rb)."))
    output = call("doctor").output
    assert "process 7 (a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}b) takes a core" in output
    assert "\x1b" not in output
    assert "\r" not in output


def test_the_file_has_all_findings(tmp_path: Path) -> None:
    """Of the real checks, as the documentation describes the file."""
    path = tmp_path / "doctor.json"
    result = call("doctor", "--json", str(path))
    content = json.loads(path.read_text())
    assert set(content) == {"version", "findings"}
    assert content["version"] == __version__
    for one in content["findings"]:
        assert set(one) == {"check", "status", "text", "remedy"}
        assert one["status"] in ("ok", "warn", "fail")
        assert one["text"]
        assert bool(one["remedy"]) == (one["status"] != "ok")
    failed = any(one["status"] == "fail" for one in content["findings"])
    assert result.exit_code == failed
    usual = ["cores", "memory", "shm", "limits", "network", "libraries", "versions", "plugins"]
    assert list(dict.fromkeys(one["check"] for one in content["findings"])) == usual


def test_the_file_may_be_standard_output(plant) -> None:  # type: ignore[no-untyped-def]
    plant(WARNED)
    result = call("doctor", "--json", "-")
    assert json.loads(result.stdout)["findings"][0]["check"] == "memory"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--json", "/nowhere/at/all.json"], "there is no folder"),
        (["--json", "/"], "is a directory"),
        (["--jsn", "x"], "No such option"),
        (["-n", "0"], "is not in the range"),
        (["--timeout", "0"], "is not in the range"),
        (["extra"], "unexpected extra argument"),
    ],
)
def test_bad_input_is_refused(plant, options: list[str], says: str) -> None:  # type: ignore[no-untyped-def]
    plant(WARNED)
    result = call("doctor", *options)
    assert result.exit_code == 2
    assert says in result.output


def test_under_a_launcher_the_ranks_are_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    result = call("doctor", "-n", "2")
    assert (result.exit_code, "leave -n out" in result.output) == (2, True)


def test_started_ranks_check_together(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    words = [sys.executable, "-m", "syncline", "doctor", "-n", "2", "--json", str(path)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "60"}, check=False
    )
    found = json.loads(path.read_text())["findings"]
    assert done.returncode == any(one["status"] == "fail" for one in found), done.stderr
    assert "all ranks are on this host" in found[-1]["text"]
    assert all(len(line) <= 60 for line in done.stdout.splitlines())
    assert not done.stderr


@pytest.mark.parametrize(("found", "starts"), [([], True), ([WARNED], True), ([WARNED, FAILED], False)])
def test_run_checks_first_and_starts_nothing_that_cannot_work(  # type: ignore[no-untyped-def]
    plant, tmp_path: Path, capfd: pytest.CaptureFixture[str], found: list[Finding], starts: bool
) -> None:
    plant(Finding("shm", "ok", "enough room"), *found)
    script = tmp_path / "train.py"
    script.write_text("import os; os.write(1, b'trained\\n')")
    result = call("run", "--check", "-n", "1", str(script))
    assert result.exit_code == (0 if starts else 1)
    assert (capfd.readouterr().out == "trained\n") is starts
    assert "enough room" not in result.output
    for one in found:
        assert one.text in result.output
        assert one.remedy in result.output
