"""Folders that nobody but this user can write to: where what is read back may be run, or believed.

A cache is read by the next process, perhaps another day. Whoever can put a file there decides what that process does,
so everything from the cache's own folder down to its files has to belong to this user (or root), be writable by neither
group nor others, and be no link. What was checked is what is used: folders are opened one below the other without
following links, checked by their descriptors, and reached through these from then on (``path_of``). In a folder that
passed, nobody else can put or replace anything; folders above it may be replaced without harm.

A group counts as others: whether it has one member today is not written in the folder.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotPrivateError(Exception):
    """Somebody else could have written there; says where, why, and what to do."""


def cache_home() -> Path:
    """The user's folder for caches: ``XDG_CACHE_HOME``, or ``~/.cache``, or a temporary one of who has no home."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if chosen.is_absolute():
        return chosen
    try:
        return Path("~/.cache").expanduser()
    except RuntimeError:
        return Path(tempfile.gettempdir(), f"syncline-{os.getuid()}")


@contextmanager
def private_folder(root: Path, *names: str) -> Iterator[int]:
    """A descriptor of the folder ``root/names...``; what is missing is made, for this user alone.

    ``root`` itself may be reached by links and belong to anybody, if there are names. Raises NotPrivateError when
    somebody else could write in one of the named folders, OSError when one cannot be opened or made.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, path = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), root
    try:
        if not names:
            _check(os.fstat(fd), path)
        for name in names:
            path /= name
            inner = _open_folder(fd, name, path)
            os.close(fd)
            fd = inner
            _check(os.fstat(fd), path)
        yield fd
    finally:
        os.close(fd)


def _open_folder(parent: int, name: str, path: Path) -> int:
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        if stat.S_ISLNK(os.lstat(name, dir_fd=parent).st_mode):
            raise NotPrivateError(f"{path} is a link: remove it") from None
    return os.open(name, _OPEN | os.O_DIRECTORY, dir_fd=parent)


def path_of(fd: int) -> Path:
    """A path to the very folder that a descriptor stands for, as long as that is open."""
    return Path(f"/proc/self/fd/{fd}")


def check_contents(fd: int, path: Path) -> None:
    """Raise NotPrivateError unless all that lies in an open folder, at any depth, is this user's."""
    for name in os.listdir(fd):
        inner = path / name
        with suppress(FileNotFoundError):  # another process of this user tidies up
            found = os.lstat(name, dir_fd=fd)
            _check(found, inner)
            if stat.S_ISDIR(found.st_mode):
                folder = os.open(name, _OPEN | os.O_DIRECTORY, dir_fd=fd)
                try:
                    check_contents(folder, inner)
                finally:
                    os.close(folder)


def new_file(path: Path, mode: int = 0o600) -> int:
    """A descriptor, for reading and writing, of a file that was not there; no link is followed to one that was."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def read_file(fd: int, name: str, path: Path) -> bytes:
    """The bytes of a file in an open folder; NotPrivateError when somebody else could have written them."""
    try:
        file = os.open(name, _OPEN | os.O_NONBLOCK, dir_fd=fd)
    except OSError:
        _check(os.lstat(name, dir_fd=fd), path / name)
        raise
    with os.fdopen(file, "rb") as opened:
        _check(os.fstat(file), path / name)
        return opened.read()


def _check(found: os.stat_result, path: Path) -> None:
    """Raise NotPrivateError for a link, something not a file or folder, or what others own or can write to."""
    if stat.S_ISLNK(found.st_mode):
        raise NotPrivateError(f"{path} is a link: remove it")
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise NotPrivateError(f"{path} is neither a file nor a folder: remove it")
    if found.st_uid not in (os.geteuid(), 0):
        raise NotPrivateError(f"{path} belongs to another user (uid {found.st_uid}): remove it")
    if found.st_mode & _OTHERS_WRITE:
        who = "everybody" if found.st_mode & stat.S_IWOTH else "its group"
        raise NotPrivateError(f"{path} can be written to by {who}: remove it, or, if you trust them, chmod go-w it")
