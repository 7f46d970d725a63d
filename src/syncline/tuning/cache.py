"""Tables of algorithms kept between runs: one small JSON file per set of machines.

They lie in ``$XDG_CACHE_HOME/syncline/tuning`` (``~/.cache``). A table holds for these processes on these hosts, since
they were started, with these cores, this transport, these algorithms to choose from and this version of Syncline;
anything else is another file. A file that cannot be read is as good as none, and a table that cannot be written is
measured again: neither is worth ending a run for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from ..choice import Choice
from ..errors import UsageError
from ..version import __version__

log = logging.getLogger("syncline")

_MOST_FILES = 64
"""Machines start anew and labs come and go: the oldest tables are removed."""


def key_of(transport: str, places: Sequence[tuple[str, str, int]], plans: Mapping[str, str]) -> str:
    """The name of the table for processes in these places: the host, machine and number of cores of each.

    ``plans`` are the algorithms to choose from with a digest of each: one that is installed later is measured too.
    """
    facts = [__version__, _source_digest(), transport, [list(place) for place in places], sorted(plans.items())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def read(key: str) -> Choice | None:
    """The table of that name, None when there is none that can be read."""
    try:
        return Choice.read(json.loads(_path(key).read_bytes())["algorithms"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
        log.warning("ignoring the measured algorithms in %s: %s", _path(key), error)
        return None


def write(key: str, choice: Choice, sizes: Sequence[int], times_s: Mapping[str, Sequence[float]]) -> None:
    """Keep a table, with the times that it follows from; the file is whole at every moment."""
    content = {"algorithms": choice.table, "sizes": list(sizes), "times_s": {k: list(v) for k, v in times_s.items()}}
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=_folder(), suffix=".new", delete=False) as file:
            json.dump(content, file)
        Path(file.name).replace(_path(key))
        _remove_oldest()
    except OSError as error:
        log.info("the measured algorithms are not kept: %s", error)


def _remove_oldest() -> None:
    def written(path: Path) -> float:
        with contextlib.suppress(FileNotFoundError):  # another run tidies up too
            return path.stat().st_mtime
        return 0.0

    for path in sorted(_folder().glob("*.json"), key=written)[:-_MOST_FILES]:
        path.unlink(missing_ok=True)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "syncline" / "tuning"


def _path(key: str) -> Path:
    return _folder() / f"{key}.json"


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
