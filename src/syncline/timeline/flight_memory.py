"""Owns the memory of flight records (``engine.flight``), which outlives the processes that write to it.

A local launcher makes anonymous memory for all its processes, which inherit the descriptor (``FlightMemory``). Nothing
is in any file system until a run has ended badly. Otherwise ``SYNCLINE_FLIGHT=flight.json`` makes each process map a
file in the folder ``flight.json.parts``, which belongs to this user alone (``folder``). A process removes its file at
an end without a failure; ``syncline flight`` merges the files that are left.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..engine.flight import BYTES, HEAD, MAGIC, RUNNING, UNUSED, Flight
from ..errors import UsageError
from ..kernels.private import NotPrivateError, new_file, private_folder, read_file
from ..wire.reports import first_time, say
from .flight import FlightRecord, ProcessFlight, merge, parse
from .folder import checked_target, folder_of, make_folder

VARIABLE = "SYNCLINE_FLIGHT"
"""The environment variable with the file of the record, or ``OFF``."""

MEMORY = "SYNCLINE_FLIGHT_MEMORY"
"""The environment variable with the descriptor of a launcher's memory."""

PROCESS = "SYNCLINE_PROCESS"
"""The environment variable with the launcher's number of a process."""

OFF = "off"

_NAME = "syncline-flight"
_SUFFIX = ".flight"


def flight_target(path: str | Path) -> Path:
    """The absolute path of a flight record's file. Raises UsageError if no such file can be made."""
    return checked_target(path, "flight record", "flight", (".json",))


class FlightMemory:
    """A launcher's memory for this number of processes' records, none for 0. They must inherit ``fds``."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self.fds: tuple[int, ...] = ()
        if processes:
            self.fds = (os.memfd_create(_NAME, os.MFD_CLOEXEC),)
            os.ftruncate(self.fds[0], processes * BYTES)

    def environ(self) -> dict[str, str]:
        """The variables for the environment of the processes."""
        return {MEMORY: "".join(map(str, self.fds)), VARIABLE: ""}

    def record(self, culprit: int = -1, ended: Mapping[int, str] | None = None) -> FlightRecord | None:
        """The record of a run that has ended; None if no process was in the middle of it."""
        parts, wrong, known = dict[int, ProcessFlight](), list[str](), ended or {}
        for process in range(self._processes):
            try:
                part = parse(os.pread(self.fds[0], BYTES, process * BYTES), known.get(process, ""))
            except ValueError as error:
                wrong.append(f"the record of process {process} cannot be read: {error}")
            else:
                parts |= {} if part is None else {process: part}
        runs = Counter(part.run for part in parts.values())
        kept = {process: part for process, part in parts.items() if part.run == max(runs, key=lambda run: runs[run])}
        if len(kept) < len(parts):  # groups of torch that each are a run of their own
            wrong.append(f"records of other groups are left out: {len(parts) - len(kept)}")
        if any((process, self._processes) != (part.process, part.processes) for process, part in kept.items()):
            return merge(kept.values(), wrong)  # the launcher numbers the processes otherwise
        return merge(kept.values(), wrong, culprit, known)

    def close(self) -> None:
        """Close the descriptor. The memory is freed when the last process has ended."""
        for fd in self.fds:
            os.close(fd)


class FlightPlace:
    """The memory for this process's record of a session, if there is any. ``name`` distinguishes its sessions.

    Raises UsageError if the folder cannot be used.
    """

    def __init__(self, process: int, name: str) -> None:
        self._path = _path_of(process, name)
        self._memory = _inherited() if self._path is None else _mapped(self._path)

    def begin(self, process: int, **notes: object) -> Flight | None:
        """Begin the record; ``notes`` describe the process."""
        return None if self._memory is None else Flight(self._memory, process, notes, self._end)

    def _end(self, failed: bool) -> None:
        if not failed:
            self.remove()
        elif self._path is not None:
            folder = self._path.parent
            text = f"each process left its part of the flight record in {folder}"
            if first_time(text):
                say(f"syncline: {text}; `syncline flight {folder}` tells who waited for whom\n")

    def remove(self) -> None:
        """Remove the file, and the folder if it is the last one."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
                self._path.parent.rmdir()


def _path_of(process: int, name: str) -> Path | None:
    """The file of a process in the folder that the user's variable names."""
    chosen = os.environ.get(VARIABLE, "")
    if os.environ.get(MEMORY) or chosen in ("", OFF):
        return None
    return folder_of(flight_target(chosen)) / f"process-{process}-{name}{_SUFFIX}"


def _mapped(path: Path) -> mmap.mmap:
    """A new file, mapped. Its space is reserved, because a full disk would kill the process later."""
    make_folder(path.parent)
    try:
        path.unlink(missing_ok=True)
        fd = new_file(path)
        try:
            os.posix_fallocate(fd, 0, BYTES)
            return mmap.mmap(fd, BYTES)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        raise UsageError(
            f"cannot write the flight record {path}: {error.strerror or error}; choose another file for {VARIABLE}, or"
            f" {VARIABLE}={OFF}"
        ) from None


def forget_records(first: int) -> None:
    """Forget the records of a lost session in a launcher's memory: those from process ``first`` on.

    A process that goes on with a lower number replaces an earlier record by its own.
    """
    number = os.environ.get(MEMORY, "")
    with suppress(OSError, ValueError):
        fd = int(number)
        if str(Path(f"/proc/self/fd/{fd}").readlink()) != f"/memfd:{_NAME} (deleted)":
            return
        for at in range(first * BYTES, os.fstat(fd).st_size, BYTES):
            os.pwrite(fd, UNUSED.to_bytes(4, "little"), at + len(MAGIC))


def _inherited() -> mmap.mmap | None:
    """This process's part of a launcher's memory. None without a descriptor, or while its other session uses it."""
    number, process = os.environ.get(MEMORY, ""), os.environ.get(PROCESS, "")
    if not (number.isdecimal() and process.isdecimal()):
        return None
    try:
        found, at = str(Path(f"/proc/self/fd/{int(number)}").readlink()), int(process) * BYTES
        if found != f"/memfd:{_NAME} (deleted)" or os.fstat(int(number)).st_size < at + BYTES:
            return None
        memory = mmap.mmap(int(number), BYTES, offset=at)
        _, state, *_, pid = HEAD.unpack_from(memory)
        return None if (state, pid) == (RUNNING, os.getpid()) else memory
    except (OSError, ValueError):  # ValueError: Python limits the digits of a number
        return None


def record_in(folder: Path) -> FlightRecord | None:
    """The record of the last run whose processes left files in a folder; None if there are none.

    Files that other users could have written are refused with UsageError.
    """
    parts, wrong = list[tuple[int, ProcessFlight]](), list[str]()
    try:
        with private_folder(folder) as fd:
            names = os.listdir(fd)  # noqa: PTH208 - a descriptor
            for name in sorted(name for name in names if name.endswith(_SUFFIX)):
                try:
                    found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if found.st_size != BYTES:  # before it is read: it may be large
                        raise ValueError(f"it has {found.st_size} bytes")
                    part = parse(read_file(fd, name, folder / name))
                except ValueError as error:
                    wrong.append(f"{folder / name} is not a part of a flight record: {error}")
                else:
                    parts += [] if part is None else [(found.st_mtime_ns, part)]
    except NotPrivateError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror or error}") from None
    last = max((one[0], one[1].run) for one in parts)[1] if parts else ""
    kept = [part for _, part in parts if part.run == last]
    if len(kept) < len(parts):
        count = len(parts) - len(kept)
        wrong.append(f"{count} part{'s' * (count > 1)} of earlier runs {'are' if count > 1 else 'is'} left out")
    return merge(kept, wrong)
