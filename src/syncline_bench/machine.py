"""Describes the origin of a measurement: processor, memory, usable cores, package versions and the commit of the code.

A fact that cannot be read becomes "unknown" or None and never fails a measurement. Host names are left out, because
result files are meant for publication.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import syncline

_OURS = Path(syncline.__file__).resolve().parent, Path(__file__).resolve().parent
_GIT_LIMIT_S = 5.0
_PACKAGES = ("torch", "numpy", "syncline")
_PLENTY_BYTES = 1 << 62


@dataclass(frozen=True)
class Machine:
    """The origin of a result file. ``modified`` says whether the checkout differs from ``commit``."""

    description: str
    cores: int
    versions: dict[str, str]
    commit: str | None
    modified: bool | None


def describe() -> Machine:
    """Describe the machine and code of this process. Takes some milliseconds and two calls of git."""
    commit = _commit(_OURS[0])
    return Machine(
        description=", ".join(
            (platform.machine(), _processor(), _memory(), f"{platform.system()} {platform.release()}")
        ),
        # The usable cores: shared machines and containers restrict a process to some of the machine's cores.
        cores=len(os.sched_getaffinity(0)),
        versions={"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        commit=commit,
        modified=None if commit is None else _modified(*_OURS),
    )


def available_memory_bytes() -> int:
    """The memory that is available without swapping: the kernel's estimate, or the rest of the cgroup's limit."""
    found = _PLENTY_BYTES
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            found = int(line.split()[1]) * 1024
    with contextlib.suppress(ValueError):
        found = min(found, max(0, int(control_group("memory.max")) - int(control_group("memory.current"))))
    return found


def control_group(name: str) -> str:
    """A value of this process's control group, such as ``pids.max``; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").strip().rpartition("::")[2].lstrip("/")
        return (Path("/sys/fs/cgroup") / group / name).read_text(encoding="utf-8").strip()
    return ""


def source_sha256() -> str:
    """A digest of all Python files of the library and the laboratory, which identifies code that is not committed."""
    digest = hashlib.sha256()
    for package in _OURS:
        for path in sorted(package.rglob("*.py")):
            digest.update(str(path.relative_to(package.parent)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def provenance() -> dict[str, Any]:
    """The fields of every result file that describe its machine, code and start time."""
    machine = describe()
    return {
        "machine": machine.description,
        "cores": machine.cores,
        "versions": machine.versions,
        "commit": machine.commit,
        "modified": machine.modified,
        "source_sha256": source_sha256(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown processor"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown processor")


def _memory() -> str:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return f"{pages * page_bytes / 2**30:.1f} GiB"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # A package that runs from its source tree is not installed, but may have a __version__.
        return str(getattr(sys.modules.get(package), "__version__", "unknown"))


def _commit(package: Path) -> str | None:
    """The commit of the checkout that contains ``package``; None if the package is installed elsewhere."""
    answer = _git(package, "rev-parse", "--show-toplevel", "HEAD")
    if answer is None or answer.returncode != 0:
        return None
    top, commit = answer.stdout.split("\n")[:2]
    # A virtual environment may lie inside another project's checkout, whose commit would be wrong.
    return commit if Path(top).resolve() / "src" / package.name == package else None


def _modified(*packages: Path) -> bool | None:
    answer = _git(packages[0], "status", "--porcelain", "--", *map(str, packages))
    return None if answer is None or answer.returncode != 0 else bool(answer.stdout.strip())


def _git(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
