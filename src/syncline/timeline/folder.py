"""Validates the path of a timeline, and owns and merges the parts of processes in the folder beside it.

Environment variables pass the paths to processes: ``SYNCLINE_TRACE``, which users may set, names the file, and
``SYNCLINE_TRACE_PARTS`` the folder; a launcher sets the latter if it merges the parts itself.

The file may be in a folder that others can write to, such as /tmp. The folder of parts belongs to this user alone or is
not used: no other user can plant links there that would be followed, or read the names of scripts there.

``Assembly`` merges the parts. Each run that its process starts has a subfolder, which also contains the run's title.
Other runs have their parts directly in the folder. Unreadable parts are skipped and reported.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from ..errors import UsageError
from ..kernels.private import NotPrivateError, new_file, path_of, private_folder
from .chrome import RecordedRun, Written, write
from .spans import SUFFIXES, ProcessSpans, SpanFile, read

VARIABLE = "SYNCLINE_TRACE"
PARTS = "SYNCLINE_TRACE_PARTS"

_NAMES = ".json.gz", ".json"


def checked_target(
    path: str | Path, what: str = "timeline", stem: str = "trace", names: Sequence[str] = _NAMES
) -> Path:
    """The absolute path of a timeline, or of ``what`` else. Raises UsageError if no such file can be made."""
    found = Path(path).absolute()
    if not found.name.endswith(tuple(names)) or found.name in names:
        such = " or ".join(f"{stem}{name}" for name in names)
        raise UsageError(f"a {what} is a file such as {such}, not {str(path)!r}")
    if found.is_dir():
        raise UsageError(f"{found} is a folder: name a file in it")
    if not found.parent.is_dir():
        raise UsageError(
            f"there is no folder {found.parent} on {socket.gethostname()} for the {what} {found.name}: make it, on"
            " all hosts, or choose another path"
        )
    return found


def folder_of(target: Path) -> Path:
    """The folder of the parts until they are merged."""
    return target.with_name(f"{target.name}.parts")


def make_folder(folder: Path) -> None:
    """Create it for this user alone if it is missing. UsageError if it cannot be created or belongs to another user."""
    try:
        with private_folder(folder.parent, folder.name) as fd:
            if os.fstat(fd).st_uid == os.geteuid():  # an earlier run or the umask may have left it readable for others
                os.fchmod(fd, 0o700)
            probe = path_of(fd) / f".{secrets.token_hex(8)}"  # processes of other hosts may use this folder, too
            os.close(new_file(probe))
            probe.unlink(missing_ok=True)
    except NotPrivateError as error:
        raise UsageError(f"{error}, or choose another path") from None
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}; choose another path") from None


def part_name(process: int, session: int) -> str:
    """The name of a process's files, without their suffixes."""
    return f"process-{process}-{session}"


def open_part(folder: Path, process: int, session: int) -> SpanFile:
    """The files of a process for the given session number. Raises UsageError if they cannot be made."""
    make_folder(folder)
    try:
        return SpanFile(folder, part_name(process, session), {"process": process, "session": session})
    except OSError as error:
        raise UsageError(f"cannot record in {folder}: {error.strerror or error}; choose another path") from None


def read_parts(folder: Path) -> tuple[list[ProcessSpans], list[str]]:
    """The parts in a folder, by process and session, and what is wrong with files that were skipped.

    Parts that earlier runs left in the same folder are skipped.
    """
    found, wrong, last_s = list[ProcessSpans](), list[str](), -math.inf
    last: object = None
    for path in sorted(folder.glob(f"process-*{SUFFIXES[0]}"), key=_place):
        try:
            found.append(read(path))
        except UsageError as error:
            wrong.append(str(error))
        else:
            if found[-1].notes["session"] == 0 and path.stat().st_mtime > last_s:
                last, last_s = found[-1].notes.get("run"), path.stat().st_mtime
    kept = [part for part in found if part.notes["session"] or part.notes.get("run") == last]
    if len(kept) < len(found):
        count = len(found) - len(kept)
        wrong.append(f"{count} part{'s' * (count > 1)} of earlier runs {'are' if count > 1 else 'is'} left out")
    return kept, wrong


def _place(path: Path) -> tuple[int, ...]:
    numbers = path.stem.split("-")[1:]
    return tuple(int(number) if number.isdecimal() else -1 for number in numbers)


def remove_parts(folder: Path) -> None:
    """Remove the parts, and folders that are empty then; other files stay."""
    for suffix in SUFFIXES:
        for path in folder.glob(f"process-*{suffix}"):
            path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


_TITLE = "title"


class Assembly:
    """The timeline of the runs that this process starts. Raises UsageError if it could not be written.

    Parts that an earlier run left for the same timeline are removed.
    """

    def __init__(self, target: Path) -> None:
        self._target = checked_target(target)
        self._folder = folder_of(self._target)
        make_folder(self._folder)  # validates, before anything is removed from someone else's folder
        _remove(self._folder)
        make_folder(self._folder)
        self._runs = 0

    def environ(self, title: str = "") -> dict[str, str]:
        """The environment for the processes of one more run."""
        folder = self._folder / f"run-{self._runs}"
        self._runs += 1
        make_folder(folder)
        (folder / _TITLE).write_text(title, encoding="utf-8")
        return {PARTS: str(folder), VARIABLE: ""}

    def runs(self) -> Iterator[RecordedRun]:
        """The runs recorded so far."""
        return runs_in(self._folder)

    def finish(self) -> str:
        """Write the timeline and remove the parts. Returns a message for the user."""
        try:
            written = write_all(self._target, self._folder)
        except UsageError as error:
            return f"no timeline: {error}; its parts are in {self._folder}"
        _remove(self._folder)
        return f"timeline: {self._target} ({written.text})" if written else "no timeline: no process joined a run"


def runs_in(folder: Path) -> Iterator[RecordedRun]:
    """The runs whose parts are in a folder, or in its subfolders."""
    folders = sorted(folder.glob("run-*"), key=lambda found: (len(found.name), found.name))
    for found in [folder, *folders]:
        parts, wrong = read_parts(found)
        if wrong or any(part.spans for part in parts):
            title = ""
            with suppress(OSError):
                title = (found / _TITLE).read_text(encoding="utf-8")
            yield RecordedRun(parts, title, wrong)


def write_all(target: Path, folder: Path) -> Written | None:
    """Write a timeline of everything in a folder; None if there is nothing. Raises UsageError if that is impossible."""
    runs = runs_in(folder)
    first = next(runs, None)
    return None if first is None else write(target, chain([first], runs))


def _remove(folder: Path) -> None:
    for found in [*(run for run in folder.glob("run-*") if not run.is_symlink()), folder]:
        (found / _TITLE).unlink(missing_ok=True)
        remove_parts(found)
