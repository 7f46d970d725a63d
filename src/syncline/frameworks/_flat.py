"""The steps of a model whose gradients arrive as host arrays: the common part of the adapters without hooks.

An adapter reports each gradient during backward (``produced``) and the end of the step (``step``). Gradients lie in
contiguous buckets in the transport's memory. The state machine of ``engine.step`` decides what is sent when, and the
engine exchanges the buckets while backward continues. The results are applied by the framework (``Weights.update``) or
by the owners of the weights (``serving``). If workers train alone between exchanges, the buckets hold weights instead.

This module knows no framework and none of its objects; ``Weights`` is the interface to both. Weights stay in the
framework's memory. They are copied to the transport's memory only if others hold them or if they are exchanged
(``HeldWeights``). Owners of weights run the framework's optimizer on slices (``OnHoldings``). ``Coming`` tracks
arrivals; ``training`` has the buckets, the steps and the owners.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..engine.step import Apply
from ..engine.trace import Span, begin
from ..errors import GradientError, UsageError
from ..kernels.passes import CODES, put_share
from ..nouns import Spec
from ..serving.records import Elements, State
from ..serving.shard import Build, Groups, Holding
from ..session.session import Session
from ..sync import Averages
from ..sync._periodic import BLOCK_ELEMENTS
from ..training.exchange import BucketExchange, storages_of
from ..training.memory import Blocks, Staging, agree_on_model, copy_from_rank_0
from ..training.model import Framework, TrainedModel
from ..training.owners import OwnedModel, add_up, serve_model
from ..training.weights import Values, WeightExchange, weight_exchange

Array = NDArray[Any]
Kind = Literal["exchanged", "own", "averaged"]
"""The kinds of steps: gradients are exchanged, the worker steps alone, or it steps alone and weights are exchanged
after."""

_NAMED = 8
"""The maximum number of tensor names in an error."""
_HELD_BYTES = 64 * 1024
"""Gradients up to this size are multiplied while holding the interpreter lock, which takes some microseconds."""
_HELD_TYPES = ("float16", "float32", "float64")


class Weights(Protocol):
    """A framework's side of one model. Flat arrays are contiguous and in the order of its tensors."""

    def read(self, into: Sequence[Array]) -> None:
        """Copy the framework's weights into flat arrays."""
        ...

    def write(self, values: Sequence[Array]) -> None:
        """Replace the framework's weights by these."""
        ...

    def update(self, gradients: Sequence[Array]) -> None:
        """Update the framework's weights with these gradients, which the optimizer may overwrite."""
        ...

    def values(self) -> Groups:
        """The settings of the optimizer, in the form for owners of weights."""
        ...

    def kept(self) -> list[State]:
        """The optimizer's state of each tensor, with flat elements. It may share the optimizer's memory."""
        ...

    def keep(self, states: Sequence[State]) -> None:
        """Replace the optimizer's state of each tensor."""
        ...


class HeldWeights:
    """The ``WeightMemory`` of a framework's weights: ``held`` are copies of them, ``travelling`` the buckets."""

    sums_differences = False

    def __init__(self, weights: Weights, held: Blocks, travelling: Blocks, workers: int) -> None:
        self._weights, self._held, self._travelling, self._workers = weights, held, travelling, workers

    @property
    def buckets(self) -> Values:
        """The blocks themselves: only the framework separates tensors."""
        return Values(self._travelling.arrays, self._travelling.arrays)

    def zeros(self) -> Values:
        arrays = [np.zeros_like(array) for array in self._held.arrays]
        return Values(arrays, arrays)

    def read(self, into: Values) -> None:
        self._weights.read(self._held.tensors)
        for array, mine in zip(into.blocks, self._held.arrays, strict=True):
            array[...] = mine

    def write(self, values: Values) -> None:
        for mine, array in zip(self._held.arrays, values.blocks, strict=True):
            mine[...] = array
        self._weights.write(self._held.tensors)

    def subtract(self, values: Values) -> None:
        """From the copies, which are refreshed first."""
        self._weights.read(self._held.tensors)
        for bucket, mine, array in zip(self._travelling.arrays, self._held.arrays, values.blocks, strict=True):
            np.subtract(mine, array, out=bucket)

    def give_up(self, part: float) -> None:
        """Only after ``subtract``, which has refreshed the copies."""
        for mine, bucket in zip(self._held.arrays, self._travelling.arrays, strict=True):
            mine -= bucket * bucket.dtype.type(part)
        self._weights.write(self._held.tensors)

    def share_out(self, weight: float) -> None:  # noqa: ARG002
        """All workers have the same weight."""
        for bucket in self._travelling.arrays:
            bucket /= self._workers

    def bytes_of(self, block: Array) -> Array:
        return block.view(np.uint8)

    def at_once(self, block: Array) -> int:  # noqa: ARG002
        """A block that fits the cache."""
        return BLOCK_ELEMENTS

    def add_up(self, add: Callable[[Array], None]) -> None:
        for bucket in self._travelling.arrays:
            add(bucket)

    def saved(self, values: Values) -> list[Array]:
        return [array.copy() for array in values.blocks]

    def load(self, values: Values, saved: Sequence[Array]) -> None:
        """Raises UsageError for other buckets, before anything is written."""
        if [(one.shape, one.dtype) for one in values.blocks] != [(one.shape, one.dtype) for one in saved]:
            raise UsageError("the agreed weights in this state belong to another model or schedule")
        for mine, value in zip(values.blocks, saved, strict=True):
            mine[...] = value


class OnHoldings:
    """The common part of the frameworks' optimizers on the slices that this process owns."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self._holdings = holdings

    def squared_norm(self) -> float:
        return float(sum(np.square(held.gradient, dtype=np.float64).sum() for held in self._holdings))

    def advanced(self) -> Groups:
        """Nothing: optimizers that change their own settings are refused before."""
        return []


def flat_elements(array: Array) -> Elements:
    """A contiguous array of an optimizer's state as sent to and from owners: flat, unless it has no dimensions."""
    return Elements.of(array.reshape(-1) if array.ndim else array)


# The gradients of a step.


class GradientPlace:
    """The place of one tensor's gradient in its bucket, in the tensor's shape. One thread at a time writes to it.

    NumPy releases the interpreter lock while it multiplies more than 500 numbers. The engine's thread then takes the
    lock, and the thread that delivers gradients waits far longer than a small gradient takes. Compiled code, which
    keeps the lock, therefore multiplies small gradients. Its rounding is the same, except that a factor for float16 is
    first rounded to float32, which changes three of the factors 1/N up to N = 70000.
    """

    def __init__(self, array: Array) -> None:
        self.array, self._type = array, array.dtype
        self._held = array.nbytes <= _HELD_BYTES and str(array.dtype) in _HELD_TYPES
        code = CODES[str(array.dtype)] if self._held else 0
        self._words = (ctypes.c_int64 * 5)(code, array.ctypes.data, 0, array.size, 0)
        self._share, self._address = ctypes.c_double.from_buffer(self._words, 32), ctypes.addressof(self._words)

    def put(self, gradient: Array, share: float) -> None:
        """Write a gradient of this shape, multiplied by ``share``."""
        flags = gradient.flags
        if self._held and gradient.dtype == self._type and flags.c_contiguous and flags.aligned:
            self._words[2], self._share.value = gradient.ctypes.data, share
            put_share.held(self._address)
        else:
            np.multiply(gradient, share, out=self.array)


class Coming:
    """The gradients of the tensors ``specs`` in the present step. ``flat`` are their elements in the buckets."""

    def __init__(self, specs: Sequence[Spec], flat: Sequence[Array]) -> None:
        self.names = [spec.name for spec in specs]
        self.places = [GradientPlace(array.reshape(spec.shape)) for array, spec in zip(flat, specs, strict=True)]
        """The places of the gradients, whose memory is fixed."""
        self._left: dict[int, None] | None = None  # tensors that the present step waits for; None before it begins

    @property
    def begun(self) -> bool:
        """Whether the present step has begun."""
        return self._left is not None

    def begin(self) -> None:
        """Begin a step, or restart it after an abandoned pass."""
        self._left = dict.fromkeys(range(len(self.names)))

    def end(self) -> None:
        """Note that no gradient of the present step is awaited any more: it is over."""
        self._left = None

    def came(self, tensor: int) -> None:
        """Note that a tensor's gradient has arrived."""
        assert self._left is not None
        del self._left[tensor]

    def all_came(self) -> None:
        """Expect no gradients in this step: they stay with the framework."""
        self._left = {}

    def fits(self, tensor: int, gradient: Array) -> bool:
        """Whether this is a valid gradient of that tensor, and the step still waits for it."""
        place, left = self.places[tensor].array, self._left
        return gradient.shape == place.shape and fits(gradient, place) and left is not None and tensor in left

    def wrong(self, tensor: int, gradient: Array, step: int) -> str:
        """The error text for a gradient for which ``fits`` returned False."""
        name = self.names[tensor]
        if self._left is None or tensor not in self._left:
            return (
                f"the gradient of {name!r} was given twice in step {step}: call step() after each pass; after an"
                " abandoned pass call drop(), or, if a bucket was sent already, restart the run from a checkpoint"
            )
        return unfit(name, gradient, self.places[tensor].array)

    @property
    def missing(self) -> list[int]:
        """The tensors whose gradients have not arrived in the present step, in order."""
        return list(range(len(self.names)) if self._left is None else self._left)

    def names_of_missing(self) -> str:
        """The names of the missing gradients, for errors."""
        found = [repr(self.names[tensor]) for tensor in self.missing]
        return ", ".join(found if len(found) <= _NAMED else [*found[:_NAMED], f"{len(found) - _NAMED} more"])


def fits(gradient: Array, place: Array) -> bool:
    """Whether the gradient has real numbers, or the exact type of its place."""
    return gradient.dtype.kind in "fiu" or gradient.dtype == place.dtype


def unfit(name: str, gradient: Array, place: Array) -> str:
    """The error text for a gradient that does not match its weights."""
    if gradient.shape != place.shape:
        return f"the gradients have {name!r} of shape {gradient.shape} for weights of shape {place.shape}"
    return f"the gradient of {name!r} has type {gradient.dtype}, but its weights have {place.dtype}"


# The steps.


class FlatModel:
    """One worker's part in the training of a model. ``owner`` is the argument of ``Session.enter_model``.

    All processes construct it together, or call ``serve_flat``, and start from rank 0's weights. ``rule`` describes the
    optimizer in a text that must be equal on all: at the start, and in every merged step if each worker updates its own
    weights. ``weight`` is this worker's in the mean of a step; without it all count alike.
    """

    def __init__(
        self,
        session: Session,
        specs: Sequence[Spec],
        weights: Weights,
        build: Build,
        owner: object,
        rule: Callable[[], str] = str,
        weight: Callable[[], float] | None = None,
    ) -> None:
        self.session, self.specs, self.weights = session, list(specs), weights
        self.key = session.enter_model(owner)
        self.layout = layout = agree_on_model(session, self.key, specs, rule())
        self.gradients = Blocks(layout.layers, layout.buckets, session.engine.allocate)
        self.coming = Coming(specs, self.gradients.tensors)
        weights.read(self.gradients.tensors)
        copy_from_rank_0(session, self.gradients.arrays)
        weights.write(self.gradients.tensors)
        held_or_agreed = isinstance(session.strategy.sync_mode(), Averages) or session.strategy.server_holds_weights
        storages, said = [self.gradients] * storages_of(session.strategy), None if held_or_agreed else rule
        self.exchange = BucketExchange(session, self.key, layout, storages, Staging(session.engine), rule=said)
        self._mode = self.exchange.mode
        framework = Framework(apply=self._apply, weights=self._now)
        if weight is not None:
            framework = replace(framework, weight=weight)
            session.weighed.add(self.key)
        self.trained = TrainedModel(session, self.exchange, len(self.specs), framework)
        self.held: Blocks | None = None  # the weights in the transport's memory, if they are exchanged or held there
        self.owned: OwnedModel | None = None
        if held_or_agreed:
            self.held = Blocks(layout.layers, layout.buckets, session.engine.allocate)
            self.held.take(self.gradients)
        if self.held is not None and isinstance(self._mode, Averages):
            memory = HeldWeights(weights, self.held, self.gradients, session.world_size)
            self.averaging = weight_exchange(session, self.key, self._mode, memory)
            self.averaging.follows = True
            self.trained.weights, self.exchange.mix = self.averaging, self.averaging.mix
        elif self.held is not None:
            self.owned = OwnedModel(self.exchange, self.trained, self.held, build)
            self.owned.taken = partial(weights.write, self.held.tensors)
        self._alone = False  # this worker makes the present step alone
        self.gone = False  # another model has the weights
        self._backward: Span | None = None
        self.exchange.plan()
        session.consolidates[self.key] = self._consolidate

    averaging: WeightExchange | None = None
    """The exchange of weights, if workers train alone in between."""

    @property
    def steps(self) -> int:
        """The number of steps that have been made."""
        return self.trained.steps

    @property
    def means(self) -> Sequence[Array]:
        """The means of the last step's gradients, flat."""
        return self.gradients.tensors

    @property
    def follows(self) -> bool:
        """Whether all workers have equal weights that are not yet the agreed ones."""
        return self.averaging is not None and self.averaging.follows

    @property
    def kind(self) -> Kind:
        """The kind of the next step."""
        if self.trained.machine.due:
            return "exchanged"
        return "averaged" if isinstance(self._mode, Averages) and self._mode.averages(self.steps) else "own"

    def resume(self, step: int, saved: Mapping[str, Any]) -> None:
        """Set the step, as ``TrainedModel.resume``; between two steps."""
        self.trained.resume(step, saved)
        self.exchange.plan()

    # One step.

    def produced(self, tensor: int, gradient: Array, *, tells: bool = True) -> None:
        """Copy the complete gradient of a tensor into its bucket. The bucket is sent once it is complete.

        ``tells``: backward is still running. Raises GradientError for an invalid gradient of this tensor.
        """
        coming = self.coming
        if not coming.begun:
            self._begin()
        if tells:
            self._mark()
        if not coming.fits(tensor, gradient):
            self.session.engine.check_error()  # an earlier fault is the better explanation
            raise self.fault(coming.wrong(tensor, gradient, self.steps))
        self._place(tensor, gradient)

    def begin(self) -> float:
        """Begin a step whose gradients other code writes to their places, followed by ``placed``. Returns the factor
        to apply."""
        self._begin()
        self._mark()
        return self._share

    def placed(self, tensor: int) -> None:
        """Note that a tensor's gradient was written to its place, for the first time in this step."""
        self._place(tensor, None)

    def _place(self, tensor: int, gradient: Array | None) -> None:
        self.coming.came(tensor)
        try:
            if gradient is not None:
                self.coming.places[tensor].put(gradient, self._share)
            if not self._alone:
                self.trained.do(self.trained.machine.produced(tensor))
        except BaseException as error:
            self.session.process.interrupted(error)  # the other ranks wait for the rest of this step
            raise

    def _mark(self) -> None:
        """Open the observer's span of the backward pass."""
        if self._backward is None and self.session.observer is not None:
            self._backward = begin(self.session.observer, "backward", "backward")

    def _begin(self) -> None:
        self.session.check_usable()
        self._check_not_gone()
        if self.session.renewed is not None:
            self.exchange.check_view()
        due = self.trained.machine.due
        if not due:
            self.trained.check_not_due()
        self._alone = self.averaging is not None and not due
        self._share = self.trained.share if due else 1.0
        self.coming.begin()

    def step(self) -> None:
        """Update the weights with the workers' mean of the gradients; all workers must call it."""
        if self.coming.missing:
            raise self.fault(f"step() without the gradients of {self.coming.names_of_missing()}")
        if self._backward is not None:
            self._backward.end()
            self._backward = None
        due = self.trained.machine.due
        with self.trained.others_waiting():
            if not self._alone:
                self.trained.end_backward()
            observer = self.session.observer
            optimizing = None if observer is None else begin(observer, "optimizer", "optimizer step")
            try:
                self._update()
            finally:
                if optimizing is not None:
                    optimizing.end()
            if not self._alone:
                self.trained.made_step(due)
            self.trained.forget()
        self.coming.end()

    def _update(self) -> None:
        """Replace the weights by the updated ones."""
        if self._alone:
            self._step_alone()
        elif self.owned is not None:
            self.owned.step(self.weights.values())
        else:
            self.trained.do(self.trained.machine.stepped())
        if self.exchange.schedule.apply == "layer":  # without hooks a first read cannot be seen, so wait for all layers
            self.trained.do(self.trained.machine.flush())

    def step_alone(self) -> None:
        """Make a step of this worker alone, whose gradients stay with the framework."""
        self._begin()
        self.coming.all_came()
        self.step()

    def drop(self) -> None:
        """Abandon the pass whose gradients are arriving; the next gradients belong to another pass of the same step.

        Raises GradientError, which ends the run for all, if a bucket has been sent.
        """
        if not self.coming.begun:
            return
        if self._backward is not None:
            self._backward.end()
            self._backward = None
        try:
            if not self._alone:
                self.trained.machine.dropped()
        except UsageError as error:
            raise self.fault(
                f"drop() in step {self.steps} after gradients were sent to the other workers: restart the run from a"
                " checkpoint; under schedule=fifo no gradients are sent before step()"
            ) from error
        if self._alone:
            self.coming.end()
        else:
            self.coming.begin()

    def _step_alone(self) -> None:
        """Make a step of this worker alone, and exchange weights if that is due after it."""
        self.trained.made_alone()
        self.weights.update(self.gradients.tensors)
        self.trained.settle()

    def _apply(self, action: Apply) -> None:  # noqa: ARG002
        """Update all weights: an engine that waits at the end of backward applies all buckets of a step together."""
        if self.owned is None:  # owners have updated the weights already
            self.weights.update(self.gradients.tensors)

    def _now(self) -> Iterator[tuple[str, Array]]:
        """The weights, for a comparison of the replicas. The buckets hold gradients meanwhile."""
        held = [np.empty_like(array) for array in self.gradients.tensors]
        self.weights.read(held)
        return zip((spec.name for spec in self.specs), (array.view(np.uint8) for array in held), strict=True)

    # Between steps.

    def take_weights(self, values: Sequence[Array]) -> None:
        """Set the weights, and their copy in the transport's memory. Owners in other processes are not informed."""
        self.weights.write(values)
        if self.held is not None:
            self.weights.read(self.held.tensors)

    def check_between(self, what: str) -> None:
        """Raise GradientError in the middle of a step."""
        self._check_not_gone()
        if self.coming.begun:
            raise self.fault(
                f"{what} in the middle of a step, after some of its gradients were given: call it between two steps"
            )

    def let_go(self) -> None:
        """Give up these weights, which another model has from now on; between two steps.

        Raises UsageError if owners hold the weights, because they cannot be handed over.
        """
        if self.owned is not None:
            raise UsageError(
                f"owners of the weights hold {self.specs[0].name!r} from the first prepare(): prepare these arrays"
                " once, or use ring or another allreduce"
            )
        self.check_between("prepare()")
        self.gone = True
        self.session.leave_model(self.key)
        self.close()

    def close(self) -> None:
        """Free the memory: the session is over, or another model has the weights."""
        self.trained.close()  # it refers to this model: break the cycle, or its memory stays until garbage collection
        self.exchange.close()

    def resume_at(self, step: int) -> None:
        """Set the step of a model whose workers go on in this session; codecs begin anew."""
        self.trained.resume_at(step)
        self.exchange.plan()

    def _check_not_gone(self) -> None:
        if self.gone:
            raise self.fault(
                f"{self.specs[0].name!r} has been prepared again: use the result of the last syncline.prepare()"
            )

    def _consolidate(self) -> None:
        """Fetch the owners' newest weights, or combine the weights that workers have trained alone."""
        self.check_between("consolidate()")
        if self.owned is not None:
            self.owned.consolidate()
        self.trained.consolidate()

    def fault(self, text: str) -> GradientError:
        """Make an error, as ``Session.fault``."""
        return self.session.fault(text)


def serve_flat(
    session: Session, specs: Sequence[Spec], weights: Weights, build: Build, owner: object, rule: str = ""
) -> None:
    """Run a server until all workers have left: it owns weights, or sums gradients."""
    layout = agree_on_model(session, session.enter_model(owner), specs, rule)
    gradients, held = (Blocks(layout.layers, layout.buckets, session.engine.allocate) for _ in range(2))
    weights.read(held.tensors)
    copy_from_rank_0(session, held.arrays)
    if session.strategy.server_holds_weights:
        serve_model(session, layout, gradients, held, build)
    else:
        add_up(session, layout, gradients)


def flat_models(session: Session) -> list[FlatModel]:
    """The models that hold weights of this process, including those in groups of workers."""
    calls = [call for one in session.family for call in one.consolidates.values()]
    return [made for made in (getattr(call, "__self__", None) for call in calls) if isinstance(made, FlatModel)]
