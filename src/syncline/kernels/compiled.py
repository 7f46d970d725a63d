"""Compiling for good: the decorator of the functions that Python calls, and where their machine code is kept.

Numba keeps machine code beside a function's source and looks at that file alone, not at the functions compiled in from
others. So the code is kept in a folder named after the text of all kernels: whoever changes one compiles anew. The
folder is in the user's cache (``XDG_CACHE_HOME``, ``~/.cache``), or a temporary one where that cannot be written;
``NUMBA_CACHE_DIR`` overrides both. What is loaded from it is run, and Numba unpickles it: a place where somebody else
could have put something is not used (``private``), with one warning, and without a place every process compiles for
itself. So does one that has waited too long for another one that compiles, and may have been stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from numba import config, njit
from numba.core.caching import _CacheLocator

from .private import NotPrivateError, cache_home, check_contents, keep_private, path_of, private_folder

log = logging.getLogger("syncline")

LOCK_S = 60.0
"""How long a process waits for others that compile before it does so for itself."""

_one_thread = threading.RLock()
"""Numba's setting is the process's."""


class Place(NamedTuple):
    """A folder for machine code: ``names``, one below the other, in ``root``."""

    root: Path
    names: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The whole path."""
        return self.root.joinpath(*self.names)


def compiled(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for ``signature`` now, or load it, without the interpreter lock when it runs.

    Functions that it calls need no more than ``numba.njit(nogil=True)``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        with _one_thread, contextlib.ExitStack() as stack:
            place = _place()
            try:
                folder = None if place is None else stack.enter_context(private_folder(*_flat(place)))
                if folder is not None:
                    stack.enter_context(_alone(folder))
            except (OSError, NotPrivateError):  # it has changed since it was looked at, or others do not let go of it
                folder = None
            if folder is None:
                return njit(signature, nogil=True)(function)
            stack.callback(setattr, config, "CACHE_DIR", config.CACHE_DIR)
            config.CACHE_DIR = str(path_of(folder))
            made = njit(signature, nogil=True, cache=True)(function)
            if made.stats.cache_misses:
                keep_private(folder)
            return made

    return decorate


@contextlib.contextmanager
def _alone(folder: int) -> Iterator[None]:
    """One process compiles while the others of a run wait to load what it made; TimeoutError after the limit."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open("lock", flags, 0o600, dir_fd=folder)
    try:
        _lock(lock)
        yield
    finally:
        os.close(lock)


def _lock(fd: int) -> None:
    """Lock a file, looking again and again: nobody says that a lock is free to those who wait within a limit."""
    wait_s = 0.0005
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= _deadline():
                _warn()
                raise TimeoutError("the folder for machine code stays locked") from None
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.05)


@lru_cache(maxsize=1)
def _deadline() -> float:
    """Until when this process waits for others that compile: for all its functions together."""
    return time.monotonic() + LOCK_S


@lru_cache(maxsize=1)
def _warn() -> None:
    log.warning(
        "another process has locked the folder for machine code for more than %.0f s (is it stopped?): not using it",
        LOCK_S,
    )


def folder_name(sources: Path) -> str:
    """The name of the folder for the machine code of the kernels in a folder: another one whenever a text changes."""
    digest = hashlib.sha256()
    for source in sorted(sources.glob("*.py")):
        digest.update(source.read_bytes())
    return f"kernels-{digest.hexdigest()[:16]}"


@lru_cache(maxsize=1)
def _place() -> Place | None:
    """Where machine code is kept; None when there is no place that only this user can write to."""
    refused = []
    for place in _places():
        try:
            with private_folder(*_flat(place)) as folder:
                if not os.access(path_of(folder), os.W_OK):
                    continue
                with _alone(folder):  # what another process has just made is its own before it lets go
                    _check(folder, place)
        except NotPrivateError as error:
            refused.append(str(error))
        except OSError:
            continue
        else:
            break
    else:
        place = None
    if refused:
        instead = "every process compiles for itself" if place is None else f"it is kept in {place.path}"
        log.warning("machine code is not loaded from where others could have put it; %s. %s", instead, refused[0])
    return place


def _places() -> list[Place]:
    if config.CACHE_DIR:
        return [Place(Path(config.CACHE_DIR))]
    name = folder_name(Path(__file__).parent)
    temporary = Path(tempfile.gettempdir())
    return [Place(cache_home(), ("syncline", name)), Place(temporary, (f"syncline-{os.getuid()}", name))]


def _check(folder: int, place: Place) -> None:
    """Raise NotPrivateError for anything that others could have written; NUMBA_CACHE_DIR has their code beside ours."""
    ours = _CacheLocator.get_suitable_cache_subpath(__file__)
    check_contents(folder, place.path, None if place.names else ours)
    with private_folder(path_of(folder), ours):  # made here, or Numba would make it as the umask says
        pass


def _flat(place: Place) -> tuple[Any, ...]:
    return place.root, *place.names
