"""Owns the records of this machine's labs: one folder per lab under /run, the lock over them, and whether owners live.

A lab's owner is the process that created it. The owner is dead if no process has its number, if a later process has the
number (its start time differs), or if the machine was rebooted. Of the contents of a lab, this module knows only the
processes that hold its hosts.

All changes happen under one lock (flock(2), which the kernel releases when its holder dies). Two starts therefore never
remove or claim the same lab.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from syncline.errors import UsageError

from .naming import check_name, free_name

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
