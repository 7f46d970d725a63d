"""One model in a run: the calls in the computation of a step, and their handling by the session.

Each bucket has a call, made as soon as its gradients are computed, which starts its exchange. The last bucket's call
waits for all and returns the means. All calls depend on a variable that the previous exchange has changed. Exchanges
therefore keep their order, whatever loops and models a graph has. No thread of TensorFlow waits for gradients that
another thread has yet to deliver: all have been sent when the last call waits. If others hold the weights, the last
call returns these. If workers train alone between exchanges, a first call asks for the kind of the step, and other
calls report the weights before and after it.

A call is a Python function that reads its arguments in place, without a copy. TensorFlow takes over the memory of the
results if it can, so a result must not be overwritten before every operation that reads it has finished. In eager mode
the functions are called directly, and their results are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from ...errors import GradientError
from ...nouns import Spec
from ...serving.shard import Build
from ...session.session import Session
from ...sync import Averages, exchanges_gradients
from .._computations import KINDS, keep_state, tensors_of_calls
from .._flat import Array, FlatModel, serve_flat
from .._repeating import FlatSums
from .._supported import check_no_replicas, check_schedule, decide_mode, weight_of_batches
from .variables import Rate, VariableWeights, resource

Unused = Literal["error", "zeros"]
_MOST_NAMES = 8
_EXCHANGED, _OWN, _AVERAGED = range(3)
_KIND, _BEGINS, _LAST = Spec("kind", (), "int32"), Spec("begins", (), "bool"), Spec("last", (), "bool")
_ALIGNMENT = 64
"""The alignment, in bytes, of memory that TensorFlow takes over; it copies other memory."""


class Matching:
    """Matches gradients with a model's ``variables`` and detects missing ones, in graphs and in eager mode.

    ``specs`` has the variables' names and shapes; ``unused`` is the option of ``syncline.prepare``.
    """

    def __init__(self, variables: Sequence[Any], specs: Sequence[Spec], unused: Unused) -> None:
        self.variables, self.specs, self._unused = list(variables), specs, unused
        self._numbers = {id(one): number for number, given in enumerate(variables) for one in (given, resource(given))}
        self.fault: Callable[[str], Exception] = GradientError
        """Makes an error. In a run with several workers, the error ends the run for all."""
        self.check_usable: Callable[[], None] = lambda: None
        """Raises if the run with several workers is over."""

    def number(self, variable: Any) -> int:
        """The number of a variable in the model. Raises if the model does not have it."""
        found = self._numbers.get(id(variable))
        if found is None:
            raise self.fault(
                f"a gradient belongs to {variable.name!r}, which was not prepared: call prepare() after the whole model"
                " is built and its final layers are trainable"
            )
        return found

    def matched(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients in the order of the model's variables. Raises if they do not fit."""
        self.check_usable()
        found: dict[int, Any] = {}
        for gradient, variable in zip(gradients, variables, strict=True):
            number = self.number(variable)
            if gradient is not None:
                found[number] = self._checked(number, gradient)
        missing = [number for number in range(len(self.specs)) if number not in found]
        if missing and self._unused == "error":
            names = ", ".join(repr(self.specs[one].name) for one in missing[:_MOST_NAMES])
            more = f" and {len(missing) - _MOST_NAMES} more" if len(missing) > _MOST_NAMES else ""
            raise self.fault(
                f"there is no gradient of {names}{more}: the loss does not depend on the variable, or the"
                " variable was frozen after prepare(); set trainable=False before prepare(), or use"
                " prepare(..., unused='zeros')"
            )
        return [
            found[number] if number in found else tf.zeros(spec.shape, spec.dtype)
            for number, spec in enumerate(self.specs)
        ]

    def _checked(self, number: int, gradient: Any) -> Any:
        """A dense gradient; embeddings' gradients, which are rows, are converted."""
        spec, dense = self.specs[number], tf.convert_to_tensor(gradient)
        if not dense.shape.is_compatible_with(spec.shape) or dense.dtype.name != spec.dtype:
            raise self.fault(
                f"the gradient of {spec.name!r} has shape {tuple(dense.shape)} and type {dense.dtype.name}, but its"
                f" variable has shape {spec.shape} and type {spec.dtype}"
            )
        return dense


class Buffers:
    """Variables that a step changes by itself, such as moving means. After every exchange all ranks have rank 0's.

    If workers exchange weights, floating-point variables are averaged instead. They are packed and exchanged at the end
    of the step's last call. If workers make no joint steps, each keeps its own.
    """

    def __init__(self, session: Session, variables: Sequence[Any]) -> None:
        self.session = session
        together = session.strategy.sync_mode().merges
        self.variables = [resource(one) for one in variables] if together else []
        self.specs = [Spec("", tuple(one.shape), tf.as_dtype(one.dtype).name) for one in self.variables]

    def values(self) -> list[Any]:
        """Their values at this point in a graph."""
        return [one.read_value() for one in self.variables]

    def assign(self, values: Sequence[Any]) -> None:
        """Set the variables to these values, at this point in a graph."""
        for variable, one in zip(self.variables, values, strict=True):
            variable.assign(one)

    def of_first(self, arrays: Sequence[Array]) -> list[Array]:
        """Rank 0's arrays; all workers must call it."""
        if not arrays or self.session.alone:
            return list(arrays)
        packed = np.concatenate([np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in arrays])
        self.session.broadcast(packed)
        parts = np.split(packed, np.cumsum([one.nbytes for one in arrays])[:-1])
        return [
            np.frombuffer(part.tobytes(), one.dtype).reshape(one.shape) for part, one in zip(parts, arrays, strict=True)
        ]

    def mean(self, arrays: Sequence[Array]) -> list[Array]:
        """The workers' mean of floating-point arrays, and rank 0's values of others; all workers must call it."""
        numbers = [one for one in arrays if one.dtype.kind == "f"]
        others = iter(self.of_first([one for one in arrays if one.dtype.kind != "f"]))
        packed = np.concatenate([one.reshape(-1).astype(np.float64) for one in numbers] or [np.empty(0)])
        if packed.size:
            self.session.allreduce(packed)
        means = iter(np.split(packed, np.cumsum([one.size for one in numbers], dtype=int)[:-1]))
        return [
            next(means).astype(one.dtype).reshape(one.shape) if one.dtype.kind == "f" else next(others)
            for one in arrays
        ]


class Passing:
    """The steps of one worker of an elastic run, whose gradients pass through the calls that several workers make.

    A computation that was made for several workers thus also works for one, and the other way round.
    """

    gone = False

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.steps, self.means = 0, [np.empty(0)] * len(specs)

    def produced(self, tensor: int, gradient: Array) -> None:
        """Keep a gradient: with one worker, it is the mean."""
        self.means[tensor] = gradient.flatten()

    def step(self) -> None:
        """Count a step: the means are already those of all workers."""
        self.steps += 1

    def resume_at(self, step: int) -> None:
        """Count on from that step."""
        self.steps = step

    def fault(self, text: str) -> GradientError:
        """The error for a fault of this text, as a worker among several makes it."""
        return GradientError(text)

    def let_go(self) -> None:
        """There is nothing to give up."""

    def close(self) -> None:
        """There is nothing to free."""


class Run:
    """Trains the variables of ``matching`` with the mean of gradients, here or at the owners of the weights.

    All processes of the session construct it together, workers outside graphs. ``buffers`` are variables that steps
    change by themselves.
    """

    def __init__(
        self,
        session: Session,
        matching: Matching,
        weights: VariableWeights,
        buffers: Sequence[Any],
        optimizer: str,
        weight: object = 1,
    ) -> None:
        self.session, self.weights, self._optimizer, self._weight = session, weights, optimizer, weight
        self._matching, self.variables, self.specs = matching, matching.variables, matching.specs
        self._order = _order_of_all()
        mode = session.strategy.sync_mode()
        self.held = session.strategy.server_holds_weights and not session.alone
        self.periodic = isinstance(mode, Averages) and not session.alone
        self._exchanges = exchanges_gradients(mode)
        self._buffers = Buffers(session, buffers)
        self._before: list[Array] = []
        self.error: BaseException | None = None
        """The exception of a call. TensorFlow passes on only its text."""
        self.model: FlatModel | Passing
        self.finished: Callable[[], object] = lambda: None
        """Called in each step when its result is there; its variables then change without a further call."""
        self.sums: FlatSums | None = None
        self._first: list[Array] = []  # the buffers after the first part of a repeated step
        check_schedule(session.strategy, "TensorFlow")
        check_no_replicas(session, "TensorFlow")
        weight_of_batches(session, weight)

    def begin(self, build: Build, owner: object, *, keeps: bool) -> bool:
        """Meet all processes and copy rank 0's values. Returns False on a server after its work.

        ``keeps``: the optimizer has elementwise state. ``owner`` is the argument of ``Session.enter_model``.
        """
        self._build, self._owner = build, owner
        if not self.session.alone:
            decide_mode(self.session, self.weights.values(), self._optimizer, keeps)
        if not self.session.is_worker:
            serve_flat(self.session, self.specs, self.weights, build, owner)
            return False
        self._meet()
        return True

    def begin_again(self, session: Session, step: int) -> None:
        """Go on in another session, from that step, in an elastic run. Computations made before stay valid."""
        self.model.close()
        self.session = self._buffers.session = session
        self._meet()
        self.model.resume_at(step)

    def _meet(self) -> None:
        """Begin the steps in the present session."""
        session, self.error = self.session, None
        if session.alone:
            self.model, self._tensors = Passing(self.specs), [list(range(len(self.specs)))]
        else:
            weight = weight_of_batches(session, self._weight)
            self.model = made = FlatModel(session, self.specs, self.weights, self._build, self._owner, weight=weight)
            self._tensors = tensors_of_calls(made.layout)
        self._matching.fault, self._matching.check_usable = self.model.fault, session.check_usable

    # While a graph is made, or in eager mode.

    def exchange(self, gradients: Sequence[Any], rate: Any = None) -> list[Any]:
        """The means of the gradients. If owners hold the weights, the new weights; ``rate`` is their learning rate."""
        self._check_compiler()
        with tf.control_dependencies(self._turn()):
            found = self._exchanged(gradients, [] if rate is None else [rate])
        self._pass_on(found)
        return found

    def apply(self, gradients: Sequence[Any], update: Callable[[Sequence[Any]], None], *, lent: bool) -> None:
        """Call ``update`` with the means. ``lent``: it keeps no reference to them, so the next exchange may reuse
        their memory."""
        self._check_compiler()
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        made = 0 if graph is None else len(graph.get_operations())
        with tf.control_dependencies(self._turn()):
            found = self._exchanged(gradients, [], lent=lent)
        with tf.control_dependencies([] if graph is None else found):  # a step that breaks changes nothing: no count
            update(found)
        self._pass_on([] if graph is None else _ends(graph.get_operations()[made:]))

    def train(self, gradients: Sequence[Any], update: Callable[[Sequence[Any]], None]) -> None:
        """Make a step whose kind the engine returns at run time. ``update`` receives the gradients or their means."""
        self._check_compiler()
        with tf.control_dependencies(self._turn()):
            kind, begins = self._call(self._ask, [], [_KIND, _BEGINS])
        if self._exchanges:
            means = tf.cond(kind == _EXCHANGED, lambda: self._exchanged(gradients, []), lambda: list(gradients))
            gradients = list(means)
        remembered = tf.cond(begins, lambda: self._told(self._remember, self._now()), _nothing)
        branches: dict[int, Callable[[], Any]] = {
            _EXCHANGED: _nothing,
            _OWN: lambda: self._told(self._made_alone, []),
            _AVERAGED: self._average,
        }
        with tf.control_dependencies([remembered]):
            update(gradients)
            self._pass_on([tf.switch_case(kind, branches)])

    def repeat(self, gradients: Sequence[Any], rate: Rate, update: Callable[[Sequence[Any]], None]) -> None:
        """Make a part of a step of a log. After the last one ``update`` receives the means."""
        self._check_compiler()
        arguments = [*gradients, *self._buffers.values()]
        with tf.control_dependencies(self._turn()):
            last, *found = self._call(
                partial(self._repeated, rate), arguments, [_LAST, *self.specs, *self._buffers.specs]
            )

        def whole() -> Any:
            self._buffers.assign(found[len(self.specs) :])
            update(found[: len(self.specs)])
            return _nothing()

        self._pass_on([tf.cond(last, whole, _nothing)])

    def _average(self) -> Any:
        averaged = partial(self._averaged, tf.executing_eagerly())
        found = self._call(averaged, [*self._now(), *self._buffers.values()], [*self.specs, *self._buffers.specs])
        for variable, one in zip(self.variables, found, strict=False):
            resource(variable).assign(one)
        self._buffers.assign(found[len(self.specs) :])
        return _nothing()

    def _exchanged(self, gradients: Sequence[Any], told: Sequence[Any], *, lent: bool = False) -> list[Any]:
        gone: list[Any] = []
        *before, last = self._tensors
        weights = self._now() if self.held else []
        for tensors in before:  # one behind the other, as TensorFlow orders calls of Python anyway
            with tf.control_dependencies(gone):
                gone = self._call(partial(self._start, tensors), [gradients[one] for one in tensors], [])
        with tf.control_dependencies(gone):
            found = self._call(
                partial(self._finish, last, bool(told), lent or tf.executing_eagerly()),
                [*weights, *(gradients[one] for one in last), *told, *self._buffers.values()],
                [*self.specs, *self._buffers.specs],
            )
        self._buffers.assign(found[len(self.specs) :])
        return found[: len(self.specs)]

    def _now(self) -> list[Any]:
        return [resource(one).read_value() for one in self.variables]

    def _turn(self) -> list[Any]:
        return [] if tf.executing_eagerly() else [self._order.read_value()]

    def _pass_on(self, after: Sequence[Any]) -> None:
        if not tf.executing_eagerly():
            with tf.control_dependencies(after):
                self._order.assign_add(1)

    def _told(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        with tf.control_dependencies(self._call(function, arguments, [])):
            return _nothing()

    def _call(self, function: Callable[..., Any], arguments: Sequence[Any], results: Sequence[Spec]) -> list[Any]:
        def within(*arrays: Array) -> Sequence[Array]:
            keep_state()
            self.weights.within = True
            self.error = None
            try:
                # TensorFlow hands a tensor without dimensions over as a number, not as an array.
                return function(*map(np.asarray, arrays)) or []
            except BaseException as error:
                self.error = error
                raise
            finally:
                self.weights.within = False
                self.weights.forget()

        return invoke(within, arguments, results)

    def _check_compiler(self) -> None:
        if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(
            tf.compat.v1.get_default_graph()
        ):
            raise self.model.fault(
                "the step is compiled by XLA (jit_compile=True), whose computations on the CPU cannot call Syncline:"
                " use compile(..., jit_compile=False), or wrap the step in a tf.function without jit_compile, and only"
                " the model in one with it"
            )

    # What the calls do.

    def _start(self, tensors: Sequence[int], *gradients: Array) -> None:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            self.model.produced(tensor, gradient)

    def _finish(self, tensors: Sequence[int], told: bool, lent: bool, *given: Array) -> list[Array]:
        if self.held:
            self._check_unwritten(given[: len(self.specs)])
            given = given[len(self.specs) :]
        gradients, rest = given[: len(tensors)], given[len(tensors) :]
        self._start(tensors, *gradients)
        if told:
            self.weights.rate = float(rest[0])
        self.model.step()
        found = self.weights.now if self.held else self.model.means
        results = [*self._shaped(found, lent), *self._buffers.of_first(rest[told:])]
        self.finished()
        return results

    def _repeated(self, rate: Rate, *given: Array) -> list[Array]:
        assert self.sums is not None
        gradients, buffers = given[: len(self.specs)], given[len(self.specs) :]
        if self.sums.sums.begin_part(rate) == 0:  # all workers get the buffers of rank 0
            self._first = [one.copy() for one in buffers]
        last = self.sums.add(gradients)
        if last:
            self.model.step()
        found = self.sums.mean if last else [one.flatten() for one in gradients]
        return [np.array(last), *self._shaped(found, False), *self._first]

    @property
    def flat(self) -> FlatModel:
        """The model, in a session of several workers."""
        assert isinstance(self.model, FlatModel)
        return self.model

    def _check_unwritten(self, weights: Sequence[Array]) -> None:
        """Refuse weights that the script has changed: the owners would not see the change and would overwrite it."""
        held = self.flat.held
        assert held is not None
        for spec, mine, theirs in zip(self.specs, weights, held.tensors, strict=True):
            if not np.array_equal(mine.reshape(-1).view(np.uint8), theirs.view(np.uint8)):
                raise self.model.fault(
                    f"the script has changed {spec.name!r} since the last step, which owners of the weights do not"
                    " see: set weights before prepare(), load them with load_state_dict(), or use ring or another"
                    " allreduce"
                )

    def _ask(self) -> list[Array]:
        kind = self.flat.kind
        begins = kind != "exchanged" and self.flat.follows
        return [np.array(KINDS.index(kind), np.int32), np.array(begins)]

    def _remember(self, *weights: Array) -> None:
        self._before = [one.copy() for one in weights]

    def _made_alone(self) -> None:
        self.weights.now, self._before = self._before, []
        self.flat.step_alone()

    def _averaged(self, lent: bool, *given: Array) -> list[Array]:
        after, self._before, before = given[: len(self.specs)], [], self._before
        self.weights.now, self.weights.after = before or after, after
        self.flat.step_alone()
        return [*self._shaped(self.weights.now, lent), *self._buffers.mean(given[len(self.specs) :])]

    def _shaped(self, flat: Sequence[Array], lent: bool) -> list[Array]:
        return [(one if lent else aligned(one)).reshape(spec.shape) for one, spec in zip(flat, self.specs, strict=True)]


@cache
def _order_of_all() -> Any:
    """A variable of all models of a process, so that all ranks make the exchanges of a graph in the same order."""
    with tf.device("CPU"):
        return tf.Variable(0, trainable=False, dtype=tf.int64, name="syncline_order")


def _ends(operations: Sequence[Any]) -> list[Any]:
    """The operations on which none of the others depends."""
    before = {one.op for of in operations for one in of.inputs} | {
        one for of in operations for one in of.control_inputs
    }
    return [one for one in operations if one not in before]


def _nothing() -> Any:
    return tf.constant(0)


def aligned(array: Array) -> Array:
    """An aligned copy, whose memory TensorFlow can take over."""
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    found = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    np.copyto(found, array)
    return found


def invoke(function: Callable[..., Sequence[Array]], arguments: Sequence[Any], results: Sequence[Spec]) -> list[Any]:
    """Add a call of a function of arrays to the graph. Returns its results, or the operation if there are none."""
    if tf.executing_eagerly():
        return [tf.constant(one) for one in function(*map(np.asarray, arguments))]
    types = [tf.as_dtype(spec.dtype) for spec in results]
    made = tf.numpy_function(function, list(arguments), types)
    if not results:
        return [made]
    for one, spec in zip(made, results, strict=True):
        one.set_shape(spec.shape)
    return list(made)
