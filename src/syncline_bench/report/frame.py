"""The frame that all pages share: the template engine, tables and their lines, and where figures come from.

Owns how a page is filled from its template, one file without outside references. Everything that comes from outside
(strategy texts, errors, machine names) is escaped by the template engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

import jinja2
from markupsafe import Markup

from .figures import Chart, Key


class Origin(Protocol):
    """What every result file says of where its figures come from."""

    @property
    def machine(self) -> str: ...  # noqa: D102
    @property
    def cores(self) -> int: ...  # noqa: D102
    @property
    def versions(self) -> Mapping[str, str]: ...  # noqa: D102
    @property
    def commit(self) -> str | None: ...  # noqa: D102
    @property
    def modified(self) -> bool | None: ...  # noqa: D102


@dataclass(frozen=True)
class Line:
    """One line of a page's table; ``place`` stands beside the name of what was measured."""

    key: Key
    place: str
    cells: tuple[str, ...]
    error: str | None
    chosen: str | None


@dataclass(frozen=True)
class Section:
    """One of several tables; ``heads`` are those of the columns after name and place."""

    title: str
    heads: tuple[str, ...]
    lines: tuple[Line, ...]


def fill(template: str, **content: Any) -> str:
    """The page as HTML text, ``content`` put into one of this folder's templates."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_source),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(drawing=_drawing, **content)


def origin_facts(origin: Origin) -> tuple[tuple[str, str], ...]:
    """The machine, the versions and the commit, as names and values to be listed."""
    commit = "none" if origin.commit is None else origin.commit + (" with changes" if origin.modified else "")
    return (
        ("machine", origin.machine),
        ("cores", str(origin.cores)),
        ("versions", ", ".join(f"{name} {version}" for name, version in origin.versions.items())),
        ("commit", commit),
    )


def _source(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _drawing(chart: Chart) -> Markup:
    # The SVG is serialised from an element tree, which escapes every label in it.
    return Markup(chart.svg)
