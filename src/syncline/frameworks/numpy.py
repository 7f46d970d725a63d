"""The NumPy adapter: a model is a dictionary of arrays, whose gradients the script computes itself.

    weights, optimizer = syncline.prepare(weights, Sgd(lr=0.1))
    optimizer.produced("last", gradient)            # during backward: its exchange starts
    optimizer.step(rest)                            # the remaining gradients, by name; updates the weights in place

The arrays may belong to any library that exports host memory: Caffe's blobs, the buffer protocol, DLPack (``_memory``).
They are updated in place by the script's rule on flat arrays: an object with ``update`` or a function. The rule runs
here, or at the owners of the weights (``serving``). ``_flat`` has the steps and their exchanges.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MemberDescriptorType
from typing import Any, Protocol

import numpy as np

from ..errors import GradientError, UsageError
from ..launch.environment import REPEATS
from ..nouns import Spec
from ..serving.records import Elements, State
from ..serving.shard import Groups, Holding
from ..session.session import Session
from . import Handed
from ._checkpoint import copy_states, load, load_alone, save, save_alone
from ._flat import Array, FlatModel, OnHoldings, fits, flat_models, serve_flat, unfit
from ._memory import check_writable, floating_array, host_array, overlapping
from ._repeating import FlatSums
from ._supported import (
    LastsWhole,
    check_options,
    check_schedule,
    decide_mode,
    warn_of_plain_steps,
    weight_of_batches,
)

__all__ = ["Function", "Trainer", "Update", "adapt"]

States = dict[str, Any]
_PLAIN = bool | int | float | str | None
Function = Callable[..., object]
"""``update(weights, gradient, state)``. Further parameters need defaults, which are numbers and texts."""


class Update(Protocol):
    """A script's optimizer. Its attributes are numbers and texts, which may change between steps."""

    def update(self, weights: Array, gradient: Array, state: States) -> None:
        """Update flat ``weights`` in place, each element by itself. ``state`` is kept for them, and empty at first.

        It may contain arrays of the weights' shape, arrays of shape (), and plain values such as a count of steps.
        """
        ...


class Rule:
    """An optimizer made from a function; the function's further parameters become its attributes."""

    __slots__ = ("__dict__", "__weakref__", "_function")
    _function: Function

    def __init__(self, function: Function) -> None:
        self._function = function
        name = _called(function)
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise UsageError(f"the parameters of {name} are unknown ({error}): wrap it in a function") from error
        named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        if len(parameters) < 3 or any(one.default is one.empty for one in named[3:]):
            raise UsageError(
                f"{name} must have the form update(weights, gradient, state), with defaults for all further parameters"
            )
        for one in named[3:]:
            setattr(self, one.name, one.default)

    def update(self, weights: Array, gradient: Array, state: States) -> None:
        """Call the function with the attributes as its further arguments."""
        self._function(weights, gradient, state, **vars(self))


def rule_of(optimizer: object) -> Update:
    """A script's optimizer, or a rule made from its function. Raises UsageError for anything else."""
    if callable(getattr(optimizer, "update", None)):
        return optimizer  # type: ignore[return-value]
    if callable(optimizer):
        return Rule(optimizer)
    raise UsageError(
        "a model of NumPy needs an optimizer with update(weights, gradient, state), or a function of this form, to"
        " update the weights"
    )


def name_of(optimizer: Update) -> str:
    """The name of the update function, for errors."""
    return _called(optimizer._function) if isinstance(optimizer, Rule) else f"{type(optimizer).__name__}.update"


def described(optimizer: Update, *, values: bool) -> str:
    """A text that describes the rule; with ``values``, if these must be equal on all ranks."""
    known = sorted(_attributes(optimizer).items())
    told = (f"{name}={one!r}" if values else name for name, one in known if isinstance(one, _PLAIN | np.generic))
    return f"{name_of(optimizer)}({', '.join(told)})"


def _called(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _attributes(optimizer: Update) -> dict[str, Any]:
    """The optimizer's attributes and slots, and the numbers and texts of its classes, which attributes override."""
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
    """The optimizer's attributes for owners of weights. Raises UsageError for an attribute that is neither a number nor
    a text."""
    known = _attributes(optimizer).items()
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in known}
    for name, value in values.items():
        if not isinstance(value, _PLAIN):
            raise UsageError(
                f"the optimizer's {name!r} is {type(value).__name__}: attributes must be numbers and texts, which are"
                " sent to the owners of weights; keep everything else in update()'s state"
            )
    return [values]


def probe(optimizer: Update) -> bool:
    """Raise UsageError unless slices are updated like the whole array. Returns whether the rule keeps a state."""
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
            f"{name_of(optimizer)}() gives other weights for slices of an array than for the whole array: update"
            " every element independently, and keep everything that the optimizer learns in the state"
        )
    return bool(states[2])


class Sliced(OnHoldings):
    """A script's optimizer on the slices that this process owns."""

    def __init__(self, optimizer: Update, holdings: Sequence[Holding]) -> None:
        super().__init__(holdings)
        self._optimizer = copy.copy(optimizer)  # the script's own has the values of its next step
        self._states: list[States] = [{} for _ in holdings]

    def apply(self, groups: Groups, scale: float) -> None:
        """With the attributes of the workers' optimizers."""
        (values,) = groups
        known = _attributes(self._optimizer)
        if values.keys() != known.keys():
            raise ValueError(f"the optimizer has the attributes {sorted(known)}, but {sorted(values)} were sent")
        for name, value in values.items():
            object.__setattr__(self._optimizer, name, value)
        for held, state in zip(self._holdings, self._states, strict=True):
            gradient = held.gradient if scale == 1.0 else held.gradient * held.gradient.dtype.type(scale)
            self._optimizer.update(held.weights, gradient, state)

    def state(self) -> list[State]:
        return [state_to_send(state) for state in self._states]

    def load(self, states: Sequence[State]) -> None:
        self._states = [state_received(state) for state in states]


def state_to_send(state: States) -> State:
    """A rule's state of an array for owners and checkpoints. Raises UsageError for values other than arrays and plain
    values."""
    found: State = {}
    for key, value in state.items():
        if isinstance(value, np.ndarray):
            found[key] = Elements.of(np.ascontiguousarray(value) if value.ndim else value)
        elif isinstance(value, np.generic):
            found[key] = value.item()
        elif isinstance(value, _PLAIN):
            found[key] = value
        else:
            raise UsageError(
                f"update() keeps {key!r} as {type(value).__name__} in its state: keep arrays, numbers and texts, which"
                " owners can send and checkpoints can store"
            )
    return found


def state_received(state: State) -> States:
    """The state for the rule, in memory of its own."""
    return {key: value.array.copy() if isinstance(value, Elements) else value for key, value in state.items()}


# A model.


class Footprint:
    """Identifies the memory of one model, whatever its optimizer and its group."""


class ArrayWeights:
    """A script's arrays by name, and its optimizer with the state of each."""

    def __init__(self, arrays: dict[str, Array], optimizer: Update) -> None:
        self.arrays, self.optimizer, self.footprint = arrays, optimizer, Footprint()
        self._told = values_of(optimizer)[0].keys()
        self.finished: Callable[[], object] = lambda: None
        """Called after each update."""
        self.states: list[States] = [{} for _ in arrays]
        self._flat = [array.reshape(-1) if array.flags.c_contiguous else None for array in arrays.values()]

    @property
    def specs(self) -> list[Spec]:
        """The specs of the weights."""
        return [Spec(name, array.shape, str(array.dtype)) for name, array in self.arrays.items()]

    def read(self, into: Sequence[Array]) -> None:
        for array, flat in zip(self.arrays.values(), into, strict=True):
            np.copyto(flat.reshape(array.shape), array)

    def write(self, values: Sequence[Array]) -> None:
        for array, flat in zip(self.arrays.values(), values, strict=True):
            np.copyto(array, flat.reshape(array.shape))

    def update(self, gradients: Sequence[Array]) -> None:
        """In place; arrays that are not contiguous are updated through a copy."""
        update = self.optimizer.update
        for array, flat, gradient, state in zip(self.arrays.values(), self._flat, gradients, self.states, strict=True):
            if flat is not None:
                update(flat, gradient, state)
            else:
                copied = array.reshape(-1)
                update(copied, gradient, state)
                np.copyto(array, copied.reshape(array.shape))
        self.finished()

    def values(self) -> Groups:
        """Raises UsageError if the optimizer has other attributes than at ``prepare``."""
        (values,) = values_of(self.optimizer)
        if values.keys() != self._told:
            names = ", ".join(map(repr, sorted(values.keys() ^ self._told)))
            raise UsageError(
                f"the optimizer's {names} were added or removed after prepare(), but the owners of the weights know"
                " only the earlier attributes: set all attributes before prepare()"
            )
        return [values]

    def kept(self) -> list[State]:
        return [state_to_send(state) for state in self.states]

    def keep(self, states: Sequence[State]) -> None:
        self.states = [state_received(state) for state in states]


class Trainer:
    """The prepared form of a script's optimizer. It outlives the sessions of an elastic run.

    It also has the attributes of that optimizer: setting a learning rate here sets it there.
    """

    def __init__(self, optimizer: Update, steps: Steps) -> None:
        self._optimizer, self._steps = optimizer, steps

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # its own, which a copy that is being made does not have yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._optimizer, name, value)

    def produced(self, name: str, gradient: Any) -> None:
        """Report the complete gradient of these weights during backward, so that its exchange can start.

        The gradient is copied, so the script may reuse its memory.
        """
        self._steps.give(name, gradient, tells=True)

    def step(self, gradients: Mapping[str, Any] | None = None) -> None:
        """Average the gradients over the ranks and update the weights; all ranks must call it.

        ``gradients`` has, by name, the gradients that ``produced`` has not reported. They are sent in the order in
        which backward passes produce them.
        """
        self._steps.step_with(gradients or {})

    def drop(self) -> None:
        """Discard this rank's gradients since the last step, because their pass was abandoned.

        Raises GradientError, on all ranks, if some were sent. Under ``schedule=fifo`` none are sent before ``step``.
        """
        self._steps.drop()

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run, as arrays and plain values; all ranks must call it, and all get it.

        It includes the weights, a codec's residuals and the owners' state.
        """
        return self._steps.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from that state, with any number of ranks; all must call it with the same state.

        Refuses the state of another strategy, because its mathematics would differ.
        """
        self._steps.load_state_dict(state)


class Together(FlatModel):
    """The steps of several workers."""

    def __init__(self, session: Session, weights: ArrayWeights, weight: object) -> None:
        rule = partial(described, weights.optimizer, values=session.strategy.sync_mode().merges)
        build, weighs = partial(Sliced, weights.optimizer), weight_of_batches(session, weight)
        super().__init__(session, weights.specs, weights, build, weights.footprint, rule, weighs)
        self._numbers = {name: number for number, name in enumerate(weights.arrays)}

    def give(self, name: str, gradient: Any, *, tells: bool) -> None:
        """Take a gradient; ``tells``: backward is still running."""
        number = self._numbers.get(name)
        if number is None:
            raise self.fault(_unknown(name))
        if not isinstance(gradient, np.ndarray):
            try:
                gradient = host_array(gradient, f"the gradient of {name!r}")
            except UsageError as error:
                raise self.fault(str(error)) from error
        self.produced(number, gradient, tells=tells)

    def step_with(self, rest: Mapping[str, Any]) -> None:
        """Make a step with the gradients that were given, and these."""
        for name in _backward(self._numbers, rest):
            self.give(name, rest[name], tells=False)
        self.step()

    def state_dict(self) -> dict[str, Any]:
        return save(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load(self, state)


class Alone:
    """The steps of a run with one worker, which exchange nothing. With ``sums`` they repeat those of a log."""

    def __init__(self, session: Session, weights: ArrayWeights, sums: FlatSums | None = None) -> None:
        self._session, self._weights, self._sums = session, weights, sums
        self._places = {name: np.empty(array.shape, array.dtype) for name, array in weights.arrays.items()}
        self._flat = [place.reshape(-1) for place in self._places.values()]
        self._given: set[str] = set()
        self._own = dict.fromkeys(weights.arrays, np.empty(0))  # the gradients of a part as they were given
        self.steps = 0

    def give(self, name: str, gradient: Any, *, tells: bool) -> None:  # noqa: ARG002 - nothing is sent
        """Keeps a copy, so the script may overwrite its memory before the step."""
        self._take(name, gradient)
        self._given.add(name)

    def step_with(self, rest: Mapping[str, Any]) -> None:
        arrays = self._weights.arrays
        for name in rest:
            self._take(name, rest[name])
        if missing := [repr(name) for name in arrays if name not in self._given and name not in rest]:
            raise GradientError(f"step() without the gradients of {', '.join(missing)}")
        self._given.clear()
        if self._sums is not None:
            if not self._sums.add(list(self._own.values())):
                return
            self._flat = list(self._sums.mean)
        self.steps += 1
        self._weights.update(self._flat)

    def drop(self) -> None:
        self._given.clear()

    def state_dict(self) -> dict[str, Any]:
        return save_alone(self._session, self._weights.specs, self._weights, self.steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignores the state of codecs."""
        self.steps = load_alone(self._weights.specs, self._weights, state)
        self._given.clear()

    def resume_at(self, step: int) -> None:
        self.steps = step

    def close(self) -> None:
        """There is nothing to free."""

    def _take(self, name: str, given: Any) -> None:
        place = self._places.get(name)
        if place is None:
            raise GradientError(_unknown(name))
        if name in self._given:
            raise GradientError(
                f"the gradient of {name!r} was given twice: call step() after each pass, or drop() after an abandoned"
                " one"
            )
        gradient = host_array(given, f"the gradient of {name!r}")
        if gradient.shape != place.shape or not fits(gradient, place):
            raise GradientError(unfit(name, gradient, place))
        if self._sums is not None:
            self._sums.sums.begin_part(Values(self._weights.optimizer))
            self._own[name] = gradient.copy()
            return
        np.multiply(gradient, 1.0, out=place)  # the same rounding as with several workers


Steps = Together | Alone
"""The steps of a trainer in one session."""


class Values:
    """The numbers and texts among an optimizer's attributes, such as its rate, as an object with a state."""

    def __init__(self, optimizer: Update) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The attributes that are plain values, by name."""
        known = _attributes(self._optimizer).items()
        values = {name: one.item() if isinstance(one, np.generic) else one for name, one in known}
        return {name: one for name, one in values.items() if isinstance(one, _PLAIN)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the attributes that differ, also of a frozen dataclass."""
        mine = self.state_dict()
        for name, value in state.items():
            if name not in mine or mine[name] != value:
                object.__setattr__(self._optimizer, name, value)


class Arrays(LastsWhole):
    """A model of NumPy as it outlives the sessions of an elastic run."""

    def __init__(self, session: Session, weights: ArrayWeights, weight: object) -> None:
        self.weights, self._weight = weights, weight
        self.trainer = Trainer(weights.optimizer, self._begun(session))
        self._made = 0  # the steps of the present session's beginning
        self._put_back: int | None = None  # the steps of values that were put back after a view that broke
        session.lasting.append(self)

    def _begun(self, session: Session) -> Steps:
        """The steps in a session, from 0."""
        if not session.alone:
            return Together(session, self.weights, self._weight)
        sums = FlatSums(session, self.weights.specs, self._weight == "batch") if os.environ.get(REPEATS) else None
        return Alone(session, self.weights, sums)

    framework = "NumPy"

    @property
    def counted(self) -> ArrayWeights:
        """The weights, which call ``finished`` after each update."""
        return self.weights

    @property
    def described(self) -> str:
        """A text that differs between models of other arrays or other rules."""
        specs = self.weights.specs
        told = zlib.crc32(str([(spec, self._weight) for spec in specs]).encode())
        rule = described(self.weights.optimizer, values=False)
        return f"{len(specs)} arrays of {sum(spec.elements for spec in specs):,} elements with {rule} ({told:08x})"

    def keep_values(self) -> Callable[[], None]:
        """Copy arrays, states and attributes. The returned call puts them back."""
        weights, values = self.weights, Values(self.weights.optimizer)
        before = values.state_dict()
        arrays, states = [array.copy() for array in weights.arrays.values()], copy.deepcopy(weights.states)
        count = self.trainer._steps.steps

        def put_back() -> None:
            for array, kept in zip(weights.arrays.values(), arrays, strict=True):
                np.copyto(array, kept)
            weights.states = copy.deepcopy(states)
            values.load_state_dict(before)
            self._put_back = count

        return put_back

    def copy_again(self, session: Session, root: int, whole: bool) -> None:  # noqa: ARG002 - each worker has it whole
        """Take over the arrays and states of ``root``, its attributes and its number of steps."""
        self._made = self.trainer._steps.steps if self._put_back is None else self._put_back
        self._put_back, values = None, Values(self.weights.optimizer)
        if session.alone:
            return
        told = session.tell_all(json.dumps([self._made, values.state_dict()]).encode(), root)
        self._made, attributes = json.loads(told)
        values.load_state_dict(attributes)
        for array in self.weights.arrays.values():
            flat = array.flatten()
            session.broadcast(flat.view(np.uint8), root)
            np.copyto(array, flat.reshape(array.shape))
        copy_states(session, self.weights.specs, self.weights, root)

    def prepare_again(self, session: Session) -> None:
        """Let the script's trainer go on in another session."""
        self.trainer._steps.close()
        self.trainer._steps = steps = self._begun(session)
        steps.resume_at(self._made)
        session.lasting.append(self)


def _unknown(name: str) -> str:
    return f"the gradients have {name!r}, which the model does not have"


def _backward(known: Mapping[str, int], gradients: Mapping[str, Any]) -> list[str]:
    """The names in the order of backward passes. Unknown names, which will be refused, come first."""
    return sorted(gradients, key=lambda name: -known.get(name, len(known)))


def adapt(session: Session, model: Any, optimizer: Any, options: Mapping[str, Any]) -> Handed | None:
    """Start all processes from rank 0's values. The returned arrays are read-only if others hold the weights.

    Raises UsageError for a model that cannot be trained, and MismatchError if ranks differ.
    """
    check_options(options, ": a model of NumPy has no hooks, buffers or batches", known=("weight",))
    weight_of_batches(session, options["weight"])
    arrays, rule = _arrays_of(model), rule_of(optimizer)
    values, keeps = values_of(rule), probe(rule)
    weights = ArrayWeights(arrays, rule)
    if session.alone:
        warn_of_plain_steps(session)
    else:
        check_schedule(session.strategy, "NumPy")
        decide_mode(session, values, name_of(rule), keeps)
    if session.is_worker:
        _let_go(session, weights)
        made = Arrays(session, weights, options["weight"])
        held = session.strategy.server_holds_weights and not session.alone
        return Handed((_read_only(arrays) if held else arrays, made.trainer))
    words = described(rule, values=session.strategy.sync_mode().merges)
    serve_flat(session, weights.specs, weights, partial(Sliced, rule), weights.footprint, words)
    return None


def _arrays_of(model: Any) -> dict[str, Array]:
    """A script's weights. Raises UsageError unless they are a dictionary of writable floating-point arrays."""
    if not isinstance(model, Mapping) or not model:
        raise UsageError("a model of NumPy is a dictionary of at least one array")
    for name in model:
        if not isinstance(name, str):
            raise UsageError(
                f"the model's {name!r} has a {type(name).__name__} as its name: give every array a text as its name"
            )
    arrays = {name: floating_array(given, f"the model's {name!r}") for name, given in model.items()}
    check_writable(arrays)
    return arrays


def _let_go(session: Session, weights: ArrayWeights) -> None:
    """Release models of the same memory in any session. The new model gets their keys."""
    for made in flat_models(session):
        theirs = made.weights
        if isinstance(theirs, ArrayWeights) and _overlap(weights, theirs):
            made.let_go()
            weights.footprint = theirs.footprint
    session.lasting[:] = [
        one for one in session.lasting if not (isinstance(one, Arrays) and _overlap(weights, one.weights))
    ]


def _overlap(mine: ArrayWeights, theirs: ArrayWeights) -> bool:
    count, arrays = len(mine.arrays), [*mine.arrays.values(), *theirs.arrays.values()]
    return any(one < count <= two or two < count <= one for one, two in overlapping(arrays))


def _read_only(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Read-only views: the owners would not see a write, and the next pull would overwrite it."""
    found = {name: array.view() for name, array in arrays.items()}
    for array in found.values():
        array.flags.writeable = False
    return found
