"""Variables of TensorFlow and Keras as host arrays: a model's, its optimizer's state, and slices at their owners.

A variable's name is its path in the model without the numbers that Keras counts per process, so a model has the same
names in every process and however often it is created. Keras optimizers keep lists of variables as attributes, with one
entry per trained variable. ``Slots`` stores such a list under the attribute's name, tensor by tensor. A scalar, such as
a count of steps, is stored with every tensor; other variables are stored with the first tensor.

Between steps the variables have the current values. While the computation of a step waits for a call, the computation
owns the variables, and the weights are the arguments or results of the call (``VariableWeights.within``).

An owner of weights creates the optimizer from its configuration, for variables that are its slices (``KerasSlices``).
The learning rate, which schedules and callbacks change, is sent with every push; all other settings stay as they were.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...errors import UsageError
from ...nouns import Spec
from ...serving.records import Elements, State
from ...serving.shard import Groups, Holding
from ...session.session import Session
from .._computations import RATE, TYPES, WeightsOfCall, broadcast_into, check_like_root
from .._flat import Array, OnHoldings, flat_elements


def resource(given: Any) -> Any:
    """TensorFlow's variable behind a Keras variable, or the variable itself."""
    return given.value if isinstance(given, keras.Variable) else given


def value(given: Any) -> Array:
    """A copy of a variable's value, in memory of its own."""
    return np.array(resource(given).numpy())


def assign(given: Any, array: Array) -> None:
    """Assign a copy of the array to a variable, because TensorFlow may keep the memory that it receives."""
    variable = resource(given)
    variable.assign(np.array(array, copy=True).reshape(variable.shape))


def trained(model: Any) -> list[Any]:
    """The trained variables of a model, in its order. Raises UsageError for other objects, and for models that are
    not built."""
    check_model(model)
    if isinstance(model, keras.Layer) and not model.built:
        raise UsageError(
            f"the model {model.name!r} has no variables yet: give it an Input, call build(shape), or call it with data,"
            " before syncline.prepare()"
        )
    return _variables(model, "trainable_variables")


def untrained(model: Any) -> list[Any]:
    """The variables of a model that steps change by themselves, such as moving means, but not random seeds."""
    if isinstance(model, keras.Layer):
        return list(model.non_trainable_weights)
    return list(model.non_trainable_variables) if isinstance(model, tf.Module) else []


def moving(model: Any) -> list[Any]:
    """The variables that steps change by themselves: the non-trainable variables of trainable layers."""
    if not isinstance(model, keras.Layer):
        return list(model.non_trainable_variables) if isinstance(model, tf.Module) else []
    layers = [one for one in model._flatten_layers() if one.trainable]
    own = {id(variable) for layer in layers for variable in layer._non_trainable_variables}
    return [one for one in model.non_trainable_weights if id(one) in own]


def check_model(model: Any) -> None:
    """Raise UsageError for a model of another Keras, or one under TensorFlow's own distribution."""
    if any(kind.__module__.partition(".")[0] == "tf_keras" for kind in type(model).__mro__):
        raise UsageError(
            f"the model is {type(model).__name__} of tf_keras, Keras 2: Syncline trains models of Keras 3; leave"
            " TF_USE_LEGACY_KERAS out, and import keras"
        )
    if tf.distribute.has_strategy() or getattr(model, "_distribute_strategy", None) is not None:
        raise UsageError(
            "the model is in the scope of a tf.distribute.Strategy, which would exchange gradients too: create and"
            " prepare the model outside of strategy.scope()"
        )


def specs_of(variables: Sequence[Any]) -> list[Spec]:
    """The specs of the variables. Raises UsageError for types and devices that Syncline does not train."""
    if not variables:
        raise UsageError("this model has no variables to train: give a built model with trainable layers")
    found = []
    for name, given in zip(names_of(variables), variables, strict=True):
        variable = resource(given)
        if isinstance(variable, tf.distribute.DistributedValues):
            raise UsageError(
                f"the variable {name!r} was made in the scope of a tf.distribute.Strategy, which would exchange"
                " gradients too: create the model outside of strategy.scope()"
            )
        dtype = tf.as_dtype(variable.dtype).name
        if dtype not in TYPES:
            raise UsageError(
                f"the variable {name!r} is {dtype}: Syncline trains {', '.join(TYPES)}; keep variables in one of"
                " these types, and compute in others with keras.mixed_precision (mixed_bfloat16)"
            )
        device = tf.DeviceSpec.from_string(variable.device).device_type
        if device not in (None, "CPU"):
            raise UsageError(
                f"the variable {name!r} lies on a device of kind {device}: syncline.tensorflow supports the CPU; call"
                f" tf.config.set_visible_devices([], {device!r}) before any computation"
            )
        found.append(Spec(name, tuple(variable.shape), dtype))
    return found


def names_of(variables: Iterable[Any], parts: int = 2) -> list[str]:
    """A name for each variable from the end of its path, the same in every process that creates the same model."""
    found: list[str] = []
    for given in variables:
        path = given.path if isinstance(given, keras.Variable) else given.name.partition(":")[0]
        plain = "/".join(re.sub(r"_\d+$", "", part) for part in path.split("/")[-parts:])
        name, number = plain, 1
        while name in found:
            number += 1
            name = f"{plain} ({number})"
        found.append(name)
    return found


def copy_from(session: Session, variables: Sequence[Any], root: int) -> None:
    """Set variables to worker ``root``'s values; all workers must call it with variables of the same model."""
    for given in variables:
        array = value(given)
        broadcast_into(session, [array], root)
        assign(given, array)


def broadcast(session: Session, given: Any, root: int) -> None:
    """Set variables of a model, an optimizer or a list to worker ``root``'s values. Raises MismatchError for others."""
    if not 0 <= root < session.world_size:
        raise UsageError(
            f"broadcast() from rank {root} of {session.world_size}: choose one of 0 to {session.world_size - 1}"
        )
    if session.alone or not session.is_worker:
        return
    variables = _variables(given, "variables")
    check_like_root(session, "other variables", zip(names_of(variables), map(value, variables), strict=True), root)
    copy_from(session, variables, root)


def _variables(model: Any, attribute: str) -> list[Any]:
    found = getattr(model, attribute, None)
    if found is None:
        found = list(model.values()) if isinstance(model, Mapping) else model
    if not isinstance(found, Sequence) or not all(isinstance(one, keras.Variable | tf.Variable) for one in found):
        raise UsageError(
            f"the model is {type(model).__name__}: give a model of Keras, a tf.Module, or a list or dictionary of"
            " variables"
        )
    return list(found)


# What an optimizer keeps.


class Slots:
    """The state of a built optimizer, for variables in the model's order."""

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        order = {id(resource(one)): number for number, one in enumerate(innermost(optimizer)._trainable_variables)}
        self._order = [order[id(resource(one))] for one in variables]
        self._of: list[dict[str, Any]] = [{} for _ in variables]
        self.elementwise: set[int] = set()
        """The ids of the state variables that have the shape of their trained variable."""
        seen: set[int] = set()
        for key, listed in _lists(innermost(optimizer), len(order)).items():
            for number, place in enumerate(self._order):
                slot = listed[place]
                if slot is not None:
                    self._of[number][key] = slot
                    seen.add(id(slot))
                    if tuple(slot.shape) == tuple(variables[number].shape):
                        self.elementwise.add(id(slot))
        rest = [one for one in optimizer.variables if id(one) not in seen]
        for name, slot in zip(names_of(rest, parts=1), rest, strict=True):
            for state in self._of[:1] if len(slot.shape) else self._of:
                state[name] = slot

    def read(self) -> list[State]:
        """Copies of the state, flat except for scalars."""
        return [{key: flat_elements(value(slot)) for key, slot in state.items()} for state in self._of]

    def write(self, states: Sequence[State]) -> None:
        """Set the variables that are in the states, and leave the others unchanged."""
        for mine, told in zip(self._of, states, strict=True):
            for key, slot in mine.items():
                found = told.get(key)
                if isinstance(found, Elements) and found.array.size == np.prod(slot.shape, dtype=int):
                    assign(slot, found.array)


def innermost(optimizer: Any) -> Any:
    """The optimizer that updates the variables, inside one that scales the loss."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _lists(optimizer: Any, count: int) -> dict[str, Sequence[Any]]:
    """The attributes that hold one variable of the optimizer's per trained variable."""
    mine = {id(one) for one in optimizer.variables}
    found: dict[str, Sequence[Any]] = {}
    for name, listed in vars(optimizer).items():
        if isinstance(listed, list) and len(listed) == count and name != "_variables":  # which are all that it has
            slots = [one for one in listed if one is not None]
            if slots and all(isinstance(one, keras.Variable) and id(one) in mine for one in slots):
                found[name.strip("_")] = listed
    return found


class Rate:
    """An optimizer's learning rate, if the script sets it, as an object with a state."""

    def __init__(self, optimizer: Any) -> None:
        rate = getattr(innermost(optimizer), "_learning_rate", None)
        self._rate = rate if isinstance(rate, keras.Variable) else None

    def state_dict(self) -> dict[str, Any]:
        return {} if self._rate is None else {"rate": value(self._rate)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._rate is not None:
            assign(self._rate, state["rate"])


# A model's side of the steps of flat arrays.


class VariableWeights(WeightsOfCall):
    """The trained variables of one model. ``slots`` has the optimizer's state if the worker keeps it."""

    def __init__(self, variables: Sequence[Any], slots: Slots | None) -> None:
        super().__init__()
        self._variables, self.slots = list(variables), slots
        self.within = False
        """Whether a call is in progress."""
        self.rate = 1.0

    def read(self, into: Sequence[Array]) -> None:
        """Between steps, from the variables."""
        if self.within:
            super().read(into)
            return
        for variable, flat in zip(self._variables, into, strict=True):
            np.copyto(flat, value(variable).reshape(-1))

    def write(self, values: Sequence[Array]) -> None:
        """Between steps, to the variables."""
        if self.within:
            super().write(values)
            return
        for variable, flat in zip(self._variables, values, strict=True):
            assign(variable, flat)

    def values(self) -> Groups:
        """The learning rate of the present step; all other settings stay as they were."""
        return [{RATE: self.rate, _WHOLE_RATE: self.rate}]

    def kept(self) -> list[State]:
        return [{} for _ in self._variables] if self.slots is None else self.slots.read()

    def keep(self, states: Sequence[State]) -> None:
        """Missing variables keep their present values."""
        if self.slots is not None:
            self.slots.write(states)


# At owners of weights.


_WHOLE_RATE = "whole lr"
_REMEDY = "or ps(update=worker), ring or another allreduce"


class KerasSlices(OnHoldings):
    """An optimizer on the slices that this process owns.

    ``beside`` a worker it updates them without a graph, in the calling thread. A graph would need a thread of
    TensorFlow, and the only one may be executing the worker's step, which waits for this update.
    """

    def __init__(self, optimizer: Any, holdings: Sequence[Holding], *, beside: bool) -> None:
        super().__init__(holdings)
        self._variables = [_variable(held.weights, number) for number, held in enumerate(holdings)]
        self._optimizer = _fresh(optimizer, self._variables)
        self._slots = Slots(self._optimizer, self._variables)
        self._update = self._updated if beside else tf.function(self._updated, autograph=False)

    def apply(self, groups: Groups, scale: float) -> None:
        """Updates its own variables, because TensorFlow's memory is not the transport's."""
        assign(self._optimizer.learning_rate, np.array(groups[0][RATE]))
        for held, variable in zip(self._holdings, self._variables, strict=True):
            assign(variable, held.weights)
        gradients = [tf.constant(np.array(held.gradient)) for held in self._holdings]
        self._update(gradients, tf.constant(scale, tf.float64))
        # A rate divided among pushes must not enter a checkpoint, which sets the workers' rate.
        assign(self._optimizer.learning_rate, np.array(groups[0][_WHOLE_RATE]))
        for held, variable in zip(self._holdings, self._variables, strict=True):
            np.copyto(held.weights, value(variable))

    def _updated(self, gradients: Any, scale: Any) -> None:
        scaled = [one * tf.cast(scale, one.dtype) for one in gradients]
        self._optimizer.apply(scaled, self._variables)

    def state(self) -> list[State]:
        """By the names of ``Slots``."""
        return self._slots.read()

    def load(self, states: Sequence[State]) -> None:
        """Missing variables keep their present values."""
        self._slots.write(states)


def probe(optimizer: Any, variables: Sequence[Any], specs: Sequence[Spec]) -> bool:
    """Raise UsageError unless slices are updated like whole variables. Returns whether it has elementwise state.

    The test runs in float64 on small variables with the same numbers of dimensions. Each half of them has an optimizer
    of its own. One of the gradients is large, to trigger limits on norms.
    """
    _check_told(optimizer, variables)
    draw = np.random.default_rng(0)
    shapes = [tuple(min(length, 3) for length in spec.shape) for spec in specs]
    starts = [np.asarray(draw.standard_normal(shape)) for shape in shapes]
    whole, owners = [_variable(one, number) for number, one in enumerate(starts)], []
    for half in range(2):
        parts = [_variable(_half(one, half), number) for number, one in enumerate(starts)]
        owners.append((parts, _fresh(optimizer, parts)))
    alone = _fresh(optimizer, whole)
    for factor in (1.0, 1e4, 1.0):
        gradients = [np.asarray(factor * draw.standard_normal(shape)) for shape in shapes]
        alone.apply([tf.constant(one) for one in gradients], whole)
        for half, (parts, theirs) in enumerate(owners):
            theirs.apply([tf.constant(_half(one, half)) for one in gradients], parts)
    near = all(
        np.allclose(_half(value(one), half), value(parts[number]), rtol=1e-9, atol=1e-12)
        for half, (parts, _) in enumerate(owners)
        for number, one in enumerate(whole)
    )
    slots, kept = Slots(alone, whole), {id(one): one for one in alone.variables if len(one.shape)}
    if not near or not slots.elementwise.issuperset(kept):
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} gives other weights for slices of the variables than for all of"
            " them, and owners of the weights have slices: use one that treats every element by itself (SGD, Adam,"
            f" AdamW, ..., without clipnorm and global_clipnorm), {_REMEDY}"
        )
    return bool(kept)


def _check_told(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise UsageError for settings that are not sent to the owners of the weights."""
    what = ""
    if hasattr(optimizer, "inner_optimizer"):
        what = "scales the loss (LossScaleOptimizer)"
    elif int(optimizer.iterations):
        what = f"has made {int(optimizer.iterations)} steps already"
    elif optimizer.use_ema:
        what = "keeps means of weights (use_ema)"
    elif optimizer.gradient_accumulation_steps:
        what = "updates weights in some steps only (gradient_accumulation_steps)"
    elif any(vars(optimizer).get(f"_exclude_from_weight_decay{of}") for of in ("", "_pattern")):
        what = "excludes variables from weight decay"
    elif any(getattr(one, "constraint", None) is not None for one in variables):
        what = "is followed by constraints of variables"
    if what:
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} {what}, which owners of the weights do not support, because they"
            f" update slices: leave it out, {_REMEDY}"
        )


def _fresh(optimizer: Any, variables: Sequence[Any]) -> Any:
    """An optimizer of the same configuration for other variables. Its learning rate is a variable."""
    rate = float(np.asarray(optimizer.learning_rate))
    made = type(optimizer).from_config(optimizer.get_config() | {"learning_rate": rate})
    with keras.name_scope(made.name, caller=made):
        made.build(list(variables))
    return made


def _variable(array: Array, number: int) -> Any:
    return keras.Variable(np.array(array), dtype=str(array.dtype), name=f"slice_{number}")


def _half(array: Array, half: int) -> Array:
    flat = array.reshape(-1)
    middle = (flat.size + 1) // 2
    return flat[middle:] if half else flat[:middle]
