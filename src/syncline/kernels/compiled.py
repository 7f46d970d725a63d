"""Compiling for good: the decorator of the functions that Python calls, and where their machine code is kept.

Numba keeps machine code beside a function's source and looks at that file alone, not at the functions compiled in from
others. So the code is kept in a folder named after the text of all kernels: whoever changes one compiles anew. The
folder is the user's cache (``XDG_CACHE_HOME``, ``~/.cache``), or a temporary one where that cannot be written;
``NUMBA_CACHE_DIR`` overrides both.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba import config, njit


def compiled(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for ``signature`` now, or load it, without the interpreter lock when it runs.

    Functions that it calls need no more than ``numba.njit(nogil=True)``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        before = config.CACHE_DIR
        config.CACHE_DIR = before or _folder()
        try:
            with _alone(Path(config.CACHE_DIR)):
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


@lru_cache(maxsize=1)
def _folder() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "syncline"
    try:
        (cache / name).mkdir(parents=True, exist_ok=True)
    except OSError:
        return str(Path(tempfile.gettempdir(), f"syncline-{os.getuid()}", name))
    return str(cache / name)
