"""What an optimizer keeps beside its state: the values of its groups, and those of its attributes.

Owners of the weights make its steps, so its counts advance with them. Workers send them what the script has changed,
and they send back what the optimizer has changed (``OwnValues``). A value can be sent when it is plain: a number, a
text, a tensor of one element, or tuples, lists and dictionaries of such. An optimizer can keep values elsewhere too: in
its class, in global variables, in those around its methods, in other objects. Nobody can send these; ``beyond`` finds
them, so that ``shard.probe`` refuses an optimizer that changes one.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import math
from collections.abc import Mapping, MutableMapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from ...errors import NotBuiltError, UsageError
from ...serving.records import Record
from ...serving.shard import Groups

_SCALARS = (bool, int, float, str, type(None))
_OF_OTHERS = ("grad_scale", "found_inf", "_opt_called", "_hidden")
"""Attributes that GradScaler, learning-rate schedulers and ``optimizer.take_over`` give an optimizer."""


class OwnValues:
    """Values of a worker's optimizer that its owners change in an update, and send back; ``own`` are their names.

    These are the keys of each group and, behind them, the attributes. A worker sends such a value only where the script
    has changed it since the owners sent it, and every other attribute only where the script has changed it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, own: Sequence[frozenset[str]]) -> None:
        self._optimizer, self._own = optimizer, own
        self._told: list[dict[str, Any]] = []
        self._sent: dict[str, Any] = {}  # of the attributes, in a step that owners may yet skip
        self._begun = {name: value for name, value in attributes(optimizer).items() if name not in own[-1]}
        self.forget()

    @property
    def advance(self) -> bool:
        """Whether owners have anything to send back."""
        return any(self._own)

    def to_send(self, groups: Groups) -> list[dict[str, Any]]:
        """Of the groups' values and the attributes those that owners do not have; no place for attributes if none."""
        *changed, self._sent = [
            {key: value for key, value in values.items() if key not in told or not same(told[key], value)}
            for values, told in zip((*groups, attributes(self._optimizer)), self._told, strict=True)
        ]
        return [*changed, self._sent] if self._sent else changed

    def forget(self) -> None:
        """Send all that is new once more: other owners have the slices now."""
        self._told = [*({} for _ in self._own[:-1]), dict(self._begun)]

    def take(self, records: Sequence[Record]) -> None:
        """Give the optimizer what its owners have told; raises UsageError where they tell different things."""
        found: dict[tuple[int, str], Any] = {}
        self._told[-1].update(self._sent)
        for record in records:
            at = record.slice.tensor, record.key
            if found.setdefault(at, record.value) != record.value:
                raise refusal(
                    type(self._optimizer).__mro__[2].__name__,
                    f"owners of different slices have come to {found[at]} and {record.value} as"
                    f" {name_of(at[1], at[0], len(self._own))}",
                )
        for number, (place, own) in enumerate(zip(places(self._optimizer), self._own, strict=True)):
            told = {key: json.loads(found[number, key]) for key in own if (number, key) in found}
            put(place, told)
            self._told[number].update(told)


def told(values: Mapping[str, Any], own: frozenset[str]) -> dict[str, str]:
    """Those of the values that are there, as texts."""
    return {key: json.dumps(plain(key, values[key])) for key in sorted(own & values.keys())}


def name_of(key: str, place: int, places: int) -> str:
    """How messages call a value of the one of so many places that has this number."""
    return f"the attribute {key!r}" if place == places - 1 else f"{key!r} of parameter group {place}"


def places(optimizer: torch.optim.Optimizer) -> list[MutableMapping[str, Any]]:
    """Where an optimizer keeps values: its groups, and behind them its attributes."""
    return [*optimizer.param_groups, vars(optimizer)]


def values_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What is plain in all of its places."""
    return [*group_values(optimizer.param_groups), attributes(optimizer)]


def group_values(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The values of an optimizer's groups without their tensors, as JSON can say them."""
    return [{key: plain(key, value) for key, value in group.items() if key != "params"} for group in groups]


def attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The plain values of the attributes that not every optimizer has, as JSON can say them."""
    return {
        name: plain(name, value) for name, value in vars(optimizer).items() if name not in _of_all() and is_plain(value)
    }


@cache
def _of_all() -> frozenset[str]:
    """The attributes that every optimizer has, or may be given."""
    return frozenset({*vars(torch.optim.Optimizer([torch.zeros(1)], {})), *_OF_OTHERS})


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes for another optimizer of its kind: copies as far as they are plain."""
    return {name: copy.deepcopy(value) if is_plain(value) else value for name, value in vars(optimizer).items()}


def beyond(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of the plain values that an optimizer's own class reaches beyond the optimizer, by where they are."""
    found: dict[str, Any] = {}
    for kind in type(optimizer).__mro__:
        if kind.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        found |= {f"{name!r} of the class {kind.__name__}": value for name, value in vars(kind).items()}
        for name, value in vars(kind).items():
            # Not every value is a function of Python, and a variable around one may not be set yet.
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
        held = getattr(value, "__dict__", {}) if name not in _of_all() and not isinstance(value, type) else {}
        found |= {f"{key!r} of the object in its attribute {name!r}": one for key, one in held.items()}
    return {place: copy.deepcopy(value) for place, value in found.items() if is_plain(value)}


def is_plain(value: Any) -> bool:
    """Whether a value can be told."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.requires_grad
    if isinstance(value, (tuple, list)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and is_plain(one) for key, one in value.items())
    return isinstance(value, (*_SCALARS, np.generic))


def plain(key: str, value: Any) -> Any:
    """A value as JSON can say it; raises NotBuiltError for one that cannot be told."""
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
"""Under which a dictionary's keys and values are told, since JSON knows texts alone as keys."""


def put(place: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    """Give a place plain values, each in the form that the one before it has."""
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
    """Whether two plain values, or a plain one and a tensor of one element, are the same; NaN is itself."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return bool(one == other) or (one != one and other != other)


def near(one: Any, other: Any) -> bool:
    """Whether two plain values are the same up to rounding."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12) or same(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(near, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return near(one[_PAIRS], other[_PAIRS])
    return same(one, other)


def refusal(name: str, why: str) -> UsageError:
    """What is raised for an optimizer of that class."""
    return UsageError(
        f"{name} cannot run on a parameter server that holds slices of the weights: {why};"
        " use ps(update=worker), ring or another allreduce, or an element-wise optimizer such as SGD or Adam"
    )
