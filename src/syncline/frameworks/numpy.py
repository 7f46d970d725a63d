"""NumPy: ``prepare`` for models that are a dictionary of arrays, whose gradients a script computes by itself.

    weights, optimizer = syncline.prepare(weights, Sgd(lr=0.1))
    optimizer.produced("last", gradient)            # as backward makes them: it is under way from here on
    optimizer.step(rest)                            # the gradients that are left, by name; weights are updated in place

The arrays are whoever's has host memory to show: Caffe's blobs, the buffer protocol, DLPack (``_memory``). They are
updated where they are, by a script's rule (``_rules``) on flat arrays, here or by the owners of the weights
(``serving``). What a step is, and what travels when, is ``_flat``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..errors import GradientError, UsageError
from ..nouns import Spec
from ..serving.records import State
from ..serving.shard import Groups
from ..session.session import Session
from . import Handed
from ._alone import warn_of_plain_steps
from ._coming import fits, unfit
from ._flat import FlatModel, flat_models
from ._memory import check_writable, floating_array, host_array, overlapping
from ._resumed import load, load_alone, save, save_alone
from ._rules import Function, Sliced, States, Update, described, heard, name_of, probe, rule_of, said, values_of
from ._schedules import check_mode, check_schedule
from ._served import serve_model
from ._weights import Array

__all__ = ["Function", "Trainer", "Update", "adapt"]

Arrays = Mapping[str, Array]
_OPTIONS = {"unused": "error", "weight": 1, "ignore": (), "broadcast_buffers": True}
"""Those of ``syncline.prepare`` that say nothing."""


class Trainer(Protocol):
    """What becomes of a script's optimizer; it has that one's attributes beside."""

    def produced(self, name: str, gradient: Any) -> None:
        """The gradient of these weights is complete, while backward goes on: it is under way from here on.

        It is copied: its memory is the script's again.
        """
        ...

    def step(self, gradients: Mapping[str, Any] | None = None) -> None:
        """Average the ranks' gradients, by name, and update the weights with the mean; all ranks call it.

        ``gradients`` are those of which ``produced`` has not told.
        """
        ...

    def drop(self) -> None:
        """Forget the gradients that have been given since the last step, of a pass that was given up.

        Raises GradientError, on all ranks, where some have gone: under ``schedule=fifo`` none go before ``step``.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, the weights too, as arrays and plain values; all ranks call it, and have it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, with as many ranks, or more, or fewer; all call it with the same."""
        ...


class Footprint:
    """The memory of one model, whichever optimizer trains it, and whoever does."""


class ArrayWeights:
    """A script's arrays by name, and its optimizer with what that keeps of each."""

    def __init__(self, arrays: dict[str, Array], optimizer: Update) -> None:
        self.arrays, self.optimizer, self.footprint = arrays, optimizer, Footprint()
        self._told = values_of(optimizer)[0].keys()
        self.states: list[States] = [{} for _ in arrays]
        self._flat = [array.reshape(-1) if array.flags.c_contiguous else None for array in arrays.values()]

    @property
    def specs(self) -> list[Spec]:
        """What there is to train."""
        return [Spec(name, array.shape, str(array.dtype)) for name, array in self.arrays.items()]

    def read(self, into: Sequence[Array]) -> None:
        """Element by element."""
        for array, flat in zip(self.arrays.values(), into, strict=True):
            np.copyto(flat.reshape(array.shape), array)

    def write(self, values: Sequence[Array]) -> None:
        """Where they are."""
        for array, flat in zip(self.arrays.values(), values, strict=True):
            np.copyto(array, flat.reshape(array.shape))

    def update(self, gradients: Sequence[Array]) -> None:
        """Where they are; those that are not contiguous in a copy."""
        update = self.optimizer.update
        for array, flat, gradient, state in zip(self.arrays.values(), self._flat, gradients, self.states, strict=True):
            if flat is not None:
                update(flat, gradient, state)
            else:
                copied = array.reshape(-1)
                update(copied, gradient, state)
                np.copyto(array, copied.reshape(array.shape))

    def values(self) -> Groups:
        """Its attributes; raises UsageError for others than there were when owners were given theirs."""
        (values,) = values_of(self.optimizer)
        if values.keys() != self._told:
            names = ", ".join(map(repr, sorted(values.keys() ^ self._told)))
            raise UsageError(
                f"the owners of the weights do not know of the optimizer's {names}, which it had not, or has no more:"
                " give it all its attributes before prepare()"
            )
        return [values]

    def kept(self) -> list[State]:
        """What it has put into the states that it was given."""
        return [said(state) for state in self.states]

    def keep(self, states: Sequence[State]) -> None:
        """For its next call."""
        self.states = [heard(state) for state in states]


class Wrapped:
    """Has the attributes of a script's optimizer: what is set here, such as a learning rate, is set there."""

    _optimizer: Update

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # its own, which a copy that is being made does not have yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._optimizer, name, value)


class Shared(Wrapped):
    """A ``Trainer`` of several workers."""

    def __init__(self, session: Session, weights: ArrayWeights) -> None:
        self._optimizer = weights.optimizer
        rule = partial(described, weights.optimizer, values=session.strategy.sync_mode().merges)
        build = partial(Sliced, weights.optimizer)
        self._model = FlatModel(session, weights.specs, weights, build, weights.footprint, rule)
        self._numbers = {name: number for number, name in enumerate(weights.arrays)}

    def produced(self, name: str, gradient: Any) -> None:
        """It goes when its bucket is complete."""
        self._give(name, gradient, tells=True)

    def step(self, gradients: Mapping[str, Any] | None = None) -> None:
        """Those that are given here go in the order in which backward passes come to them."""
        for name in _backward(self._numbers, gradients or {}):
            self._give(name, (gradients or {})[name], tells=False)
        self._model.step()

    def drop(self) -> None:
        """On each rank by itself."""
        self._model.drop()

    def state_dict(self) -> dict[str, Any]:
        """Also what a codec keeps back, and what owners of weights know."""
        return save(self._model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuses that of another strategy, whose mathematics would differ."""
        load(self._model, state)

    def _give(self, name: str, gradient: Any, *, tells: bool) -> None:
        number = self._numbers.get(name)
        if number is None:
            raise self._model.fault(_unknown(name))
        if not isinstance(gradient, np.ndarray):
            try:
                gradient = host_array(gradient, f"the gradient of {name!r}")
            except UsageError as error:
                raise self._model.fault(str(error)) from error
        self._model.produced(number, gradient, tells=tells)


class Alone(Wrapped):
    """A ``Trainer`` in a world of one worker."""

    def __init__(self, session: Session, weights: ArrayWeights) -> None:
        self._session, self._weights, self._optimizer = session, weights, weights.optimizer
        self._places = {name: np.empty(array.shape, array.dtype) for name, array in weights.arrays.items()}
        self._flat = [place.reshape(-1) for place in self._places.values()]
        self._given: set[str] = set()
        self._steps = 0

    def produced(self, name: str, gradient: Any) -> None:
        """It is kept, in a copy: the script may write to its memory before the step, and the rule to the copy."""
        self._take(name, gradient)
        self._given.add(name)

    def step(self, gradients: Mapping[str, Any] | None = None) -> None:
        """Update the weights with these gradients."""
        arrays, rest = self._weights.arrays, gradients or {}
        for name in rest:
            self._take(name, rest[name])
        if missing := [repr(name) for name in arrays if name not in self._given and name not in rest]:
            raise GradientError(f"step() without the gradients of {', '.join(missing)}")
        self._given.clear()
        self._steps += 1
        self._weights.update(self._flat)

    def drop(self) -> None:
        """They have gone nowhere."""
        self._given.clear()

    def state_dict(self) -> dict[str, Any]:
        """As several workers would have it."""
        return save_alone(self._session, self._weights.specs, self._weights, self._steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing of a codec."""
        self._steps = load_alone(self._weights.specs, self._weights, state)
        self._given.clear()

    def _take(self, name: str, given: Any) -> None:
        place = self._places.get(name)
        if place is None:
            raise GradientError(_unknown(name))
        if name in self._given:
            raise GradientError(
                f"the gradient of {name!r} was given twice: call step() between two; where a pass was given up,"
                " say drop() before the next one"
            )
        gradient = host_array(given, f"the gradient of {name!r}")
        if gradient.shape != place.shape or not fits(gradient, place):
            raise GradientError(unfit(name, gradient, place))
        np.multiply(gradient, 1.0, out=place)  # with the roundings that several workers have


def _unknown(name: str) -> str:
    return f"the gradients have {name!r}, which the model does not have"


def _backward(known: Mapping[str, int], gradients: Mapping[str, Any]) -> list[str]:
    """Names in the order of backward passes; unknown ones, which will be refused, first."""
    return sorted(gradients, key=lambda name: -known.get(name, len(known)))


def adapt(session: Session, model: Any, optimizer: Any, options: Mapping[str, Any]) -> Handed | None:
    """Start all processes from rank 0's values; what is returned is read-only where others hold the weights.

    Raises UsageError for what cannot be trained, MismatchError where ranks differ.
    """
    others = sorted(name for name, value in options.items() if value != _OPTIONS[name])
    if others:
        raise UsageError(f"{others[0]}= is for models of PyTorch: a model of NumPy has no hooks, buffers or batches")
    arrays, rule = _arrays_of(model), rule_of(optimizer)
    values, keeps = values_of(rule), probe(rule)
    weights = ArrayWeights(arrays, rule)
    if session.alone:
        warn_of_plain_steps(session)
        return Handed((arrays, Alone(session, weights)))
    check_schedule(session.strategy, "NumPy")
    check_mode(session.strategy, values, name_of(rule), keeps)
    if session.is_worker:
        _let_go(session, weights)
        made = Shared(session, weights)
        return Handed((_read_only(arrays) if session.strategy.server_holds_weights else arrays, made))
    words = described(rule, values=session.strategy.sync_mode().merges)
    serve_model(session, weights.specs, weights, partial(Sliced, rule), weights.footprint, words)
    return None


def _arrays_of(model: Any) -> dict[str, Array]:
    """A script's weights; raises UsageError for what is no dictionary of floating-point arrays that can be written."""
    if not isinstance(model, Mapping) or not model:
        raise UsageError("a model of NumPy is a dictionary of arrays, and has one at least")
    for name in model:
        if not isinstance(name, str):
            raise UsageError(f"the model's {name!r} is named by {type(name).__name__}: give arrays, each by a name")
    arrays = {name: floating_array(given, f"the model's {name!r}") for name, given in model.items()}
    check_writable(arrays)
    return arrays


def _let_go(session: Session, weights: ArrayWeights) -> None:
    """End what has been prepared of the same memory, in this session or another one; what comes has its keys again."""
    mine = list(weights.arrays.values())
    for made in flat_models(session):
        theirs = made.weights
        if isinstance(theirs, ArrayWeights):
            arrays = mine + list(theirs.arrays.values())
            if any(one < len(mine) <= two or two < len(mine) <= one for one, two in overlapping(arrays)):
                made.let_go()
                weights.footprint = theirs.footprint


def _read_only(arrays: Arrays) -> dict[str, Array]:
    """The owners would not see what is written, and the next pull would undo it."""
    found = {name: array.view() for name, array in arrays.items()}
    for array in found.values():
        array.flags.writeable = False
    return found
