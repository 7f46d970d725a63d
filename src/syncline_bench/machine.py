"""Where a measurement was made: processor, memory, cores that may be used, versions, and the commit of the code.

Owns nothing but reading these; every fact that cannot be found out is said to be unknown or None, and never fails a
measurement. No host name is read: result files are meant to be published.
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
    """The facts that a result file carries about its origin."""

    description: str
    cores: int
    versions: dict[str, str]
    commit: str | None
    modified: bool | None


def describe() -> Machine:
    """The machine, cores, versions and commit of this process; takes some milliseconds and two calls of git."""
    commit = _commit(_OURS[0])
    return Machine(
        description=", ".join(
            (platform.machine(), _processor(), _memory(), f"{platform.system()} {platform.release()}")
        ),
        # The cores this process may run on, which on shared machines and in containers are fewer than there are.
        cores=len(os.sched_getaffinity(0)),
        versions={"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        commit=commit,
        modified=None if commit is None else _modified(*_OURS),
    )


def available_memory_bytes() -> int:
    """What this process and its children can still have without swapping: the kernel's estimate, or less by cgroup."""
    found = _PLENTY_BYTES
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            found = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").strip().rpartition("::")[2].lstrip("/")
        folder = Path("/sys/fs/cgroup") / group
        limit, used = (int((folder / name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current"))
        found = min(found, max(0, limit - used))
    return found


def source_sha256() -> str:
    """A digest of the Python files: the same for the same code, committed or not."""
    digest = hashlib.sha256()
    for package in _OURS:
        for path in sorted(package.rglob("*.py")):
            digest.update(str(path.relative_to(package.parent)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def provenance() -> dict[str, Any]:
    """What every result file says of where, when and with which code it was made, as fields of its dataclass."""
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
        # A package used from its source tree is not installed, but may say its version itself.
        return str(getattr(sys.modules.get(package), "__version__", "unknown"))


def _commit(package: Path) -> str | None:
    """The commit of the checkout that ``package`` is the source of; None when it is installed somewhere else."""
    answer = _git(package, "rev-parse", "--show-toplevel", "HEAD")
    if answer is None or answer.returncode != 0:
        return None
    top, commit = answer.stdout.split("\n")[:2]
    # An environment inside another project's checkout must not claim that project's commit.
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
