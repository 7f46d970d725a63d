"""The values that an optimizer keeps outside its per-parameter state: in its groups and in its attributes.

Owners of the weights run the optimizer's steps, so such counters advance with the owners. Workers send the values that
the script has changed, and owners return the values that the optimizer has changed (``OwnValues``). Only *plain* values
can be sent: numbers, texts, tensors of one element, and tuples, lists and dictionaries of these. An optimizer may also
keep values in its class, in global variables, in closures or in other objects. These cannot be sent; ``beyond`` finds
them, so that ``partial_optimizer.probe`` can refuse an optimizer that changes one.

An attribute that no method of the optimizer reads cannot influence an update, such as a loss that the script notes
there or a time that the optimizer measures. Such attributes may differ between ranks and are not sent (``is_read``).
"""

from __future__ import annotations

import contextlib
import copy
import dis
import inspect
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import cache, cached_property, lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from ...errors import NotBuiltError, UsageError
from ...serving.records import Record
from ...serving.shard import Groups

_SCALARS = (bool, int, float, str, type(None))
ADDED = tuple(f"_syncline_{name}" for name in ("client", "deferred", "hidden", "pieces", "owners", "parameters"))
"""The attributes that ``optimizer`` adds to a user's optimizer, with names that no script uses."""
OF_STEPS = ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""The attributes that belong to the steps of the user's optimizer alone."""
_NOT_COPIED = frozenset((*ADDED, "param_groups", "state"))
_NOT_IN_STEPS = _NOT_COPIED.union(OF_STEPS)
_OF_OTHERS = ("grad_scale", "found_inf", "_opt_called", *ADDED)
"""Attributes that GradScaler, learning-rate schedulers and Syncline add to an optimizer."""
_MOST_TOLD = 64 * 1024
"""The maximum length of a changing value as text, in bytes: it is sent as a whole in each step."""


class OwnValues:
    """The values of a worker's optimizer that its owners change in an update and send back. ``own`` are their names.

    ``own`` has the keys of each group, followed by the attributes. A worker sends such a value only if the script has
    changed it since the owners sent it, and any other attribute only if the script has changed it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, own: Sequence[frozenset[str]]) -> None:
        self._optimizer, self.own = optimizer, own
        self._told: list[dict[str, Any]] = []
        self._sent: dict[str, Any] = {}  # the attributes sent in the present step, which owners may still skip
        self._begun = {name: value for name, value in attributes(optimizer).items() if name not in own[-1]}
        self.forget()

    def to_send(self, groups: Groups) -> list[dict[str, Any]]:
        """The group values and attributes that the owners do not have yet; no entry without any attributes."""
        *changed, self._sent = [
            {key: value for key, value in values.items() if key not in told or not same(told[key], value)}
            for values, told in zip((*groups, attributes(self._optimizer)), self._told, strict=True)
        ]
        for number, (values, told) in enumerate(zip((*changed, self._sent), self._told, strict=True)):
            for key in values.keys() & told.keys():  # a constant may be long, such as the names of all parameters
                _check_short(_name(self._optimizer), name_of(key, number, len(self.own)), json.dumps(values[key]))
        return [*changed, self._sent] if self._sent else changed

    def forget(self) -> None:
        """Send all new values once more, because the slices have other owners now."""
        self._told = [*({} for _ in self.own[:-1]), dict(self._begun)]

    def take(self, records: Sequence[Record]) -> None:
        """Write the owners' values to the optimizer. Raises UsageError if owners disagree."""
        found: dict[tuple[int, str], Any] = {}
        self._told[-1].update(self._sent)
        if not records:
            return
        for record in records:
            at = record.slice.tensor, record.key
            if found.setdefault(at, record.value) != record.value:
                raise refusal(
                    _name(self._optimizer),
                    f"owners of different slices have computed {found[at]} and {record.value} as"
                    f" {name_of(at[1], at[0], len(self.own))}",
                )
        for number, (place, own) in enumerate(zip(places(self._optimizer), self.own, strict=True)):
            told = {key: json.loads(found[number, key]) for key in own if (number, key) in found}
            put(place, told)
            self._told[number].update(told)


def told(optimizer: torch.optim.Optimizer, number: int, own: Sequence[frozenset[str]]) -> dict[str, str]:
    """The optimizer's own values in the place with that number, as texts. UsageError for a text that is too long."""
    values = places(optimizer)[number]
    texts = {key: json.dumps(plain(key, values[key])) for key in sorted(own[number] & values.keys())}
    for key, text in texts.items():
        _check_short(_name(optimizer), name_of(key, number, len(own)), text)
    return texts


def _check_short(optimizer: str, value: str, text: str) -> None:
    if len(text) > _MOST_TOLD:
        raise refusal(
            optimizer,
            f"{value} has grown to {len(text)} bytes as text; it is sent as a whole in each step, and the limit is"
            f" {_MOST_TOLD} bytes: keep only its last items, or a sum of them",
        )


def _name(optimizer: torch.optim.Optimizer) -> str:
    """The name of the user's class, also for an optimizer with a mixin."""
    kinds = type(optimizer).__mro__
    return next(kind for kind in kinds if kind.__module__.partition(".")[0] != "syncline").__name__


def name_of(key: str, place: int, places: int) -> str:
    """The name of a value in messages. ``place`` is the group's number, or the last of ``places`` for attributes."""
    return f"the attribute {key!r}" if place == places - 1 else f"{key!r} of parameter group {place}"


def places(optimizer: torch.optim.Optimizer) -> list[MutableMapping[str, Any]]:
    """The dictionaries in which an optimizer keeps values: its groups, followed by its attributes."""
    return [*optimizer.param_groups, vars(optimizer)]


def values_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The plain values in all places."""
    return [*group_values(optimizer.param_groups), attributes(optimizer)]


def group_values(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The values of an optimizer's groups without their tensors, in a form for JSON."""
    found = []
    for group in groups:
        values = {key: value for key, value in group.items() if key != "params"}
        found.append({key: value if type(value) in _SCALARS else plain(key, value) for key, value in values.items()})
    return found


def attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The plain values of the optimizer's additional attributes that it reads, in a form for JSON."""
    read = _read_by(optimizer)
    return {
        name: plain(name, vars(optimizer)[name]) for name in plain_attributes(optimizer) if read is None or name in read
    }


def plain_attributes(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the attributes that have plain values and do not belong to every optimizer."""
    return [name for name, value in vars(optimizer).items() if name not in _of_all() and is_plain(value)]


def is_read(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Whether code of the optimizer may read that attribute."""
    read = _read_by(optimizer)
    return read is None or name in read


def _read_by(optimizer: torch.optim.Optimizer) -> frozenset[str] | None:
    """The names that ``_names_read`` finds in the optimizer's methods, the functions they call and its objects."""
    beside = [getattr(value, "__func__", value) for key, value in vars(optimizer).items() if key not in _of_all()]
    sources = [one if isinstance(one, FunctionType) else type(one) for one in beside]
    return _names_read((type(optimizer), *dict.fromkeys(one for one in sources if _of_scripts(one))))


@lru_cache(maxsize=256)
def _names_read(sources: tuple[type | FunctionType, ...]) -> frozenset[str] | None:
    """The names of all attributes that this code reads, on any object; None if they cannot be determined."""
    names: set[str] = set()
    left: list[Any] = list(sources)
    seen: set[int] = set()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, type):
            members = [member for kind in one.__mro__ if _of_scripts(kind) for member in vars(kind).values()]
            functions = [part for member in members for part in _functions(member)]
            if any(callable(part) and not isinstance(part, (type, FunctionType)) for part in functions):
                return None  # compiled code
            left += [part for part in functions if isinstance(part, FunctionType)]
            continue
        cells = [getattr(cell, "cell_contents", None) for cell in one.__closure__ or () if _is_set(cell)]
        around = [*cells, getattr(one, "__wrapped__", None)]
        if _of_scripts(one):
            for code in _codes(one.__code__):
                read = _read_in(code)
                if read is None:
                    return None
                names |= read
                called = [one.__globals__.get(name) for name in code.co_names]
                modules = [module for module in called if isinstance(module, ModuleType)]
                around += [*called, *(vars(module).get(name) for module in modules for name in code.co_names)]
        left += [found for found in around if isinstance(found, FunctionType)]
    return frozenset(names)


def _is_set(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _functions(member: Any) -> list[Any]:
    """The functions that a member of a class runs."""
    if isinstance(member, property):
        return [member.fget, member.fset]
    if isinstance(member, cached_property):
        return [member.func]
    return [getattr(member, "__func__", member)]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _read_in(code: CodeType) -> set[str] | None:
    """The names of the attributes that this code reads; None if it may read any, by ``vars`` or by a computed name."""
    if {"vars", "__dict__", "__getattribute__"} & set(code.co_names):
        return None
    instructions = list(dis.get_instructions(code))
    read = {str(one.argval) for one in instructions if one.opname in _READS}
    if {"getattr", "attrgetter"} & set(code.co_names):
        if any(one.opname == "BUILD_STRING" or one.opname.startswith("FORMAT_") for one in instructions):
            return None
        for constant in code.co_consts:
            read |= {
                word for word in (constant if isinstance(constant, tuple) else (constant,)) if isinstance(word, str)
            }
    return read


_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


def _of_scripts(one: Any) -> bool:
    """Whether a class or function belongs neither to Python, PyTorch, NumPy nor Syncline."""
    top = str(one.__module__).partition(".")[0]
    return top not in ("torch", "numpy", "builtins", "syncline") and top not in sys.stdlib_module_names


@cache
def _of_all() -> frozenset[str]:
    """The attributes that every optimizer has or may be given."""
    return frozenset({*vars(torch.optim.Optimizer([torch.zeros(1)], {})), *_OF_OTHERS})


def copy_with(
    optimizer: Any,
    kind: type,
    groups: list[dict[str, Any]],
    state: dict[Any, Any],
    *,
    steps: bool,
    apart: bool = False,
) -> torch.optim.Optimizer:
    """A copy of a user's optimizer object, of the user's class ``kind``, with these groups and this state.

    It has all other attributes; ``apart``: its plain values are copies. ``steps``: it makes steps in place of the
    user's object. The object's hooks, and its step if the script has replaced it, run once per step, and not here.
    """
    left_out = _NOT_IN_STEPS if steps else _NOT_COPIED
    kept = {name: value for name, value in vars(optimizer).items() if name not in left_out}
    if apart:
        kept = {name: copy.deepcopy(value) if is_plain(value) else value for name, value in kept.items()}
    made: torch.optim.Optimizer = object.__new__(kind)
    vars(made).update(kept, param_groups=groups, state=state)
    if steps:
        made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return made


def beyond(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of the plain values that an optimizer's class can reach outside the optimizer, keyed by their location."""
    found: dict[str, Any] = {}
    for kind in type(optimizer).__mro__:
        if kind.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        found |= {f"{name!r} of the class {kind.__name__}": value for name, value in vars(kind).items()}
        for name, value in vars(kind).items():
            # The value may be no Python function, or a variable of its closure may be unset.
            with contextlib.suppress(TypeError, ValueError):
                function: Any = inspect.unwrap(value)
                reached = inspect.getclosurevars(function)
                around, of = (
                    f"a variable around {kind.__name__}.{name}()",
                    f"a global variable of {function.__module__}",
                )
                found |= {f"{one!r}, {around}": what for one, what in reached.nonlocals.items()}
                found |= {f"{one!r}, {of}": what for one, what in reached.globals.items()}
    for name, value in vars(optimizer).items():
        # Objects of the standard library may fill caches at any time, as a logger does, except namespaces.
        looked = _of_scripts(type(value)) or type(value).__module__ in ("types", "argparse")
        held = (
            getattr(value, "__dict__", {}) if looked and name not in _of_all() and not isinstance(value, type) else {}
        )
        found |= {f"{key!r} of the object in its attribute {name!r}": one for key, one in held.items()}
    return {place: copy.deepcopy(value) for place, value in found.items() if is_plain(value)}


def is_plain(value: Any) -> bool:
    """Whether a value can be sent."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.requires_grad
    if isinstance(value, (tuple, list)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and is_plain(one) for key, one in value.items())
    return isinstance(value, (*_SCALARS, np.generic))


def plain(key: str, value: Any) -> Any:
    """A value in a form for JSON. Raises NotBuiltError if it cannot be sent."""
    if not is_plain(value):
        raise NotBuiltError(f"the optimizer's group value {key!r} is a {type(value).__name__}, which cannot be sent")
    if isinstance(value, (torch.Tensor, np.generic)):
        return value.item()
    if isinstance(value, (tuple, list)):
        return [plain(key, item) for item in value]
    if isinstance(value, dict):
        return {_PAIRS: [[name, plain(key, item)] for name, item in value.items()]}
    return value


_PAIRS = "pairs"
"""The key for a dictionary's items, because JSON allows only texts as keys."""


def put(place: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    """Write plain values to a place, each converted to the type of the present value."""
    place.update({key: _formed(place.get(key), value) for key, value in values.items()})


def _formed(before: Any, value: Any) -> Any:
    if isinstance(before, torch.Tensor) and isinstance(value, (bool, int, float)):
        with torch.no_grad():
            return before.fill_(value)
    if isinstance(value, list):
        old = before if isinstance(before, (tuple, list)) else []
        items = [_formed(old[at] if at < len(old) else None, item) for at, item in enumerate(value)]
        return tuple(items) if isinstance(before, tuple) else items
    if isinstance(value, dict):
        known = before if isinstance(before, dict) else {}
        pairs = {key: _formed(known.get(key), item) for key, item in value[_PAIRS]}
        if not isinstance(before, dict):
            return pairs
        before.clear()
        before.update(pairs)
        return before
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two plain values are equal; NaN equals itself. One of them may be a tensor of one element."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return bool(one == other) or (one != one and other != other)


def near(one: Any, other: Any) -> bool:
    """Whether two plain values are equal up to rounding."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12) or same(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(near, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return near(one[_PAIRS], other[_PAIRS])
    return same(one, other)


def refusal(name: str, why: str) -> UsageError:
    """The error for an optimizer of that class."""
    return UsageError(
        f"{name} cannot run on a parameter server that holds slices of the weights: {why};"
        " use ps(update=worker), ring or another allreduce, or an element-wise optimizer such as SGD or Adam"
    )
