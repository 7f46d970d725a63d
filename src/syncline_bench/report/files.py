"""Result files: their JSON, its reading and writing, and its destination: a file or standard output.

The keys are the field names; fields are only added, so that older files stay readable, and unknown keys are ignored. A
number that could not be measured is ``null``, never 0.

Files are replaced atomically. Whether a file can be written is checked before the measurement, so that hours of
measurements are not lost.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from syncline.errors import DataError, UsageError

STANDARD_OUTPUT = Path("-")
"""Means standard output, which then carries nothing else."""


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` by renaming a finished file over it. Raises UsageError if that is impossible.

    Standard output, devices and pipes cannot be replaced and are written to.
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
        raise  # the reader has closed the pipe
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another path") from None


def keep_text(path: Path | None, text: str) -> None:
    """The same for incomplete results, which are written only to ordinary files."""
    if path is not None and path != STANDARD_OUTPUT and not _is_special(path):
        replace_text(path, text)


def checked(path: str | Path | None) -> Path | None:
    """The path without links. Raises UsageError if no file can be written there; leaves no file behind."""
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
    """The paths of the files that ``--json``, ``--report`` and others name. UsageError if one cannot be written."""
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
    """Whether the path is neither a file nor a folder: a device or a pipe."""
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


_R = TypeVar("_R", bound="ResultFile")
_Row = TypeVar("_Row")
_Key = TypeVar("_Key", bound=Hashable)


_ORIGIN = {
    "machine": "machine",
    "cores": "number of cores",
    "versions": "version of a library",
    "source_sha256": "version of the code",
}


@dataclass(frozen=True)
class ResultFile:
    """The origin of a result: machine, versions, commit and time; the base class of each kind of result.

    ``commit`` is None outside a checkout; ``modified`` tells whether the checkout differed from it. ``source_sha256``
    is a digest of the package's source files: with ``commit`` it tells whether two results are from the same code.
    ``started`` is ISO 8601.
    """

    verb: ClassVar[str]
    """The command that made the result."""
    work: ClassVar[Mapping[str, str]] = {}
    """The fields that, beside those of the origin, must be equal in a result that is continued, with words for them."""

    machine: str = ""
    cores: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    modified: bool | None = None
    source_sha256: str = ""
    started: str = ""

    def content(self) -> dict[str, Any]:
        """All fields, in the form of the file."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The text of the result file: strict JSON, not-a-number and infinities as null."""
        return json.dumps(finite(self.content()), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls: type[_R], text: str) -> _R:
        """Read a result file's text back. Raises DataError for other text."""
        try:
            data = cls.current(json.loads(text))
            for name in ("machine", *_lists_of(cls)):
                data[name]  # present in all of these files, missing in others
            found: _R = typed(cls, data)
            return found
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(f"this is not a result file of syncline {cls.verb}: {error!r}") from None

    @classmethod
    def current(cls, data: Any) -> Any:
        """The content of a file, which an earlier version may have written, as this version writes it."""
        return data

    def earlier(self: _R, path: Path) -> _R:
        """The result file of an earlier run, to be continued as this one.

        Raises UsageError if it cannot be read, and for one of other work, or of another origin.
        """
        try:
            found = self.from_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"{path} is not text: choose another file") from None
        except DataError as error:
            raise UsageError(f"{path}: {error}; choose another file") from None
        words = {**self.work, **_ORIGIN}
        others = [words[name] for name in words if getattr(found, name) != getattr(self, name)]
        if others:
            raise UsageError(
                f"{path} is of another {', '.join(others)}, so its measurements cannot be compared with new ones:"
                " choose another file, or delete it"
            )
        return found

    def save(self, path: Path) -> None:
        """Write the result file atomically, so that a reader never sees half of it."""
        replace_text(path, self.to_json())


def grouped(rows: Iterable[_Row], key: Callable[[_Row], _Key]) -> dict[_Key, list[_Row]]:
    """The rows by their keys, both in the order of the first rows."""
    found: dict[_Key, list[_Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def fields_of(cls: type) -> list[tuple[str, str]]:
    """The fields of a row in a result file, each with its meaning from its annotation."""
    hints = get_type_hints(cls, include_extras=True)
    return [(item.name, " ".join(getattr(hints[item.name], "__metadata__", ("",)))) for item in dataclasses.fields(cls)]


def _lists_of(cls: type) -> list[str]:
    """The fields of a result that are lists of dataclasses."""
    items = {item.name: get_args(get_type_hints(cls)[item.name])[:1] for item in dataclasses.fields(cls)}
    return [name for name, (*one,) in items.items() if one and dataclasses.is_dataclass(one[0])]


def typed(hint: Any, value: Any, name: str = "it") -> Any:
    """A JSON value as one of the annotated type; dataclasses leave out the keys of a later version.

    Null stands for not-a-number and infinities. Raises TypeError for a value of another type, called ``name``.
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    holds = dataclasses.is_dataclass(kind) or kind in (tuple, list, Sequence, dict, Mapping)
    if kind is Any or (value is None and not holds):
        return value
    if kind in (Union, types.UnionType):
        for one in inner:
            with suppress(TypeError):
                return typed(one, value, name)
    elif dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        hints = get_type_hints(kind)
        known = [item.name for item in dataclasses.fields(kind) if item.name in value]
        return hint(**{name: typed(hints[name], value[name], name) for name in known})
    elif kind in (tuple, list, Sequence) and isinstance(value, list | tuple):
        each = inner if kind is tuple and inner[1:] != (...,) else [(*inner, Any)[0]] * len(value)
        if len(each) == len(value):
            items = (typed(one, item, name) for one, item in zip(each, value, strict=True))
            return list(items) if kind is list else tuple(items)
    elif kind in (dict, Mapping) and isinstance(value, Mapping):
        key, item = inner or (str, Any)
        return {key(one): typed(item, its, name) for one, its in value.items()}  # JSON's keys are texts
    elif (
        (kind is Literal and value in inner)
        or (kind is float and type(value) in (int, float))
        or (kind in (int, str, bool) and type(value) is kind)
    ):
        return value
    raise TypeError(f"{name} is {value!r:.60}, which is not of type {getattr(hint, '__name__', hint)}")


def finite(value: Any) -> Any:
    """``value`` with every not-a-number and infinity in it, at any depth, replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
