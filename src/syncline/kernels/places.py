"""The folder in which machine code is kept, and how the processes of a user share it.

It lies in the user's cache (``XDG_CACHE_HOME``, ``~/.cache``), or in a temporary folder where that cannot be written.
What is kept there is run: a folder in which somebody else could have put something is not used (``private``), with one
warning. Files are written in one piece, for this user alone, and by one process at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .private import NotPrivateError, cache_home, check_contents, path_of, private_folder

log = logging.getLogger("syncline")

LOCK_S = 180.0
"""How long a process waits for another one that compiles before it does so for itself."""

LEFT_S = 60.0
"""After so many seconds without a change a folder that no process has locked is one that a killed process has left."""

_given_up = threading.Event()
"""Who has waited so long once does not wait again."""


class CacheFolder(NamedTuple):
    """A folder for machine code: ``names``, one below the other, in ``root``."""

    root: Path
    names: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The whole path."""
        return self.root.joinpath(*self.names)


@cache
def place_for(name: str) -> CacheFolder | None:
    """Where machine code is kept in a folder of that name; None when only others could have such a place."""
    found, refused = None, list[str]()
    for place in _places(name):
        try:
            with private_folder(place.root, *place.names) as folder:
                if not os.access(path_of(folder), os.W_OK):
                    continue
                check_contents(folder, place.path)
        except NotPrivateError as error:
            refused.append(str(error))
        except OSError:
            continue
        else:
            found = place
            break
    if refused:
        instead = "every process compiles for itself" if found is None else f"it is kept in {found.path}"
        log.warning("machine code is not loaded from where others could have put it; %s. %s", instead, refused[0])
    return found


def _places(name: str) -> list[CacheFolder]:
    temporary = Path(tempfile.gettempdir())
    return [CacheFolder(cache_home(), ("syncline", name)), CacheFolder(temporary, (f"syncline-{os.getuid()}", name))]


@contextlib.contextmanager
def of_its_own() -> Iterator[int]:
    """A descriptor of a folder that nobody else uses; it is gone at the end, those of killed processes before."""
    begins = f"syncline-{os.getuid()}-code-"
    for left in Path(tempfile.gettempdir()).glob(f"{begins}*"):
        with contextlib.suppress(OSError, NotPrivateError), private_folder(left.parent, left.name) as folder:
            if time.time() - os.fstat(folder).st_mtime > LEFT_S:  # younger ones may not be locked yet
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=begins) as own, private_folder(Path(own).parent, Path(own).name) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX)  # until whoever has it open ends, programs that are given it too
        yield folder


def keep(folder: int, name: str, what: bytes | Mapping[str, Any]) -> None:
    """Write a file, bytes or JSON, into an open folder: who reads it meanwhile sees the old one, or all of the new."""
    fresh = f"{name}.{secrets.token_hex(8)}"  # homes are shared by machines and containers: no number is one's own
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(fresh, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(what if isinstance(what, bytes) else json.dumps(what, indent=1).encode())
    os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)


@contextlib.contextmanager
def alone(folder: int, what: str) -> Iterator[None]:
    """One process compiles something while the others of a run wait to open it; TimeoutError after the limit."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(f"{what}.lock", flags, 0o600, dir_fd=folder)
    try:
        _lock(lock)
        yield
    finally:
        os.close(lock)


def _lock(fd: int) -> None:
    """Lock a file, looking again and again: nobody says that a lock is free to those who wait within a limit."""
    wait_s, deadline = 0.0005, time.monotonic() + (0 if _given_up.is_set() else LOCK_S)
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                _give_up()
                raise TimeoutError("the folder for machine code stays locked") from None
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.05)


def _give_up() -> None:
    if not _given_up.is_set():
        log.warning(
            "another process has locked the folder for machine code for more than %.0f s (is it stopped?):"
            " not using it",
            LOCK_S,
        )
    _given_up.set()
