"""Variables of TensorFlow and Keras as arrays of the host: which a model has, their names, and what is served of them.

A variable's name is its path in the model without the numbers that Keras counts through a process, so that a model
has the same names wherever, and however often, it is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...errors import MismatchError, UsageError
from ...nouns import Spec
from ...session.session import Session

Array = NDArray[Any]
_TYPES = ("float16", "float32", "float64")


def resource(given: Any) -> Any:
    """TensorFlow's variable that holds the value of one of Keras', or of its own."""
    return given.value if isinstance(given, keras.Variable) else given


def value(given: Any) -> Array:
    """A copy of what a variable holds, in memory of its own."""
    return np.array(resource(given).numpy())


def assign(given: Any, array: Array) -> None:
    """Let a variable hold a copy of this: TensorFlow would keep the very memory that it is given."""
    variable = resource(given)
    variable.assign(np.array(array, copy=True).reshape(variable.shape))


def trained(model: Any) -> list[Any]:
    """The variables of a model that are trained, in its order; raises UsageError for what is no model, or not built."""
    check_model(model)
    if isinstance(model, keras.Layer) and not model.built:
        raise UsageError(
            f"the model {model.name!r} has no variables yet: give it an Input, call build(shape), or call it with data,"
            " before syncline.prepare()"
        )
    return _variables(model, "trainable_variables")


def untrained(model: Any) -> list[Any]:
    """Those of its variables that a step changes by itself, such as moving means; not the state of its random seeds."""
    if isinstance(model, keras.Layer):
        return list(model.non_trainable_weights)
    return list(model.non_trainable_variables) if isinstance(model, tf.Module) else []


def check_model(model: Any) -> None:
    """Raise UsageError for a model that another framework, or TensorFlow's own distribution, has."""
    if any(kind.__module__.partition(".")[0] == "tf_keras" for kind in type(model).__mro__):
        raise UsageError(
            f"the model is {type(model).__name__} of tf_keras, Keras 2: Syncline trains models of Keras 3; leave"
            " TF_USE_LEGACY_KERAS out, and import keras"
        )
    if tf.distribute.has_strategy() or getattr(model, "_distribute_strategy", None) is not None:
        raise UsageError(
            "the model is in the scope of a tf.distribute.Strategy, which would exchange gradients too: make it, and"
            " prepare it, outside of strategy.scope()"
        )


def specs_of(variables: Sequence[Any]) -> list[Spec]:
    """What there is to train; raises UsageError for what is not served."""
    if not variables:
        raise UsageError("this model has no variables to train: give one whose layers are trainable, and built")
    found = []
    for name, given in zip(names_of(variables), variables, strict=True):
        variable = resource(given)
        if isinstance(variable, tf.distribute.DistributedValues):
            raise UsageError(
                f"the variable {name!r} was made in the scope of a tf.distribute.Strategy, which would exchange"
                " gradients too: make the model outside of strategy.scope()"
            )
        dtype = tf.as_dtype(variable.dtype).name
        if dtype not in _TYPES:
            raise UsageError(
                f"the variable {name!r} is {dtype}: Syncline trains {', '.join(_TYPES)}; keep variables in one of them,"
                " and compute in others by keras.mixed_precision (mixed_bfloat16)"
            )
        device = tf.DeviceSpec.from_string(variable.device).device_type
        if device not in (None, "CPU"):
            raise UsageError(
                f"the variable {name!r} lies on a device of kind {device}: syncline.tensorflow serves the CPU; say"
                f" tf.config.set_visible_devices([], {device!r}) before anything is computed"
            )
        found.append(Spec(name, tuple(variable.shape), dtype))
    return found


def names_of(variables: Iterable[Any], parts: int = 2) -> list[str]:
    """A name for each, of the last parts of its path, the same in every process that makes the same model."""
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
    """Let variables be worker ``root``'s; all workers call it with those of the same model."""
    for given in variables:
        array = np.atleast_1d(value(given))
        session.broadcast(array.reshape(-1).view(np.uint8), root)
        assign(given, array)


def broadcast(session: Session, given: Any, root: int) -> None:
    """Let the variables of a model, an optimizer or a list be worker ``root``'s; raises MismatchError for others."""
    if not 0 <= root < session.world_size:
        raise UsageError(
            f"broadcast() from rank {root} of {session.world_size}: give one of 0 to {session.world_size - 1}"
        )
    if session.alone or not session.is_worker:
        return
    variables = _variables(given, "variables")
    mine = [
        [name, str(value(one).dtype), list(one.shape)] for name, one in zip(names_of(variables), variables, strict=True)
    ]
    theirs = json.loads(session.gather(json.dumps(mine).encode())[root])
    if mine != theirs:
        pairs = zip_longest(mine, theirs, fillvalue="nothing")
        here, there = next(pair for pair in pairs if pair[0] != pair[1])
        error = MismatchError(
            f"{session.name(session.index)} broadcasts other variables than rank {root}: {here}, not {there}"
        )
        session.fail(error)
        raise error
    copy_from(session, variables, root)


def _variables(model: Any, attribute: str) -> list[Any]:
    found = getattr(model, attribute, None)
    if found is None:
        found = list(model.values()) if isinstance(model, Mapping) else model
    if not isinstance(found, Sequence) or not all(isinstance(one, keras.Variable | tf.Variable) for one in found):
        raise UsageError(
            f"the model is {type(model).__name__}: give one of Keras, a tf.Module, or a list or dictionary of variables"
        )
    return list(found)
