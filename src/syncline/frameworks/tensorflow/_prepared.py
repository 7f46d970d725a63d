"""What ``prepare`` does with a model and an optimizer of Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from ...errors import UsageError
from ...session.session import Session
from .._alone import warn_of_plain_steps
from ._optimizer import check_optimizer, exchange_in
from ._run import Run, Unused
from ._slots import Slots
from ._variables import copy_from, specs_of, trained, untrained
from ._weights import VariableWeights


class Prepared:
    """A model with its optimizer in a run; ``run`` is None in a world of one worker."""

    def __init__(self, session: Session, model: Any, optimizer: Any, unused: Unused) -> None:
        self.session, self.model, self.optimizer = session, model, optimizer
        self.variables = trained(model)
        self.specs = specs_of(self.variables)
        check_optimizer(optimizer, self.variables)
        self.weights = VariableWeights(self.variables, Slots(optimizer, self.variables))
        self.run: Run | None = None
        if session.alone:
            warn_of_plain_steps(session)
            return
        self.run = Run(session, self.variables, self.weights, unused, type(optimizer).__name__)

    def begin(self) -> bool:
        """Meet all; False on a server, that has served."""
        if self.run is None:
            return True
        if not self.run.begin(_no_owner, self.model, keeps=True):
            return False
        copy_from(self.session, [*untrained(self.model), *self.optimizer.variables], 0)
        exchange_in(self.optimizer, self.run)
        if isinstance(self.model, keras.Model):
            _guard(self.model, self.run, self.optimizer)
        return True


def prepare(session: Session, model: Any, optimizer: Any, unused: Unused) -> Prepared | None:
    """Make a model part of the run; None on a server that has served."""
    variables = trained(model)
    used = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if used is None:
        raise UsageError(
            "a model of TensorFlow needs its optimizer: say prepare(model, optimizer), or compile() the model before;"
            " loops with an optimizer that is not Keras' take gradients from syncline.tensorflow.GradientTape()"
        )
    del variables
    made = Prepared(session, model, used, unused)
    if not made.begin():
        return None
    if isinstance(model, tf.Module):
        _prepared[model] = made
    return made


_prepared: WeakKeyDictionary[Any, Prepared] = WeakKeyDictionary()


def _guard(model: Any, run: Run, optimizer: Any) -> None:
    """Let ``fit`` refuse what would train without the other ranks, and say what has failed, not that something has."""
    original = type(model).make_train_function.__get__(model)

    def make_train_function(force: bool = False) -> Any:
        if model.optimizer is not optimizer:
            raise run.model.fault(
                "the model is compiled with another optimizer than the one that it was prepared with, which would train"
                " without the other ranks: give compile() the very optimizer, or call prepare() after it"
            )
        if model.jit_compile:
            raise run.model.fault(
                "the model is compiled with jit_compile=True, and computations of XLA on the CPU cannot call Syncline:"
                " say compile(..., jit_compile=False)"
            )
        before = model.train_function
        made = original(force)
        if model.train_function is not before:
            model.train_function = _said(model.train_function, run)
        return made

    model.make_train_function = make_train_function


def _said(function: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def train_function(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except tf.errors.OpError as error:
            found, run.error = run.error, None
            raise (found or error) from error

    return train_function


def _no_owner(_: Any) -> Any:
    raise NotImplementedError
