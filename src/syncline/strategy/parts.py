"""Binds parts to the registry: types and completes their arguments, builds and prints them.

It converts a part's text to the registered function or class and back, for any kind of part. ``words`` has the words of
a strategy, ``rules`` the valid combinations, ``grammar`` the syntax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import registry
from ..algorithms import Roles
from ..errors import NotBuiltError, StrategyError
from .grammar import Part, check_value, nearest, read_value, write_value

PLANNED_ARGUMENTS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("sync", "bsp"): ("backup",),
}
"""Planned arguments, by kind and name: NotBuiltError while the part lacks them."""


def bind(kind: str, part: Part, shared: Sequence[registry.Parameter] = ()) -> Part:
    """The part with all its arguments typed, in order and completed with defaults.

    ``shared`` are arguments that all parts of the kind take besides their own. Raises UsageError for an unknown name or
    argument, a wrong type, a missing argument or a value out of range.
    """
    entry = registry.get(kind, part.name)
    wraps = entry.capabilities.get("wraps")
    parameters = (*entry.parameters, *shared)
    given = {_argument_name(entry, parameters, name, value): value for name, value in part.args}
    if len(given) < len(part.args):
        raise StrategyError(f"{part.name} has an argument that is given twice")
    args: list[tuple[str, Any]] = []
    for parameter in parameters:
        what = f"{parameter.name} of {part.name}"
        if parameter.name not in given:
            if parameter.required:
                raise StrategyError(f"{part.name} needs {parameter.name}, as in {signature(entry)}")
            args.append((parameter.name, _default(entry, parameter)))
            continue
        value = given[parameter.name]
        if parameter.name == wraps:
            value = bind(kind, Part(value) if isinstance(value, str) else value)
        elif isinstance(value, Part):
            raise StrategyError(f"{what} takes no arguments of its own, got {value.name}(...)")
        else:
            if isinstance(value, str):
                value = read_value(value, parameter.annotation, what)
            value = check_value(value, parameter.annotation, what)
        args.append((parameter.name, value))
    return Part(part.name, tuple(args))


def build(kind: str, part: Part, *positional: Any) -> Any:
    """Call the registered function or class with the part's arguments, after building nested parts."""
    bound = bind(kind, part)
    arguments = {
        name: build(kind, value) if isinstance(value, Part) else value for name, value in bound.arguments.items()
    }
    return registry.get(kind, part.name).target(*positional, **arguments)


def roles_of(part: Part) -> Roles | None:
    """The roles that a bound architecture declares; None if all workers are alike or the library decides."""
    if part.name not in registry.names("algorithms"):
        return None
    declared = registry.get("algorithms", part.name).capabilities.get("roles")
    if declared is None:
        return None
    roles: Roles = declared(**part.arguments)
    return roles


def write(kind: str, part: Part, shared: Sequence[registry.Parameter] = ()) -> str:
    """The canonical text of a part that was bound with the same ``shared`` arguments."""
    entry = registry.get(kind, part.name)
    wraps = entry.capabilities.get("wraps")
    shown: list[str] = []
    for parameter in (*entry.parameters, *shared):
        value = part[parameter.name]
        if parameter.name == wraps:
            if parameter.required or value != _default(entry, parameter):
                shown.insert(0, write(kind, value))
        elif value != parameter.default or parameter.name in entry.capabilities.get("always_print", ()):
            shown.append(f"{parameter.name}={write_value(value, parameter.annotation)}")
    return f"{part.name}({', '.join(shown)})" if shown else part.name


def signature(entry: registry.Entry) -> str:
    """The entry with its arguments and defaults, for listings."""
    wraps = entry.capabilities.get("wraps")
    shown: list[str] = []
    for parameter in entry.parameters:
        if parameter.name == wraps:
            default = "" if parameter.required else f"={write(entry.kind, _default(entry, parameter))}"
            shown.insert(0, parameter.name.upper() + default)
        elif parameter.required:
            shown.append(f"{parameter.name}=...")
        else:
            shown.append(f"{parameter.name}={write_value(parameter.default, parameter.annotation)}")
    return f"{entry.name}({', '.join(shown)})" if shown else entry.name


def part_of(kind: str, built: Any) -> Part:
    """The bound part that ``build`` turns into an equal object. The object's class is a registered frozen dataclass."""
    entry = next(entry for entry in registry.entries(kind) if entry.target is type(built))
    wraps = entry.capabilities.get("wraps")
    values = {parameter.name: getattr(built, parameter.name) for parameter in entry.parameters}
    args = {name: part_of(kind, value) if name == wraps else value for name, value in values.items()}
    return Part(entry.name, tuple(args.items()))


def _default(entry: registry.Entry, parameter: registry.Parameter) -> Any:
    """The default of an argument; for a wrapped object, the part that it was built from."""
    if parameter.name == entry.capabilities.get("wraps"):
        return part_of(entry.kind, parameter.default)
    return parameter.default


def _argument_name(entry: registry.Entry, parameters: Sequence[registry.Parameter], name: str, value: Any) -> str:
    """The parameter for an argument. Raises StrategyError or NotBuiltError if there is none."""
    known = [parameter.name for parameter in parameters]
    if name in known:
        return name
    if name:
        if name in PLANNED_ARGUMENTS.get((entry.kind, entry.name), ()):
            raise NotBuiltError(f"the argument {name} of {entry.name} is not built yet")
        takes = f"{entry.name} takes {', '.join(known)}" if known else f"{entry.name} takes no arguments"
        raise StrategyError(f"{entry.name} has no argument {name!r}{nearest(name, known) or '; ' + takes}")
    wraps = entry.capabilities.get("wraps")
    if wraps:
        return str(wraps)
    shown = value.name if isinstance(value, Part) else value
    first = f", as in {entry.name}({known[0]}={shown})" if known else f", and {entry.name} has none"
    raise StrategyError(f"arguments have names{first}")
