"""Every check of one host finds what is planted in what it reads, and only that."""

from __future__ import annotations

import os
import pwd
import resource
import subprocess
import sys
import threading
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from syncline import registry
from syncline.launch.environment import Environment
from syncline.launch.mpi_library import MpiLibrary
from syncline_bench.doctor import checks
from syncline_bench.doctor.checks import Finding, Way

MIB = 1 << 20
CORES = (0, 1)


def only(found: list[Finding], status: str) -> Finding:
    """The one finding, whose remedy is a sentence if it needs one."""
    (one,) = found
    assert one.status == status, one
    assert not one.remedy if status == "ok" else one.remedy[0].isupper() and one.remedy.endswith(".")
    return one


class Proc:
    """A planted /proc: time passes when the check waits."""

    def __init__(self, root: Path, idle: int, process: int = 0, mine: int = 0, core: int = 1) -> None:
        """In 100 ticks of each core, ``idle`` are idle over both; ``process`` and this process use some."""
        self.root, self.idle, self.core = root, idle, core
        self.used = {4711: process, os.getpid(): mine}

    def pause(self, _: float) -> None:
        self.write(1)

    def write(self, share: int) -> None:
        busy = 200 - self.idle
        lines = [f"cpu{core} {busy // 2 * share} 0 0 {self.idle // 2 * share} 0 0 0 0 0 0" for core in CORES]
        (self.root / "stat").write_text(
            "\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *lines, "cpu2 900 0 0 0 0 0 0 0 0 0", "ctxt 1"])
        )
        for pid, ticks in self.used.items():
            (self.root / str(pid)).mkdir(exist_ok=True)
            fields = ["S", *["0"] * 10, str(ticks * share), "0", *["0"] * 23, str(self.core)]
            (self.root / str(pid) / "stat").write_text(f"{pid} (odd) name) {' '.join(fields)}")


def look(proc: Proc, **more: Any) -> list[Finding]:
    proc.write(0)
    return checks.cores(usable=CORES, proc=proc.root, pause=proc.pause, **more)


def test_a_taken_core_is_found_with_the_process_that_takes_it(tmp_path: Path) -> None:
    found = only(look(Proc(tmp_path, idle=100, process=98)), "warn")
    user = pwd.getpwuid(os.getuid()).pw_name
    assert f"process 4711 ({user}, odd) name) 98 % of a core, last on core 1" in found.text
    assert f"Wait for process 4711 ({user}, odd) name), or run elsewhere" in found.remedy
    assert "taskset" in found.remedy


def test_taskset_is_advised_only_if_the_free_cores_are_enough(tmp_path: Path) -> None:
    found = look(Proc(tmp_path, idle=100, process=98), processes=2)
    assert "run elsewhere" in only(found, "warn").remedy
    assert "taskset" not in found[0].remedy


def test_what_the_job_itself_uses_takes_no_core(tmp_path: Path) -> None:
    proc = Proc(tmp_path, idle=4, process=98, mine=98)
    assert "take 0.0" in only(look(proc, ours=[4711]), "ok").text
    assert "take 1.0 of 2" in only(look(proc), "warn").text


def test_a_load_without_a_visible_process_is_found(tmp_path: Path) -> None:
    assert (
        "no visible process takes a fifth of a core"
        in only(look(Proc(tmp_path, idle=80, process=98, core=5)), "warn").text
    )


def test_more_processes_than_cores_are_found(tmp_path: Path) -> None:
    found = only(look(Proc(tmp_path, idle=200), processes=3), "warn")
    assert found.text.startswith("3 processes share them: 2 of ")
    assert "at most 2" in found.remedy


def test_a_process_that_really_takes_a_core_is_found() -> None:
    """Through the real /proc; other tests may share the core, so a fifth of it counts."""
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE) as taker:
        try:
            assert taker.stdout is not None
            taker.stdout.readline()
            before = checks._use(Path("/proc"), [core])
            deadline = time.monotonic() + 10
            while (after := checks._use(Path("/proc"), [core])).processes[taker.pid][0] < 10:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            taker.kill()
    assert after.busy - before.busy >= 8
    assert after.processes[taker.pid][2] == core


@pytest.mark.parametrize(("mib", "status"), [(100, "fail"), (500, "warn"), (5000, "ok")])
def test_little_memory_is_found(mib: int, status: str) -> None:
    only(checks.memory(mib * MIB), status)


@pytest.mark.parametrize(
    ("size", "free", "status", "says"),
    [(64, 64, "warn", "size=2g"), (4096, 10, "warn", "Remove files"), (4096, 4000, "ok", "")],
)
def test_a_small_or_full_shared_memory_is_found(
    monkeypatch: pytest.MonkeyPatch, size: int, free: int, status: str, says: str
) -> None:
    planted = SimpleNamespace(f_blocks=size, f_bavail=free, f_frsize=MIB)
    monkeypatch.setattr(os, "statvfs", lambda _: planted)
    assert says in only(checks.shared_memory(), status).remedy


def test_a_missing_shared_memory_is_found(tmp_path: Path) -> None:
    assert "No such file" in only(checks.shared_memory(str(tmp_path / "shm")), "warn").text


def limits(processes: int = 4, **changed: int) -> list[Finding]:
    values = {"NOFILE": 1 << 20, "MEMLOCK": resource.RLIM_INFINITY, "NPROC": resource.RLIM_INFINITY} | changed
    by_number = {getattr(resource, f"RLIMIT_{name}"): (value, value) for name, value in values.items()}
    return checks.limits(processes, by_number.__getitem__)


def test_limits_are_compared_with_the_size_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "control_group", lambda _: "")
    only(limits(), "ok")
    only(limits(NOFILE=1024), "ok")
    assert "1024 are allowed" in only(limits(200, NOFILE=1024), "fail").text
    assert "100 processes" in only(limits(NPROC=100), "warn").text


def test_the_control_groups_limit_of_processes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "control_group", {"pids.max": "1000", "pids.current": "900"}.get)
    assert "100 processes" in only(limits(), "warn").text


KNOWN = {"lo": "127.0.0.1", "eth0": "192.0.2.1"}
ALONE = Environment("none")
IN_A_JOB = Environment("variables", 1, 2, address="127.0.0.1", port=1)


def test_the_interface_and_its_reason_are_named() -> None:
    asked = checks.way(ALONE, "127.0.0.1", KNOWN)
    assert (asked.interface, asked.asked, asked.fault) == ("lo", True, "")
    assert (
        "SYNCLINE_INTERFACE names it; there is also eth0 (192.0.2.1)" in only(checks.network(asked, KNOWN), "ok").text
    )
    led = checks.way(IN_A_JOB, None, KNOWN)
    assert (led.address, led.why, led.asked) == ("127.0.0.1", "it leads to rank 0 at 127.0.0.1", False)
    assert led.mtu == int(Path("/sys/class/net/lo/mtu").read_text())


@pytest.mark.parametrize("asked", ["nonesuch0", "192.0.2.77"])
def test_an_interface_that_is_not_here_is_a_failure(asked: str) -> None:
    taken = checks.way(IN_A_JOB, asked, KNOWN)
    assert taken.address == "127.0.0.1"  # on which the other checks go on
    found = only(checks.network(taken, KNOWN), "fail")
    assert asked in found.text
    assert "eth0" in found.remedy


def test_a_machine_that_nobody_reaches_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline.errors import GroupError

    def nowhere() -> str:
        raise GroupError("it has no address")

    monkeypatch.setattr(checks, "own_address", nowhere)
    assert only(checks.network(checks.way(ALONE, None, {}), {}), "warn").text == "it has no address"


def test_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    openmpi = MpiLibrary("openmpi", "libmpi.so.40", ("/opt/prterun",))
    found = only(checks.libraries(lambda name: openmpi if name == "openmpi" else "none", nccl="2.27"), "ok")
    assert found.text == "MPI: openmpi (/opt/prterun); NCCL: 2.27"
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda _: object())
    assert "without an MPI library" in only(checks.libraries(lambda _: "none", nccl=""), "warn").text


REQUIRED = [
    "Python >=3.10",
    "numpy>=1.26",
    "rich>=13",
    'torch>=2.4; extra == "torch"',
    'syncline[torch]; extra == "all"',
]


@pytest.mark.parametrize(
    ("here", "status", "says"),
    [
        ({"Python": "3.12.1", "numpy": "2.1.0", "torch": "2.13.0+cpu"}, "ok", "not installed: numba, jax, tensorflow"),
        ({"Python": "3.12.1", "numpy": "1.9.9"}, "fail", "numpy 1.9.9 is installed, Syncline supports 1.26"),
        ({"Python": "3.9.18", "numpy": "2.1"}, "fail", "Python 3.9.18"),
        ({"Python": "3.12.1", "torch": "2.3.1"}, "warn", "torch 2.3.1"),
        ({"Python": "3.12.1", "torch": "2.10.0a0"}, "ok", "torch 2.10.0a0"),
    ],
)
def test_old_versions_are_found(here: dict[str, str], status: str, says: str) -> None:
    assert says in only(checks.versions(REQUIRED, here), status).text


def test_the_packages_own_requirements_are_read() -> None:
    """As setuptools writes them, which the planted ones resemble."""
    required = checks._required()
    assert any(line.startswith("Python >=3.") for line in required)
    assert "Syncline supports 1.26" in only(checks.versions(required, {"numpy": "1.0"}), "fail").text
    assert "Syncline supports 2.7" in only(checks.versions(required, {"torch": "1.0"}), "warn").text
    only(checks.versions([], {}), "warn")


def test_a_broken_part_of_another_package_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = {"syncline.codecs": [EntryPoint("mine", "nonesuch.part", "syncline.codecs")]}
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: points.get(group, []))
    monkeypatch.setattr(registry, "_loaded", set())
    monkeypatch.setattr(registry, "_begun", set())
    monkeypatch.setattr(registry, "_left_out", {kind: {} for kind in registry.KINDS})
    found = only(checks.plugins(), "warn")
    assert "codec 'mine'" in found.text
    assert "No module named 'nonesuch'" in found.text
    assert not caplog.records  # the finding says it


def test_a_check_that_hangs_or_raises_hides_no_other() -> None:
    ending = threading.Event()
    fine = Finding("fine", "ok", "well")
    try:
        found = checks.examined(
            {"stuck": lambda: [fine] * ending.wait(60), "broken": lambda: [fine][1:2] or 1 / 0, "fine": lambda: [fine]},
            0.2,
        )
    finally:
        ending.set()
    assert [(one.check, one.status) for one in found] == [("stuck", "warn"), ("broken", "warn"), ("fine", "ok")]
    assert "0.2 s" in found[0].text
    assert "ZeroDivisionError" in found[1].text


def test_before_a_run_only_faults_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_INTERFACE", "nonesuch0")
    found = checks.before_run(10_000)
    assert {one.status for one in found} <= {"warn", "fail"}
    assert any("10000 processes share" in one.text for one in found if one.check == "cores")
    assert any("nonesuch0" in one.text for one in found if one.status == "fail")


def test_a_way_survives_without_an_interface() -> None:
    assert "the interface (10.0.0.9)" in only(checks.network(Way("10.0.0.9", "", 0, "why", ""), {}), "ok").text
