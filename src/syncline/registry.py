"""The registry of all pluggable parts: algorithms, codecs, schedules, searchers, sync modes, transports, ...

A part registers itself with a decorator at the top of its own file::

    @register("algorithms", "ring", goal="allreduce")
    def ring(group: Group) -> Plan: ...

The registry finds the file in the folder of its kind, and parts of other packages through entry points of the group
``syncline.<kind>`` (the value is a module or the registered object in it). Folders are imported when their kind is
first used, so that ``import syncline`` stays light. A part of another package that cannot be loaded is skipped with a
warning that names the package, because it must not affect runs that do not need it. Using it by name raises the cause.

The arguments of a part in a strategy text are the keyword-only parameters of a function or of a class's constructor, or
the fields of a dataclass, with their annotations (``Size``, ``Rate``, ``Seconds``, ``int``, ``float``, ``Literal``).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import logging
import pkgutil
import sys
import threading
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any, TypeVar

from .errors import UsageError

log = logging.getLogger("syncline")

KINDS = (
    "algorithms",
    "collectives",
    "codecs",
    "frameworks",
    "peers",
    "schedules",
    "searchers",
    "sync",
    "transports",
    "workloads",
)
_LABORATORY = ("frameworks", "peers", "searchers", "workloads")
"""The kinds whose folders are in the laboratory (``syncline_bench``); the folders of the others are in this package."""

Target = TypeVar("Target", bound=Callable[..., Any])


@dataclass(frozen=True)
class Parameter:
    """One argument that a strategy text may give to a part: its name, type annotation and default."""

    name: str
    annotation: Any
    default: Any = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        """Whether the text must give it."""
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True)
class Entry:
    """One registered part: the object to call, its arguments, and its declared capabilities."""

    kind: str
    name: str
    target: Callable[..., Any]
    capabilities: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The arguments that a strategy text may give, in order."""
        return parameters_of(self.target)

    @property
    def own(self) -> bool:
        """True for a part of Syncline, False for a part of another package."""
        return self.target.__module__.partition(".")[0] in (__package__, "syncline_bench")

    @property
    def summary(self) -> str:
        """The first sentence of the part's documentation."""
        return (inspect.getdoc(self.target) or "").split("\n\n")[0].replace("\n", " ")


_entries: dict[str, dict[str, Entry]] = {kind: {} for kind in KINDS}
_loaded: set[str] = set()
_begun: set[str] = set()
_loading = threading.RLock()
"""Held while a kind is loaded: a second thread waits, and the thread that loads sees the parts loaded so far."""
_left_out: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
"""Why entry points could not be loaded, by kind and name."""
_entered: list[list[tuple[str, str, Entry | None]]] = []
"""Per nested load in progress: the keys registered since its start, with the previous entries."""


def register(kind: str, name: str, **capabilities: Any) -> Callable[[Target], Target]:
    """Register the decorated function or class under ``name``.

    Raises UsageError for an unknown kind and for a name that belongs to another object.
    """
    if kind not in KINDS:
        raise UsageError(f"unknown kind {kind!r}: choose one of {', '.join(KINDS)}")

    def enter(target: Target) -> Target:
        known = _entries[kind].get(name)
        if known is not None and not _same_source(known.target, target):
            raise UsageError(f"{kind} already has a {name!r}: {known.target.__module__}.{known.target.__qualname__}")
        if _entered:
            _entered[-1].append((kind, name, known))
        _entries[kind][name] = Entry(kind, name, target, dict(capabilities))
        return target

    return enter


def names(kind: str) -> tuple[str, ...]:
    """All names of a kind, sorted."""
    _load(kind)
    return tuple(sorted(_entries[kind]))


def get(kind: str, name: str) -> Entry:
    """The entry of that name. UsageError names the most similar one."""
    _load(kind)
    try:
        return _entries[kind][name]
    except KeyError:
        why = left_out(kind, name)
        if why:
            raise UsageError(why) from None
        near = get_close_matches(name, _entries[kind], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(names(kind))}"
        raise UsageError(f"unknown {_singular(kind)} {name!r}{hint}") from None


def left_out(kind: str, name: str) -> str:
    """The reason why an installed part of that name could not be loaded; empty if there is none."""
    _load(kind)
    return _left_out[kind].get(name, "")


def entries(kind: str) -> tuple[Entry, ...]:
    """All entries of a kind, sorted by name."""
    return tuple(get(kind, name) for name in names(kind))


def _load(kind: str) -> None:
    if kind not in KINDS:
        raise UsageError(f"unknown kind {kind!r}: choose one of {', '.join(KINDS)}")
    if kind in _loaded:
        return
    with _loading:
        if kind not in _begun:
            _begun.add(kind)
            try:
                _load_all(kind)
                _loaded.add(kind)
            except BaseException:
                _begun.discard(kind)  # the next call meets the same error, not a registry that lacks parts
                raise


def _load_all(kind: str) -> None:
    _entered.append([])  # keep the error of another package's part that failed while importing this kind
    try:
        top = "syncline_bench" if kind in _LABORATORY else __package__
        package = importlib.import_module(f"{top}.{kind}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    finally:
        _entered.pop()
    # In one order on all hosts, so that the same package wins a name clash everywhere.
    points = importlib.metadata.entry_points(group=f"syncline.{kind}")
    for point in sorted(points, key=lambda point: (_distribution(point), point.name, point.value)):
        _load_foreign(kind, point)


def _load_foreign(kind: str, point: importlib.metadata.EntryPoint) -> None:
    """Load another package's part, completely or not at all."""
    brought: list[tuple[str, str, Entry | None]] = []
    _entered.append(brought)
    try:
        point.load()
        for its_kind, name, _ in brought:
            _entries[its_kind][name].parameters  # noqa: B018 - raises where an annotation cannot be read
    except (Exception, SystemExit) as error:  # its code may raise anything
        for its_kind, name, before in reversed(brought):
            if before is None:
                del _entries[its_kind][name]
            else:
                _entries[its_kind][name] = before
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        why = (
            f"{_singular(kind)} {point.name!r} of the package {_distribution(point)} cannot be loaded ({text}):"
            " repair, upgrade or uninstall that package"
        )
        _left_out[kind][point.name] = why
        log.warning("syncline: %s", why)
    finally:
        _entered.pop()


def _distribution(point: importlib.metadata.EntryPoint) -> str:
    """The package that an entry point belongs to, with its version."""
    return "without a name" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def _same_source(known: Target, target: Target) -> bool:
    """Whether an object is registered again: its module was reloaded, or also runs as ``__main__``."""
    modules = known.__module__, target.__module__
    if known.__qualname__ != target.__qualname__:
        return False
    files = [getattr(sys.modules.get(module), "__file__", None) for module in modules]
    return modules[0] == modules[1] or (files[0] is not None and files[0] == files[1])


def parameters_of(target: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The arguments that a text may give to a function or class, registered or not."""
    fields = dataclasses.is_dataclass(target)
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) and not fields else target)
    if dataclasses.is_dataclass(target):
        return tuple(
            Parameter(item.name, hints[item.name], _default(item)) for item in dataclasses.fields(target) if item.init
        )
    return tuple(
        Parameter(item.name, hints.get(item.name, str), item.default)
        for item in inspect.signature(target).parameters.values()
        if item.kind is inspect.Parameter.KEYWORD_ONLY
    )


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default is not dataclasses.MISSING:
        return item.default
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return inspect.Parameter.empty


def _singular(kind: str) -> str:
    return {"sync": "sync mode"}.get(kind, kind.removesuffix("s"))
