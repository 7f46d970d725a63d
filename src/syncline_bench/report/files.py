"""Where results go: a file that is replaced in one piece, or standard output.

Owns what can be found out of a file before there is anything to write, so that nobody measures for hours what then
cannot be kept. Does not know what is written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from syncline.errors import UsageError

STANDARD_OUTPUT = Path("-")
"""Stands for standard output, on which there is nothing else then."""


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` by renaming a finished file over it; raises UsageError where that is impossible.

    Standard output, devices and pipes, which nothing may take the place of, are written to.
    """
    try:
        if path == STANDARD_OUTPUT:
            sys.stdout.write(text)
            sys.stdout.flush()
        elif _is_special(path):
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path, text)
    except BrokenPipeError:
        raise  # who reads has had enough
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another path") from None


def keep_text(path: Path | None, text: str) -> None:
    """The same for results that are not complete yet, which only a file of its own takes."""
    if path is not None and path != STANDARD_OUTPUT and not _is_special(path):
        replace_text(path, text)


def checked(path: str | Path | None) -> Path | None:
    """The path, without links in it; raises UsageError where no file can be written there, leaving nothing behind."""
    if path is None or Path(path) == STANDARD_OUTPUT:
        return None if path is None else STANDARD_OUTPUT
    found = Path(path)
    try:
        if _is_special(found):
            return found.absolute()
        found = found.resolve()
        if found.is_dir():
            raise UsageError(f"{found} is a folder: name a file in it")
        if not found.parent.is_dir():
            raise UsageError(f"there is no folder {found.parent} for {found.name}: make it, or choose another path")
        part = _part(found)
        part.touch()
        part.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {found}: {error.strerror or error}; choose another path") from None
    return found


def result_paths(paths: Mapping[str, str | Path | None]) -> tuple[Path | None, ...]:
    """Where the files go that ``--json``, ``--report`` and others name; UsageError when one cannot be written."""
    if paths.get("--report") is not None:
        missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
        if missing:
            raise UsageError(f"--report needs {' and '.join(missing)}: pip install 'syncline[report]'")
    found: dict[Path, str] = {}
    files = tuple(checked(path) for path in paths.values())
    for option, file in zip(paths, files, strict=True):
        if file is None:
            continue
        if file in found:
            what = "standard output" if file == STANDARD_OUTPUT else f"the file {file}"
            raise UsageError(f"{found[file]} and {option} both name {what}: choose two")
        found[file] = option
    return files


def _is_special(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder: a device or a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _replace(path: Path, text: str) -> None:
    part = _part(path)
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
