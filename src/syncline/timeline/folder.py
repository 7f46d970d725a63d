"""Where a timeline goes, and the folder beside it in which processes keep their parts.

Owns what is checked before anything runs, and the variables that tell processes: ``SYNCLINE_TRACE``, which anybody may
set, names the file, and ``SYNCLINE_TRACE_PARTS`` the folder, which a launcher sets that puts parts together itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from ..errors import UsageError
from .spans import SUFFIXES, ProcessSpans, SpanFile, read

VARIABLE = "SYNCLINE_TRACE"
PARTS = "SYNCLINE_TRACE_PARTS"

_NAMES = ".json", ".json.gz"


def checked_target(path: str | Path) -> Path:
    """The file of a timeline, absolute; raises UsageError where none of that name can be."""
    found = Path(path).absolute()
    if not found.name.endswith(_NAMES) or found.name in _NAMES:
        raise UsageError(f"a timeline is a file such as trace.json.gz or trace.json, not {str(path)!r}")
    if found.is_dir():
        raise UsageError(f"{found} is a folder: name a file in it")
    if not found.parent.is_dir():
        raise UsageError(
            f"there is no folder {found.parent} on {socket.gethostname()} for the timeline {found.name}: make it, on"
            " all hosts, or choose another path"
        )
    return found


def folder_of(target: Path) -> Path:
    """Where the parts of a timeline lie until it is made of them."""
    return target.with_name(f"{target.name}.parts")


def make_folder(folder: Path) -> None:
    """Make it, if it is not there; raises UsageError where that cannot be."""
    try:
        folder.mkdir(exist_ok=True)
        probe = folder / f".{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}; choose another path") from None


def open_part(folder: Path, process: int, session: int) -> SpanFile:
    """The files of a process, for its session of that number; raises UsageError where they cannot be made."""
    make_folder(folder)
    try:
        return SpanFile(folder, f"process-{process}-{session}", {"process": process, "session": session})
    except OSError as error:
        raise UsageError(f"cannot record in {folder}: {error.strerror or error}; choose another path") from None


def read_parts(folder: Path) -> tuple[list[ProcessSpans], list[str]]:
    """What lies there, by process and session, and what is wrong with files that cannot be read."""
    found, wrong = list[ProcessSpans](), list[str]()
    for path in sorted(folder.glob(f"process-*{SUFFIXES[0]}"), key=_place):
        try:
            found.append(read(path))
        except UsageError as error:
            wrong.append(str(error))
    return found, wrong


def _place(path: Path) -> tuple[int, ...]:
    numbers = path.stem.split("-")[1:]
    return tuple(int(number) if number.isdecimal() else -1 for number in numbers)


def remove_parts(folder: Path) -> None:
    """Remove the parts, and folders that are empty then, whatever else is there."""
    for suffix in SUFFIXES:
        for path in folder.glob(f"process-*{suffix}"):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
