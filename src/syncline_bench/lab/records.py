"""Owns the records of this machine's labs: a folder for each under /run, their lock, and whether their owners live.

A lab's owner is the process that created it. The owner is dead if no process has its number, if a later process has the
number (its start time differs), or if the machine was rebooted. Of the contents of a lab, this module knows only the
processes that hold its hosts.

All changes happen under one lock (flock(2), which the kernel releases when its holder dies). Two starts therefore never
remove or claim the same lab.

Names and addresses follow from the lab's name, so a host's name identifies its lab. Labs cannot reach each other, so
two labs may have the same addresses; different addresses only keep logs readable.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import IO

from syncline.errors import UsageError

MAX_HOSTS = 200

_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
_HOST = re.compile(r"(?P<lab>[a-z][a-z0-9-]{0,30})-h(?P<host>\d{1,3})")


def check_name(name: str) -> str:
    """Return ``name`` if host names can contain it, else raise UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be a lab's name: use up to 31 small letters, digits and hyphens, beginning with a letter"
        )
    return name


def free_name(taken: Collection[str]) -> str:
    """The first of lab0, lab1, ... that is not taken."""
    return next(name for name in (f"lab{number}" for number in range(len(taken) + 1)) if name not in taken)


def host_name(lab: str, host: int) -> str:
    """The name of a host, also its UTS name."""
    return f"{lab}-h{host}"


def read_host_name(text: str) -> tuple[str, int]:
    """The lab and the number of the host with this name. Raises UsageError if it is not a host's name."""
    found = _HOST.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is not a host of a lab: hosts are called NAME-h0, NAME-h1, ...")
    return found["lab"], int(found["host"])


def network(lab: str) -> IPv4Network:
    """The network of a lab: 256 addresses of the private range 10.0.0.0/8."""
    digest = hashlib.sha256(lab.encode()).digest()
    return IPv4Network(f"10.{digest[0]}.{digest[1]}.0/24")


def address(lab: str, host: int) -> str:
    """A host's address in its lab's network."""
    return str(network(lab)[host + 1])


def hosts_file(lab: str, hosts: int) -> str:
    """The text of /etc/hosts on every host of a lab.

    Programs that serve both versions of IP on one socket (PyTorch's store) look up IPv4 addresses in their mapped form.
    A lab has no name server to answer, so mapped addresses have lines of their own.
    """
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for host in range(hosts):
        lines.append(f"{address(lab, host)} {host_name(lab, host)}")
        lines.append(f"::ffff:{address(lab, host)} {host_name(lab, host)}.mapped")
    return "\n".join(lines) + "\n"


ROOT = Path("/run/syncline/labs")

_RECORD = "lab.json"
_LOCK_S = 60.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Owner:
    """Identifies a process, even if a later process gets its number."""

    pid: int
    started: int
    boot: str

    @property
    def alive(self) -> bool:
        """Whether the process is still running."""
        return self == _process(self.pid)


@dataclass(frozen=True)
class Record:
    """A lab on record. ``mark`` is in the mounts of its processes; ``holders`` are its hosts' processes, in order."""

    name: str
    owner: Owner
    mark: str
    hosts: int
    rate: float | None
    holders: tuple[int, ...] = ()


class Registry:
    """The labs of this machine, recorded under ``root``."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root

    def folder(self, name: str) -> Path:
        """The folder of a lab's files."""
        return self.root / name

    def read(self, name: str) -> Record | None:
        """A lab's record; None if it is missing or unreadable."""
        try:
            values = json.loads((self.folder(name) / _RECORD).read_text())
            values |= {"owner": Owner(**values["owner"]), "holders": tuple(values["holders"])}
            return Record(**values)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def labs(self) -> list[Record]:
        """All labs, dead ones included, in the order of their names."""
        return [record for name in self._names() if (record := self.read(name)) is not None]

    def claim(self, name: str | None, hosts: int, rate: float | None, end: Callable[[str], None]) -> Record:
        """Record a new lab of this process under ``name``, or the first free name, after the removal of dead labs.

        ``end`` is called with a dead lab's mark and ends its processes. Raises UsageError if a live lab has the name.
        """
        if name is not None:
            check_name(name)
        with self._locked():
            self._clean(end)
            taken = self.read(name) if name is not None else None
            if taken is not None:
                raise UsageError(
                    f"a lab called {taken.name!r} is running (process {taken.owner.pid}): choose another name, or leave"
                    " it out"
                )
            chosen = free_name(self._names()) if name is None else name
            mark = f"syncline-{chosen}-{secrets.token_hex(8)}"
            record = Record(chosen, this_process(), mark, hosts, rate)
            self.folder(chosen).mkdir(mode=0o755)
            self._write(record)
        return record

    def complete(self, record: Record, holders: tuple[int, ...]) -> Record:
        """Add the processes that hold the hosts to the record, for commands that enter hosts. Returns the record."""
        known = replace(record, holders=holders)
        self._write(known)
        return known

    def release(self, record: Record) -> None:
        """Remove the record of a lab that this process has taken down."""
        with self._locked():
            found = self.read(record.name)
            if found is None or found.mark == record.mark:
                shutil.rmtree(self.folder(record.name), ignore_errors=True)

    def clean(self, end: Callable[[str], None]) -> list[str]:
        """Remove the processes and folders of dead labs. Returns their names."""
        with self._locked():
            return self._clean(end)

    def _clean(self, end: Callable[[str], None]) -> list[str]:
        removed = []
        for name in self._names():
            record = self.read(name)
            if record is not None and record.owner.alive:
                continue
            if record is not None:
                end(record.mark)
            # A folder without a record belongs to a start that died between two steps.
            shutil.rmtree(self.folder(name), ignore_errors=True)
            removed.append(name)
        return removed

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.root.glob("*") if path.is_dir())

    def _write(self, record: Record) -> None:
        """Write the record atomically, because readers take no lock."""
        target = self.folder(record.name) / _RECORD
        fresh = target.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(record)))
        fresh.replace(target)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
        deadline = time.monotonic() + _LOCK_S
        with (self.root / ".lock").open("w") as lock:
            while not _try_lock(lock):
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"another process has held {self.root / '.lock'} for {_LOCK_S:.0f} s while it starts or removes"
                        " a lab: see what it waits for, or end it"
                    )
                time.sleep(_POLL_S)
            yield


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def this_process() -> Owner:
    """The calling process. Raises UsageError if /proc does not show it."""
    found = _process(os.getpid())
    if found is None:
        raise UsageError("/proc does not show this process: a lab needs the /proc of its own PID namespace, mount it")
    return found


def _process(pid: int) -> Owner | None:
    """The process with this number; None if there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else Owner(pid, int(fields[19]), boot)
