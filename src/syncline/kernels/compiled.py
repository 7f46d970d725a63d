"""Compiling for good: the decorator of the functions that Python calls, and where their machine code is kept.

Numba keeps machine code beside a function's source and looks at that file alone, not at the functions compiled in from
others. So the code is kept in a folder named after the text of all kernels: whoever changes one compiles anew. The
folder is the user's cache (``XDG_CACHE_HOME``, ``~/.cache``), or a temporary one where that cannot be written;
``NUMBA_CACHE_DIR`` overrides both. What is loaded from it is run: a temporary folder of somebody else is not used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba import config, njit

_one_thread = threading.RLock()
"""Numba's setting is the process's."""


def compiled(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for ``signature`` now, or load it, without the interpreter lock when it runs.

    Functions that it calls need no more than ``numba.njit(nogil=True)``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        before = config.CACHE_DIR
        folder = before or _folder()
        if folder is None:
            return njit(signature, nogil=True)(function)
        with _one_thread:
            config.CACHE_DIR = folder
            try:
                with _alone(Path(folder)):
                    return njit(signature, nogil=True, cache=True)(function)
            finally:
                config.CACHE_DIR = before

    return decorate


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process compiles while the others of a run wait to load what it made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError:  # not writable: everybody compiles
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def folder_name(sources: Path) -> str:
    """The name of the folder for the machine code of the kernels in a folder: another one whenever a text changes."""
    digest = hashlib.sha256()
    for source in sorted(sources.glob("*.py")):
        digest.update(source.read_bytes())
    return f"kernels-{digest.hexdigest()[:16]}"


@lru_cache(maxsize=1)
def _folder() -> str | None:
    """Where machine code is kept; None when there is no place that only this user can write to."""
    name = folder_name(Path(__file__).parent)
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    for place in (Path(cache, "syncline"), Path(tempfile.gettempdir(), f"syncline-{os.getuid()}")):
        folder = place / name
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(exist_ok=True)
            owned = place.stat().st_uid == os.getuid() and not place.stat().st_mode & stat.S_IWOTH
        except OSError:
            continue
        if owned and os.access(folder, os.W_OK):
            return str(folder)
    return None
