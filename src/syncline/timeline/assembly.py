"""Parts of timelines put together: those of runs that this process starts, or that somebody has left.

The parts of one run lie in one folder; several runs, as of a comparison, have a folder each, with the title of the run
in it, in the one beside the timeline. What cannot be read is left out, and said.
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
    """The timeline of the runs that this process starts; raises UsageError where it could not be written.

    What an earlier run has left of the same timeline goes.
    """

    def __init__(self, target: Path) -> None:
        self._target = checked_target(target)
        self._folder = folder_of(self._target)
        make_folder(self._folder)  # or raise, before anything is removed from somebody else's
        _remove(self._folder)
        make_folder(self._folder)
        self._runs = 0

    def environ(self, title: str = "") -> dict[str, str]:
        """What the processes of one more run need in their environment."""
        folder = self._folder / f"run-{self._runs}"
        self._runs += 1
        make_folder(folder)
        (folder / _TITLE).write_text(title, encoding="utf-8")
        return {PARTS: str(folder), VARIABLE: ""}

    def runs(self) -> Iterator[RecordedRun]:
        """What has been recorded so far."""
        return runs_in(self._folder)

    def finish(self) -> str:
        """Write the timeline and remove the parts; what there is to say of it."""
        try:
            written = write_all(self._target, self._folder)
        except UsageError as error:
            return f"no timeline: {error}; its parts are in {self._folder}"
        _remove(self._folder)
        return f"timeline: {self._target} ({written.text})" if written else "no timeline: no process joined a run"


def runs_in(folder: Path) -> Iterator[RecordedRun]:
    """The runs whose parts lie in a folder, or in folders in it."""
    folders = sorted(folder.glob("run-*"), key=lambda found: (len(found.name), found.name))
    for found in [folder, *folders]:
        parts, wrong = read_parts(found)
        if wrong or any(part.spans for part in parts):
            title = ""
            with suppress(OSError):
                title = (found / _TITLE).read_text(encoding="utf-8")
            yield RecordedRun(parts, title, wrong)


def write_all(target: Path, folder: Path) -> Written | None:
    """Make a timeline of all that lies in a folder, None of nothing; raises UsageError where that is impossible."""
    runs = runs_in(folder)
    first = next(runs, None)
    return None if first is None else write(target, chain([first], runs))


def _remove(folder: Path) -> None:
    for found in [*(run for run in folder.glob("run-*") if not run.is_symlink()), folder]:
        (found / _TITLE).unlink(missing_ok=True)
        remove_parts(found)
