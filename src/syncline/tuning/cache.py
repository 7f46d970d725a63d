"""Tables of measured algorithms kept between runs, one small JSON file for each set of machines.

They are in ``$XDG_CACHE_HOME/syncline/tuning``, by default under ``~/.cache``. A table is valid for these processes on
these hosts since their last boot, with these cores, this transport, these candidate algorithms and this version of
Syncline; a change of any selects another file. A file that cannot be read, or that another user could have written
(``kernels.private``), is ignored. If a table cannot be written, the next run measures again. Neither ends a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path

from ..errors import UsageError
from ..kernels.private import NotPrivateError, cache_home, path_of, private_folder, read_file
from ..strategy.choice import Choice
from ..version import __version__

log = logging.getLogger("syncline")

_FOLDERS = "syncline", "tuning"

_MOST_FILES = 64
"""The oldest tables beyond this number are removed, since every reboot and every lab makes new ones."""


def key_of(
    transport: str, places: Sequence[tuple[str, str, int]], plans: Mapping[str, str], *, tries: bool = False
) -> str:
    """The name of the table for processes in these places, each given by host, machine and number of cores.

    ``plans`` has the candidate algorithms with a digest of each, so that an algorithm installed later is measured too.
    A run that ``tries`` schedules chooses from fewer algorithms, and so has a table of its own.
    """
    facts = [__version__, _source_digest(), transport, [list(place) for place in places], sorted(plans.items()), tries]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def read(key: str) -> Choice | None:
    """The table with this name; None if it is missing or cannot be read."""
    path = cache_home().joinpath(*_FOLDERS)
    try:
        with _folder() as folder:
            return Choice.read(json.loads(read_file(folder, f"{key}.json", path))["algorithms"])
    except FileNotFoundError:
        return None
    except (OSError, NotPrivateError, ValueError, KeyError, TypeError, UsageError, RecursionError) as error:
        log.warning("ignoring the measured algorithms in %s: %s", path / f"{key}.json", error)
        return None


def write(key: str, choice: Choice, sizes: Sequence[int], times_s: Mapping[str, Sequence[float]]) -> None:
    """Keep a table and the times behind it. A reader never sees a partial file."""
    content = {"algorithms": choice.table, "sizes": list(sizes), "times_s": {k: list(v) for k, v in times_s.items()}}
    try:
        with _folder() as opened:
            folder = path_of(opened)
            with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".new", delete=False) as file:
                json.dump(content, file)
            Path(file.name).replace(folder / f"{key}.json")
            _remove_oldest(folder)
    except (OSError, NotPrivateError) as error:
        log.info("the measured algorithms are not stored: %s", error)


def _remove_oldest(folder: Path) -> None:
    def written(path: Path) -> float:
        with contextlib.suppress(FileNotFoundError):  # another run has removed it
            return path.stat().st_mtime
        return 0.0

    for path in sorted(folder.glob("*.json"), key=written)[:-_MOST_FILES]:
        path.unlink(missing_ok=True)


def _folder() -> AbstractContextManager[int]:
    return private_folder(cache_home(), *_FOLDERS)


@lru_cache(maxsize=1)
def _source_digest() -> str:
    """A digest that changes with any source file that affects times, by file sizes and modification times."""
    root = Path(__file__).parent.parent
    facts = [
        (str(path.relative_to(root)), found.st_size, found.st_mtime_ns)
        for folder in (root, *(root / name for name in ("algorithms", "kernels", "transports", "wire")))
        for path in sorted(folder.glob("*.py"))
        for found in (path.stat(),)
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
