"""Tables of algorithms kept between runs: one small JSON file per set of machines.

They lie in ``$XDG_CACHE_HOME/syncline/tuning`` (``~/.cache``). A table holds for these processes on these hosts, since
they were started, with these cores, this transport, these algorithms to choose from and this version of Syncline;
anything else is another file. A file that cannot be read, or that another user could have written
(``kernels.private``), is as good as none, and a table that cannot be written is measured again: neither is worth ending
a run for.
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
"""Machines start anew and labs come and go: the oldest tables are removed."""


def key_of(
    transport: str, places: Sequence[tuple[str, str, int]], plans: Mapping[str, str], *, tries: bool = False
) -> str:
    """The name of the table for processes in these places: the host, machine and number of cores of each.

    ``plans`` are the algorithms to choose from with a digest of each: one that is installed later is measured too. A
    run that ``tries`` schedules chooses from fewer of them, so it keeps a table of its own.
    """
    facts = [__version__, _source_digest(), transport, [list(place) for place in places], sorted(plans.items()), tries]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def read(key: str) -> Choice | None:
    """The table of that name, None when there is none that can be read."""
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
    """Keep a table, with the times that it follows from; the file is whole at every moment."""
    content = {"algorithms": choice.table, "sizes": list(sizes), "times_s": {k: list(v) for k, v in times_s.items()}}
    try:
        with _folder() as opened:
            folder = path_of(opened)
            with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".new", delete=False) as file:
                json.dump(content, file)
            Path(file.name).replace(folder / f"{key}.json")
            _remove_oldest(folder)
    except (OSError, NotPrivateError) as error:
        log.info("the measured algorithms are not kept: %s", error)


def _remove_oldest(folder: Path) -> None:
    def written(path: Path) -> float:
        with contextlib.suppress(FileNotFoundError):  # another run tidies up too
            return path.stat().st_mtime
        return 0.0

    for path in sorted(folder.glob("*.json"), key=written)[:-_MOST_FILES]:
        path.unlink(missing_ok=True)


def _folder() -> AbstractContextManager[int]:
    return private_folder(cache_home(), *_FOLDERS)


@lru_cache(maxsize=1)
def _source_digest() -> str:
    """Changes when any file of the package does; by size and time of change, which cost no reading."""
    root = Path(__file__).parent.parent
    facts = [
        (str(path.relative_to(root)), found.st_size, found.st_mtime_ns)
        for folder in (root, *(root / name for name in ("algorithms", "kernels", "transports", "wire")))
        for path in sorted(folder.glob("*.py"))
        for found in (path.stat(),)
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
