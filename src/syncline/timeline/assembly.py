"""Merges parts of timelines: of the runs that this process starts, or those left in a folder.

The parts of one run are in one folder. Several runs, for example of a comparison, have one folder each, which also
contains the run's title, inside the folder beside the timeline. Unreadable parts are skipped and reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from ..errors import UsageError
from .chrome import RecordedRun, Written, write
from .folder import PARTS, VARIABLE, checked_target, folder_of, make_folder, read_parts, remove_parts

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
