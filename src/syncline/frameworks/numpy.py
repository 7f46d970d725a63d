"""NumPy: ``prepare`` for models that are a dictionary of arrays, whose gradients a script computes by itself.

    weights, optimizer = syncline.prepare(weights, Sgd(lr=0.1))
    optimizer.step(gradients)                       # this rank's, by name; the weights are updated in place

The least that a framework has to do, and an example of it: weights and gradients lie in contiguous buckets, the state
machine of ``engine.step`` is told of each gradient, and the optimizer is called on flat slices, here or by the owners
of the weights (``serving``).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..compression.compression import Compression
from ..engine.step import Action, Agree, Apply, Steps, Submit, Wait
from ..engine.work import Lane, Work
from ..errors import GradientError, MismatchError, UsageError
from ..nouns import Layer, Spec
from ..serving.owner import serve
from ..serving.records import Elements, State
from ..serving.shard import Groups, Holding
from ..serving.shares import PushGroups, check_kept
from ..serving.summing import Summing
from ..serving.traffic import Model
from ..serving.worker import Worker, attach
from ..session.communicator import BUCKET_KEYS
from ..session.layout import Layout, decide_layout, place_bucket, place_tensors
from ..session.session import Session
from ..session.tickets import AVERAGE, CONSOLIDATE, STEP, Meeting, step_argument
from ..sync import Agrees, Mixes, alone, exchanges_gradients, momentum_of
from . import Handed
from ._agreed import AgreedWeights
from ._alone import warn_of_plain_steps
from ._schedules import check_schedule

Array = NDArray[Any]
Arrays = Mapping[str, Array]
States = dict[str, Array]
_OPTIONS = {"unused": "error", "weight": 1, "ignore": (), "broadcast_buffers": True}
"""Those of ``syncline.prepare`` that say nothing."""


class Update(Protocol):
    """A script's optimizer: its attributes are numbers and words, which may change between steps."""

    def update(self, weights: Array, gradient: Array, state: States) -> None:
        """Update flat ``weights`` in place, every element by itself; ``state``, empty at first, is kept for them.

        What is kept are arrays of the weights' shape, or of one element.
        """
        ...


class Trainer(Protocol):
    """What becomes of a script's optimizer; it has that one's attributes beside."""

    def step(self, gradients: Arrays) -> None:
        """Average the ranks' gradients, by name, and update the weights with the mean; all ranks call it."""
        ...


class Blocks:
    """Tensors in contiguous memory, one block per element type; ``arrays`` are buckets, ``flat`` tensors."""

    def __init__(self, session: Session, layout: Layout) -> None:
        placed = place_tensors([layer.spec.elements for layer in layout.layers], layout.buckets)
        sizes = {one.dtype: max(other.stop for other in placed if other.dtype == one.dtype) for one in placed}
        blocks = {
            dtype: session.engine.allocate(size * np.dtype(dtype).itemsize, np.dtype(dtype))
            for dtype, size in sizes.items()
        }
        self.flat = [blocks[one.dtype][one.start : one.stop] for one in placed]
        self.arrays = []
        for bucket in layout.buckets:
            start = place_bucket(bucket, placed)
            self.arrays.append(blocks[bucket.dtype][start : start + bucket.elements])


class Wrapped:
    """Has the attributes of a script's optimizer: what is set here, such as a learning rate, is set there."""

    _optimizer: Update

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "weights":
            super().__setattr__(name, value)
        else:
            setattr(self._optimizer, name, value)


class Shared(Wrapped):
    """A ``Trainer`` of several workers."""

    def __init__(self, session: Session, weights: Arrays, optimizer: Update) -> None:
        self._session, self._optimizer = session, optimizer
        self._key = session.enter_model(self)
        layout = _agree(session, weights)
        self._names = [layer.spec.name for layer in layout.layers]
        self._buckets = layout.buckets
        self._gradients, held = Blocks(session, layout), Blocks(session, layout)
        self.weights = {name: flat.reshape(weights[name].shape) for name, flat in zip(weights, held.flat, strict=True)}
        _copy_from_rank_0(session, weights, held)
        self._compression = session.compression(layout.layers, layout.buckets, self._gradients.arrays)
        schedule = session.strategy.schedule_object()
        mode = session.strategy.sync_mode()
        self._steps = Steps(len(weights), layout, schedule, mode)
        self._kind = STEP  # of what is exchanged
        self._agreed: AgreedWeights | None = None
        self._of_differences = self._compression
        if isinstance(mode, Agrees):
            self._agreed = AgreedWeights(mode, session.world_size, held.arrays, self._gradients.arrays)
            if self._compression is not None and exchanges_gradients(mode):  # what is left of gradients is theirs
                self._of_differences = self._compression.fresh(layout.buckets, self._gradients.arrays)
        self._lane = Lane(schedule.in_flight)
        self._states: list[States] = [{} for _ in weights]
        self._flat = held.flat
        self._works: list[Work] = []
        self._meeting: Meeting | None = None
        self._worker: Worker | None = None
        if session.strategy.server_holds_weights:
            for array in self.weights.values():
                array.flags.writeable = False  # the owners would not see it, and the next pull would undo it
            model = Model(layout, self._gradients.arrays, held.arrays, self._compression, self._key)
            self._worker = attach(session, model, partial(Sliced, optimizer), [])
        session.consolidates[self._key] = self._consolidate

    def step(self, gradients: Arrays) -> None:
        """Average the ranks' gradients and update the weights with the mean; all ranks call it."""
        if wrong := _wrong(self.weights, gradients):
            raise self._fault(f"the gradients have {wrong}")
        if self._worker is not None and not self._steps.due:
            raise self._fault(
                f"sync={self._session.strategy.sync.name} exchanges nothing in step {self._steps.begun}, and the owners"
                " of the weights have to be told every step: use ring or another allreduce, or ps(update=worker)"
            )
        if self._agreed is not None and not self._steps.due:
            self._step_alone(gradients)
            return
        mode = self._session.strategy.sync_mode()
        share = 1.0 / self._session.world_size if self._steps.due and not alone(mode) else 1.0
        try:
            for tensor in reversed(range(len(self._names))):  # as backward passes come to them
                np.multiply(gradients[self._names[tensor]].reshape(-1), share, out=self._gradients.flat[tensor])
                self._do(self._steps.produced(tensor))
            self._do(self._steps.backward_ended())
            self._do(self._steps.stepped())
            if mode.merges:
                self._session.coordination.begun()
        except BaseException as error:
            self._session.member.interrupted(error)  # the others wait for the rest of this step
            raise
        self._works, self._meeting = [], None
        if self._agreed is not None:
            self._agreed.begin()

    def _step_alone(self, gradients: Arrays) -> None:
        """A step of the worker's own, and what the workers exchange after it."""
        for name, weights, state in zip(self._names, self._flat, self._states, strict=True):
            self._optimizer.update(weights, gradients[name].reshape(-1), state)
        self._steps.made_alone()
        self._kind = AVERAGE
        try:
            self._do(self._steps.updated())
        except BaseException as error:
            self._session.member.interrupted(error)
            raise
        self._works, self._meeting, self._kind = [], None, STEP

    def _consolidate(self) -> None:
        """Have the owners' newest weights, or what becomes of those that workers have trained by themselves."""
        if self._worker is not None:
            self._session.engine.wait(*self._worker.consolidate())
        if self._agreed is not None:
            self._session.agree(CONSOLIDATE, step_argument(self._key, self._steps.begun))
            if self._agreed.put_own():
                for array in self._gradients.arrays:
                    self._session.run(self._session.allreduce_program(array.nbytes), array, "consolidate")
            self._agreed.take_final()

    def _fault(self, text: str) -> GradientError:
        """An error of this rank that ends the run for all."""
        error = GradientError(f"{self._session.name(self._session.index)}: {text}")
        self._session.fail(error)
        return error

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Agree):
                self._meeting = self._session.meet(self._kind, step_argument(self._key, action.step), weight=1.0)
                if self._agreed is not None and self._kind == AVERAGE:
                    self._agreed.put()
            elif isinstance(action, Submit):
                self._submit(action)
            elif isinstance(action, Wait):
                self._session.engine.wait(*self._works)
            elif isinstance(action, Apply):
                self._apply(action)
            elif self._agreed is not None:
                self._agreed.take()

    def _submit(self, submit: Submit) -> None:
        meeting, number = self._meeting, submit.operation.bucket
        array, label = self._gradients.arrays[number], f"bucket {number}"
        options: dict[str, Any] = {"lane": self._lane, "priority": submit.priority}
        if meeting is not None:  # where pushes are not merged, there is nothing to agree on
            options |= {"gate": meeting.work, "before": meeting.tickets}
        if self._worker is not None:
            work = self._worker.push(number, label, **options)
        elif (compression := self._compression if self._kind == STEP else self._of_differences) is not None:
            work = self._session.reduce(compression, number, self._key + number, label, **options)
        else:
            program = self._session.bucket_program(array.nbytes)
            work = self._session.engine.exchange(program, array, self._key + number, label, **options)
        self._works.append(work)

    def _apply(self, action: Apply) -> None:
        """All buckets of a step: what engines do that wait at the end of backward."""
        assert len(action.buckets) == len(self._buckets)
        if self._worker is not None:
            self._worker.step(_values(self._optimizer))
            self._session.engine.wait(*(self._worker.pull(number) for number in action.buckets))
            return
        for weights, gradient, state in zip(self._flat, self._gradients.flat, self._states, strict=True):
            self._optimizer.update(weights, gradient, state)


class Alone(Wrapped):
    """A ``Trainer`` in a world of one worker."""

    def __init__(self, weights: Arrays, optimizer: Update) -> None:
        self.weights, self._optimizer = weights, optimizer
        self._states: dict[str, States] = {name: {} for name in weights}

    def step(self, gradients: Arrays) -> None:
        """Update the weights with these gradients."""
        if wrong := _wrong(self.weights, gradients):
            raise GradientError(f"the gradients have {wrong}")
        for name, weights in self.weights.items():
            self._optimizer.update(weights.reshape(-1), gradients[name].reshape(-1), self._states[name])


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
        if values.keys() != vars(self._optimizer).keys():
            raise ValueError(f"the optimizer has {sorted(vars(self._optimizer))}, told are {sorted(values)}")
        vars(self._optimizer).update(values)
        for held, state in zip(self._holdings, self._states, strict=True):
            gradient = held.gradient if scale == 1.0 else held.gradient * held.gradient.dtype.type(scale)
            self._optimizer.update(held.weights, gradient, state)

    def state(self) -> list[State]:
        """The arrays that it keeps."""
        return [{key: Elements.of(array) for key, array in state.items()} for state in self._states]

    def load(self, states: Sequence[State]) -> None:
        """Arrays alone."""
        self._states = [
            {key: _array(value) for key, value in state.items() if isinstance(value, Elements)} for state in states
        ]


def adapt(session: Session, model: Any, optimizer: Any, options: Mapping[str, Any]) -> Handed | None:
    """Start all processes from rank 0's values; the arrays that train are new ones, read-only where others hold them.

    Raises UsageError for what cannot be trained, MismatchError where ranks differ.
    """
    others = sorted(name for name, value in options.items() if value != _OPTIONS[name])
    if others:
        raise UsageError(f"{others[0]}= is for models of PyTorch: a model of NumPy has no hooks, buffers or batches")
    _check_model(model)
    if not callable(getattr(optimizer, "update", None)):
        raise UsageError("a model of NumPy needs an optimizer with update(weights, gradient, state)")
    values, keeps = _values(optimizer), _probe(optimizer)
    if session.alone:
        warn_of_plain_steps(session)
        own = {name: np.array(array) for name, array in model.items()}
        return Handed((own, Alone(own, optimizer)))
    check_schedule(session.strategy, "NumPy")
    mode, sync = session.strategy.sync_mode(), session.strategy.sync.name
    check_kept(momentum_of(mode), sync, type(optimizer).__name__, keeps)
    PushGroups(mode, 1, sync)(values)
    if isinstance(mode, Mixes):
        raise UsageError(
            f"sync={sync} averages weights with those of some workers, which Syncline does not do"
            " with NumPy yet: use local, diloco or easgd"
        )
    if session.is_worker:
        made = Shared(session, model, optimizer)
        return Handed((made.weights, made))
    _serve(session, model, optimizer)
    return None


def _check_model(model: Mapping[str, Any]) -> None:
    """Raise UsageError for what is no dictionary of floating-point arrays."""
    if not isinstance(model, Mapping) or not model:
        raise UsageError("a model of NumPy is a dictionary of arrays, and has one at least")
    for name, array in model.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or not isinstance(name, str):
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise UsageError(f"the model's {name!r} is {kind}: give floating-point arrays, each by a name")


def _serve(session: Session, weights: Arrays, optimizer: Update) -> None:
    session.enter_model(optimizer)
    layout = _agree(session, weights)
    gradients, held = Blocks(session, layout), Blocks(session, layout)
    _copy_from_rank_0(session, weights, held)
    compression: Compression | None = session.compression(layout.layers, layout.buckets, gradients.arrays)
    if session.strategy.server_holds_weights:
        model = Model(layout, gradients.arrays, held.arrays, compression)
        serve(session, model, partial(Sliced, optimizer), [])
    else:
        Summing(session, layout, gradients.arrays, compression).serve()


def _agree(session: Session, weights: Arrays) -> Layout:
    """The layout of these arrays, which are the same ones on all processes."""
    mine = [[name, list(array.shape), str(array.dtype)] for name, array in weights.items()]
    theirs = json.loads(session.tell_everyone(json.dumps(mine).encode(), "comparing models"))
    for number in range(max(len(mine), len(theirs))):
        here, there = ("nothing" if number >= len(of) else "{!r} of shape {} and type {}".format(*of[number])
                       for of in (mine, theirs))  # fmt: skip
        if here != there:
            error = MismatchError(f"{session.name(session.index)} has another model than rank 0: {here}, not {there}")
            session.fail(error)
            raise error
    layers = [Layer(Spec(name, array.shape, str(array.dtype))) for name, array in weights.items()]
    return decide_layout(session, layers)


def _copy_from_rank_0(session: Session, weights: Arrays, held: Blocks) -> None:
    for array, flat in zip(weights.values(), held.flat, strict=True):
        flat[...] = array.reshape(-1)
    for number, array in enumerate(held.arrays):
        label = f"copying weights of bucket {number} from rank 0"
        session.engine.wait(session.broadcast_to_all(array, BUCKET_KEYS, label))


def _wrong(weights: Arrays, gradients: Arrays) -> str:
    """The first of these gradients that is not one of these weights; empty where all are."""
    for name, array in weights.items():
        if (shape := getattr(gradients.get(name), "shape", None)) != array.shape:
            return f"{name!r} of shape {shape} for weights of shape {array.shape}"
    return next((f"{name!r}, which the model does not have" for name in gradients if name not in weights), "")


def _values(optimizer: Update) -> list[dict[str, Any]]:
    """The optimizer's attributes as owners are told them; raises UsageError for what is no number or word."""
    known = vars(optimizer).items()
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in known}
    for name, value in values.items():
        if not isinstance(value, bool | int | float | str | None):
            raise UsageError(
                f"the optimizer's {name!r} is {type(value).__name__}: attributes are numbers and words, which the"
                " owners of weights are told; what it learns belongs into update()'s state"
            )
    return [values]


def _probe(optimizer: Update) -> bool:
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
            f"{type(optimizer).__name__}.update() gives other weights for slices of an array than for all of it: update"
            " every element by itself, and keep what it learns in the state"
        )
    return bool(states[2])


def _array(value: Elements) -> Array:
    array: Array = value.data.copy().view(value.dtype).reshape(value.shape)
    return array
