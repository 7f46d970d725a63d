"""Folders that no other user can write to, for files that are later run or trusted.

The next process reads a cache, perhaps on another day, and whoever can put a file there controls that process. So
everything from the cache's own folder down to its files must belong to this user or root, be writable by neither group
nor others, and be no symbolic link. So that nothing changes between check and use, folders are opened one inside the
other without following links, checked by descriptor, and then reached through that descriptor (``path_of``). Nobody
else can put or replace anything in a folder that has passed; a replaced parent folder does no harm.

The group counts as others, because a folder does not show the group's members.
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
    """Another user could have written there; the text says where, why, and what to do."""


def cache_home() -> Path:
    """The user's cache folder: ``XDG_CACHE_HOME``, ``~/.cache``, or a temporary folder for a user without a home."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if chosen.is_absolute():
        return chosen
    try:
        return Path("~/.cache").expanduser()
    except RuntimeError:
        return Path(tempfile.gettempdir(), f"syncline-{os.getuid()}")


@contextmanager
def private_folder(root: Path, *names: str) -> Iterator[int]:
    """A descriptor of the folder ``root/names...``; missing folders are made for this user alone.

    With ``names``, ``root`` itself may belong to anybody and be reached by links. Raises NotPrivateError if another
    user could write in one of the named folders, OSError if one cannot be opened or made.
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
    """A path to the folder that an open descriptor refers to, whatever its name is now."""
    return Path(f"/proc/self/fd/{fd}")


def check_contents(fd: int, path: Path) -> None:
    """Raise NotPrivateError unless everything in an open folder, at any depth, is this user's alone."""
    for name in os.listdir(fd):
        inner = path / name
        with suppress(FileNotFoundError):  # another process of this user has just removed it
            found = os.lstat(name, dir_fd=fd)
            _check(found, inner)
            if stat.S_ISDIR(found.st_mode):
                folder = os.open(name, _OPEN | os.O_DIRECTORY, dir_fd=fd)
                try:
                    check_contents(folder, inner)
                finally:
                    os.close(folder)


def new_file(path: Path, mode: int = 0o600) -> int:
    """Create a file, which must not exist, without following a link; return its descriptor for reading and writing."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def read_file(fd: int, name: str, path: Path) -> bytes:
    """Read a file of an open folder; NotPrivateError if another user could have written it."""
    try:
        file = os.open(name, _OPEN | os.O_NONBLOCK, dir_fd=fd)
    except OSError:
        _check(os.lstat(name, dir_fd=fd), path / name)
        raise
    with os.fdopen(file, "rb") as opened:
        _check(os.fstat(file), path / name)
        return opened.read()


def _check(found: os.stat_result, path: Path) -> None:
    """Raise NotPrivateError for a link, for anything but files and folders, and for anything that others own or can
    write to."""
    if stat.S_ISLNK(found.st_mode):
        raise NotPrivateError(f"{path} is a link: remove it")
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise NotPrivateError(f"{path} is neither a file nor a folder: remove it")
    if found.st_uid not in (os.geteuid(), 0):
        raise NotPrivateError(f"{path} belongs to another user (uid {found.st_uid}): remove it")
    if found.st_mode & _OTHERS_WRITE:
        who = "everybody" if found.st_mode & stat.S_IWOTH else "its group"
        raise NotPrivateError(f"{path} can be written to by {who}: remove it, or, if you trust them, chmod go-w it")
