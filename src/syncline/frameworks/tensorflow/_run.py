"""One model in a run: what the computation of a step calls, and what these calls do with the session.

Every bucket is a call, as soon as its gradients are there, which begins its exchange; one more waits for all and has
the mean. All of them wait for a variable that the exchange before has changed, so that exchanges keep their order,
whatever loops and models a graph has, and no thread of TensorFlow's waits for gradients that another has yet to give:
they have all gone when the last call comes. Where others hold the weights it is these that come back. Where workers
train by themselves, a call asks first what kind of step it is, and others tell of the weights before and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from ...errors import NotBuiltError
from ...nouns import Spec
from ...session.session import Session
from ...sync import Agrees
from .._flat import FlatModel, Kind, serve_model
from .._schedules import check_mode, check_schedule
from ._calls import Array, invoke
from ._slots import RATE
from ._variables import resource, specs_of
from ._weights import VariableWeights

Unused = Literal["error", "zeros"]
_KINDS: tuple[Kind, ...] = ("exchanged", "own", "averaged")
_KIND = Spec("kind", (), "int32")


class Run:
    """``variables`` are trained with the mean of gradients, here or by owners of the weights.

    All processes of the session make it at the same place, workers outside of graphs.
    """

    def __init__(
        self, session: Session, variables: Sequence[Any], weights: VariableWeights, unused: Unused, name: str
    ) -> None:
        self.session, self.variables, self.weights, self._unused = session, list(variables), weights, unused
        self.specs = specs_of(variables)
        self.name = name
        self._numbers = {id(one): number for number, given in enumerate(variables) for one in (given, resource(given))}
        self._order = tf.Variable(0, trainable=False, dtype=tf.int64, name="syncline_order")
        self.held = session.strategy.server_holds_weights
        self.periodic = isinstance(session.strategy.sync_mode(), Agrees)
        self.error: BaseException | None = None
        """What a call has raised, of which TensorFlow hands on the text only."""
        self.model: FlatModel

    def begin(self, build: Any, owner: object, keeps: bool) -> bool:
        """Meet all processes; with rank 0's values on workers. False on a server, that has served."""
        check_schedule(self.session.strategy, "TensorFlow")
        check_mode(self.session.strategy, "TensorFlow", self.weights.values(), self.name, keeps)
        if self.held or self.periodic:
            raise NotBuiltError(f"{self.session.strategy} is not built yet for TensorFlow: use ring, ps(update=worker)")
        if not self.session.is_worker:
            serve_model(self.session, self.specs, self.weights, build, owner)
            return False
        self.model = FlatModel(self.session, self.specs, self.weights, build, owner)
        self._buckets: list[list[int]] = []
        gone: set[int] = set()
        for bucket in self.model.layout.buckets:
            tensors = [one for one in dict.fromkeys(part.tensor for part in bucket.slices) if one not in gone]
            gone.update(tensors)
            if tensors:
                self._buckets.append(tensors)
        return True

    # While a graph is made, or in eager mode.

    def matched(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Gradients in the order of the model's variables; all ranks end with an error where they are others."""
        self.session.check_usable()
        found: dict[int, Any] = {}
        for gradient, variable in zip(gradients, variables, strict=True):
            number = self._numbers.get(id(variable))
            if number is None:
                raise self.model.fault(
                    f"a gradient is of {variable.name!r}, which was not among the variables that were prepared: prepare"
                    " the model when all is built and trainable that shall be"
                )
            if gradient is not None:
                found[number] = self._checked(number, gradient)
        missing = [number for number in range(len(self.specs)) if number not in found]
        if missing and self._unused == "error":
            names = ", ".join(repr(self.specs[one].name) for one in missing[:8])
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise self.model.fault(
                f"there is no gradient of {names}{more}: the loss does not depend on it, or it was frozen after"
                " prepare(); set trainable=False before prepare(), or say prepare(..., unused='zeros')"
            )
        return [
            found[number] if number in found else tf.zeros(spec.shape, spec.dtype)
            for number, spec in enumerate(self.specs)
        ]

    def _checked(self, number: int, gradient: Any) -> Any:
        """Of embeddings, whose gradients are rows, the whole; raises GradientError on all ranks for what is none."""
        spec, dense = self.specs[number], tf.convert_to_tensor(gradient)
        if not dense.shape.is_compatible_with(spec.shape) or dense.dtype.name != spec.dtype:
            raise self.model.fault(
                f"the gradient of {spec.name!r} is of shape {tuple(dense.shape)} and type {dense.dtype.name}, for a"
                f" variable of shape {spec.shape} and type {spec.dtype}"
            )
        return dense

    def exchange(self, gradients: Sequence[Any], rate: Any = None) -> list[Any]:
        """The means of gradients, or, where owners hold them, the new weights."""
        self._check_compiler()
        arguments = [] if rate is None else [rate]
        if tf.executing_eagerly():
            for tensors in self._buckets:
                self._call(partial(self._start, tensors), [gradients[one] for one in tensors], [])
            return self._call(self._finish, arguments, self.specs)
        gone = []
        with tf.control_dependencies([self._order.read_value()]):
            for tensors in self._buckets:
                gone += self._call(partial(self._start, tensors), [gradients[one] for one in tensors], [])
        with tf.control_dependencies(gone):
            found = self._call(self._finish, arguments, self.specs)
        self._end(found)
        return found

    def _end(self, after: Sequence[Any]) -> None:
        with tf.control_dependencies(after):
            self._order.assign_add(1)

    def _call(self, function: Callable[..., Any], arguments: Sequence[Any], results: Sequence[Spec]) -> list[Any]:
        def within(*arrays: Array) -> Sequence[Array]:
            self.weights.within = True
            try:
                return function(*arrays) or []
            except BaseException as error:
                self.error = error
                raise
            finally:
                self.weights.within = False
                self.weights.now = self.weights.after = []

        return invoke(within, arguments, results)

    def _check_compiler(self) -> None:
        from tensorflow.python.ops import control_flow_util

        if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(
            tf.compat.v1.get_default_graph()
        ):
            raise self.model.fault(
                "the step is compiled by XLA (jit_compile=True), whose computations on the CPU cannot call Syncline:"
                " say compile(..., jit_compile=False), or tf.function without jit_compile around the step, and with it"
                " around the model only"
            )

    # What the calls do.

    def _start(self, tensors: Sequence[int], *gradients: Array) -> None:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            self.model.produced(tensor, gradient)

    def _finish(self, *rate: Array) -> list[Array]:
        if rate:
            self.weights.rate = float(rate[0])
        self.model.step()
        found = self.weights.now if self.held else self.model.gradients.flat
        return [np.array(one).reshape(spec.shape) for one, spec in zip(found, self.specs, strict=True)]


__all__ = ["RATE", "Run", "Unused"]
