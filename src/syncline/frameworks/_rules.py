"""Update rules of scripts on flat arrays: objects with ``update``, or functions, here and at owners of weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from types import MemberDescriptorType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..serving.records import Elements, State
from ..serving.shard import Groups, Holding

Array = NDArray[Any]
States = dict[str, Any]
_PLAIN = bool | int | float | str | None
_TOLD = _PLAIN | np.generic
Function = Callable[..., object]
"""``update(weights, gradient, state)``; further parameters have defaults, which are numbers and words."""


class Update(Protocol):
    """A script's optimizer: its attributes are numbers and words, which may change between steps."""

    def update(self, weights: Array, gradient: Array, state: States) -> None:
        """Update flat ``weights`` in place, every element by itself; ``state``, empty at first, is kept for them.

        What is kept are arrays of the weights' shape, arrays of shape (), and plain values, such as a count of steps.
        """
        ...


class Rule:
    """An optimizer of a function, whose further parameters are its attributes."""

    __slots__ = ("__dict__", "__weakref__", "_function")
    _function: Function

    def __init__(self, function: Function) -> None:
        self._function = function
        name = _called(function)
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise UsageError(f"{name} does not say what it takes ({error}): wrap it in a function") from error
        named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        if len(parameters) < 3 or any(one.default is one.empty for one in named[3:]):
            raise UsageError(
                f"{name} shall be update(weights, gradient, state), with defaults for all further parameters"
            )
        for one in named[3:]:
            setattr(self, one.name, one.default)

    def update(self, weights: Array, gradient: Array, state: States) -> None:
        """As the function does."""
        self._function(weights, gradient, state, **vars(self))


def rule_of(optimizer: object) -> Update:
    """What a script gives as its optimizer; raises UsageError for what is none."""
    if callable(getattr(optimizer, "update", None)):
        return optimizer  # type: ignore[return-value]
    if callable(optimizer):
        return Rule(optimizer)
    raise UsageError(
        "a model of NumPy needs an optimizer with update(weights, gradient, state), or such a function, which updates"
        " the weights"
    )


def name_of(optimizer: Update) -> str:
    """For messages."""
    return _called(optimizer._function) if isinstance(optimizer, Rule) else f"{type(optimizer).__name__}.update"


def described(optimizer: Update, *, values: bool) -> str:
    """The rule in words, with its ``values`` where these have to be everyone's."""
    known = _attributes(optimizer)
    told = (f"{name}={known[name]!r}" if values else name for name in sorted(known) if isinstance(known[name], _TOLD))
    return f"{name_of(optimizer)}({', '.join(told)})"


def _called(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _attributes(optimizer: Update) -> dict[str, Any]:
    """The optimizer's own, those in its slots, and numbers and words of its classes, which may become its own."""
    if isinstance(optimizer, Rule):
        return vars(optimizer)
    found: dict[str, Any] = {}
    for kind in reversed(type(optimizer).__mro__):
        slots = isinstance(kind, type) and "__slots__" in vars(kind)
        for name, value in vars(kind).items():
            found.pop(name, None)
            if slots and isinstance(value, MemberDescriptorType):
                if hasattr(optimizer, name):
                    found[name] = getattr(optimizer, name)
            elif not name.startswith("_") and isinstance(value, _PLAIN | np.generic):
                found[name] = value
    return found | getattr(optimizer, "__dict__", {})


def values_of(optimizer: Update) -> list[dict[str, Any]]:
    """The optimizer's attributes as owners are told them; raises UsageError for what is no number or word."""
    known = _attributes(optimizer).items()
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in known}
    for name, value in values.items():
        if not isinstance(value, _PLAIN):
            raise UsageError(
                f"the optimizer's {name!r} is {type(value).__name__}: attributes are numbers and words, which the"
                " owners of weights are told; what it learns belongs into update()'s state"
            )
    return [values]


def probe(optimizer: Update) -> bool:
    """Raise UsageError unless slices are updated as the whole is; whether anything is kept in the state."""
    generator = np.random.default_rng(0)
    whole = generator.standard_normal(24)
    parts = [whole[:5].copy(), whole[5:].copy()]
    mine, theirs, states = copy.deepcopy(optimizer), copy.deepcopy(optimizer), [States() for _ in range(3)]
    for _ in range(3):
        gradient = generator.standard_normal(24)
        mine.update(whole, gradient.copy(), states[2])
        for part, of, state in zip(parts, (gradient[:5], gradient[5:]), states[:2], strict=True):
            theirs.update(part, of.copy(), state)
    if not np.allclose(whole, np.concatenate(parts), rtol=1e-9, atol=1e-12):
        raise UsageError(
            f"{name_of(optimizer)}() gives other weights for slices of an array than for all of it: update every"
            " element by itself, and keep what it learns in the state"
        )
    return bool(states[2])


class Sliced:
    """A script's optimizer on the slices that this process owns."""

    def __init__(self, optimizer: Update, holdings: Sequence[Holding]) -> None:
        self._optimizer = copy.copy(optimizer)  # the script's own has the values of its next step
        self._holdings = holdings
        self._states: list[States] = [{} for _ in holdings]

    def squared_norm(self) -> float:
        """In float64."""
        return float(sum(np.square(held.gradient, dtype=np.float64).sum() for held in self._holdings))

    def apply(self, groups: Groups, scale: float) -> None:
        """With the attributes that the workers' optimizers have."""
        (values,) = groups
        known = _attributes(self._optimizer)
        if values.keys() != known.keys():
            raise ValueError(f"the optimizer has {sorted(known)}, told are {sorted(values)}")
        for name, value in values.items():
            object.__setattr__(self._optimizer, name, value)
        for held, state in zip(self._holdings, self._states, strict=True):
            gradient = held.gradient if scale == 1.0 else held.gradient * held.gradient.dtype.type(scale)
            self._optimizer.update(held.weights, gradient, state)

    def advanced(self) -> Groups:
        """Nothing: such an optimizer is refused before."""
        return []

    def state(self) -> list[State]:
        """What it keeps."""
        return [said(state) for state in self._states]

    def load(self, states: Sequence[State]) -> None:
        """The other way round."""
        self._states = [heard(state) for state in states]


def said(state: States) -> State:
    """What a rule keeps of an array, as owners tell it; raises UsageError for what is no array or plain value."""
    found: State = {}
    for key, value in state.items():
        if isinstance(value, np.ndarray):
            found[key] = Elements.of(np.ascontiguousarray(value) if value.ndim else value)
        elif isinstance(value, np.generic):
            found[key] = value.item()
        elif isinstance(value, bool | int | float | str | None):
            found[key] = value
        else:
            raise UsageError(
                f"update() keeps {key!r} as {type(value).__name__} in its state: keep arrays, numbers and words, which"
                " owners can tell and checkpoints have"
            )
    return found


def heard(state: State) -> States:
    """The other way round, in memory of its own."""
    return {key: value.array.copy() if isinstance(value, Elements) else value for key, value in state.items()}
