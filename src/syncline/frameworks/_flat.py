"""The steps of a model whose gradients come as arrays of the host: what adapters of frameworks share.

An adapter tells of each gradient as backward makes it (``produced``), and of the end of the step (``step``); gradients
lie in contiguous buckets in the transport's memory, the state machine of ``engine.step`` says what goes when, and the
engine exchanges them while backward goes on. What has come is applied by the framework (``Weights.update``) or by the
owners of the weights (``serving``). Where workers train by themselves it is weights that lie in the buckets.

No framework is known here, and none of its objects: ``Weights`` is all that one has to do. Weights stay where the
framework has them; copies in the transport's memory are made only where others hold the weights, or all agree on them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..engine.step import Action, Agree, Apply, BucketPhase, Steps, Submit, Wait
from ..engine.trace import Span, begin
from ..engine.work import Lane, Work
from ..errors import GradientError, MismatchError, UsageError
from ..nouns import Spec
from ..serving.records import State
from ..serving.server import serve
from ..serving.shard import Build, Groups
from ..serving.summing import Summing
from ..serving.traffic import Model
from ..serving.worker import Worker, attach
from ..session.session import Session
from ..session.tickets import AVERAGE, CONSOLIDATE, STEP, Meeting, step_argument, step_of
from ..sync import Agrees, Averages, alone, exchanges_gradients
from ._agreed import AgreedWeights
from ._blocks import Blocks, agree_on_model, copy_from_rank_0

Array = NDArray[Any]
Kind = Literal["exchanged", "own", "averaged"]
"""A step whose gradients are exchanged, a worker's own one, and one after which weights are."""


class Weights(Protocol):
    """A framework's side of one model; flat arrays are in the order of its tensors, and contiguous."""

    def read(self, into: Sequence[Array]) -> None:
        """Copy the framework's weights into flat arrays."""
        ...

    def write(self, values: Sequence[Array]) -> None:
        """Let the framework's weights be these."""
        ...

    def update(self, gradients: Sequence[Array]) -> None:
        """Update the framework's weights with these gradients, by its optimizer, which may overwrite them."""
        ...

    def values(self) -> Groups:
        """What the optimizer is set to, as owners of weights are told it."""
        ...

    def kept(self) -> list[State]:
        """What the optimizer keeps of each tensor, elements flat, which may be its own memory."""
        ...

    def keep(self, states: Sequence[State]) -> None:
        """Replace that."""
        ...


class FlatModel:
    """One worker's part in the training of a model; ``owner`` is for ``Session.enter_model``.

    All processes make one at the same place, or call ``serve_model``. They begin with rank 0's weights. ``rule`` says
    what the optimizer is, in words that have to be the same on all, in every step that all make together.
    """

    def __init__(
        self,
        session: Session,
        specs: Sequence[Spec],
        weights: Weights,
        build: Build,
        owner: object,
        rule: Callable[[], str] = str,
    ) -> None:
        self.session, self.specs, self.weights = session, list(specs), weights
        self.key = session.enter_model(owner)
        self.layout = layout = agree_on_model(session, self.key, specs, rule())
        self.names = [spec.name for spec in specs]
        self._shapes = [spec.shape for spec in specs]
        self.gradients = Blocks(session, layout)
        self.places = [flat.reshape(shape) for flat, shape in zip(self.gradients.flat, self._shapes, strict=True)]
        """Where gradients go, in their shapes; they stay where they are."""
        weights.read(self.gradients.flat)
        copy_from_rank_0(session, self.gradients.arrays)
        weights.write(self.gradients.flat)
        self._schedule, self._mode = session.strategy.schedule_object(), session.strategy.sync_mode()
        self._rule = str if isinstance(self._mode, Agrees) or session.strategy.server_holds_weights else rule
        self._labels = [f"bucket {i} ({one.describe(layout.layers)})" for i, one in enumerate(layout.buckets)]
        self.held: Blocks | None = None  # the weights as they travel, where they do
        self.agreed: AgreedWeights | None = None
        self.compress()
        self.worker: Worker | None = None
        if session.strategy.server_holds_weights or isinstance(self._mode, Agrees):
            self.held = Blocks(session, layout)
            self.held.take(self.gradients)
        if self.held is not None and isinstance(self._mode, Agrees):
            self.agreed = AgreedWeights(self._mode, session.world_size, self.held.arrays, self.gradients.arrays)
        elif self.held is not None:
            model = Model(layout, self.gradients.arrays, self.held.arrays, self.compression, self.key)
            self.worker = attach(session, model, build, [])
        self._lane = Lane(self._schedule.in_flight)
        self._left: dict[int, None] | None = None  # tensors that the present step waits for, once it has begun
        self._works: dict[BucketPhase, Work] = {}
        self._meeting: Meeting | None = None
        self._unchecked: Meeting | None = None  # whose tickets nobody has looked at
        self._kind = STEP  # of what is exchanged
        self._alone = False  # the present step is the worker's own
        self.follows = True
        """Whether all have the same weights, which those that are agreed on have yet to become."""
        self.gone = False  # another has the weights
        self._backward: Span | None = None
        self.resume_at(0)
        session.consolidates[self.key] = self._consolidate

    def compress(self) -> None:
        """Compress as the session's strategy says, with a memory that is empty; between steps."""
        layout, arrays = self.layout, self.gradients.arrays
        self.compression = self.of_differences = self.session.compression(layout.layers, layout.buckets, arrays)
        if self.compression is not None and isinstance(self._mode, Agrees) and exchanges_gradients(self._mode):
            self.of_differences = self.compression.fresh(layout.buckets, arrays)  # what is left of gradients is theirs

    @property
    def steps(self) -> int:
        """How many have been made."""
        return self._steps.begun

    @property
    def present(self) -> int:
        """The number of the step whose gradients are coming, or would come next."""
        return self._steps.begun if self._left is None or self._alone else self._begun

    @property
    def kind(self) -> Kind:
        """What the next step is."""
        if self._steps.due:
            return "exchanged"
        return "averaged" if isinstance(self._mode, Averages) and self._mode.averages(self.present) else "own"

    def resume_at(self, step: int) -> None:
        """Go on from a step, counted from 0; between two."""
        held = self.worker is not None
        plain = [] if held or self.compression is not None else self.gradients.arrays
        self._programs = [self.session.bucket_program(array.nbytes) for array in plain]
        self._steps = Steps(len(self.names), self.layout, self._schedule, self._mode, begun=step, held=held)

    # One step.

    def produced(self, tensor: int, gradient: Array, *, tells: bool = True) -> None:
        """The gradient of a tensor is complete: copy it into its bucket, which goes when it is complete.

        Where ``tells``, backward is still running. Raises GradientError for what is no gradient of this tensor.
        """
        left = self._begin() if self._left is None else self._left
        if tells:
            self._mark()
        place = self.places[tensor]
        if gradient.shape != place.shape or not fits(gradient, place) or tensor not in left:
            self.session.engine.check_error()  # of which the script may have heard before
            raise self.fault(self._wrong(tensor, gradient))
        self._place(tensor, gradient)

    def begin(self) -> float:
        """A step begins whose gradients are put into ``places``, multiplied by this; ``placed`` is told of them."""
        self._begin()
        self._mark()
        return self._share

    def placed(self, tensor: int) -> None:
        """The gradient of a tensor lies in its place, for the first time in this step."""
        self._place(tensor, None)

    def _place(self, tensor: int, gradient: Array | None) -> None:
        assert self._left is not None
        del self._left[tensor]
        try:
            if gradient is not None:
                np.multiply(gradient, self._share, out=self.places[tensor])
            if not self._alone:
                self._do(self._steps.produced(tensor))
        except BaseException as error:
            self.session.member.interrupted(error)  # the others wait for the rest of this step
            raise

    def _mark(self) -> None:
        """Backward is running."""
        if self._backward is None and self.session.observer is not None:
            self._backward = begin(self.session.observer, "backward", "backward")

    def _begin(self) -> dict[int, None]:
        self.session.check_usable()
        self._check_not_gone()
        due = self._steps.due
        if self.worker is not None and not due:
            raise self.fault(
                f"sync={self.session.strategy.sync.name} exchanges nothing in step {self._steps.begun}, and the owners"
                " of the weights have to be told every step: use ring or another allreduce, or ps(update=worker)"
            )
        self._alone = self.agreed is not None and not due
        self._begun = self._steps.begun
        self._share = 1.0 / self.session.world_size if due and not alone(self._mode) else 1.0
        self._left = dict.fromkeys(range(len(self.names)))
        return self._left

    def _wrong(self, tensor: int, gradient: Array) -> str:
        name, place = self.names[tensor], self.places[tensor]
        if self._left is None or tensor not in self._left:
            return (
                f"the gradient of {name!r} was given twice in step {self.steps}: call step() between two; where a pass"
                " was given up, say drop() before the next one, if no bucket has gone, or begin the run again from a"
                " checkpoint"
            )
        return unfit(name, gradient, place)

    def step(self) -> None:
        """All gradients have come: have the weights updated with the workers' mean; all workers call it."""
        if missing := self.missing:
            raise self.fault(f"step() without the gradients of {', '.join(self._names_of(missing))}")
        observer, optimizing = self.session.observer, None
        if self._backward is not None:
            self._backward.end()
            self._backward = None
        try:
            if not self._alone:
                self._do(self._steps.backward_ended())
            if observer is not None:
                optimizing = begin(observer, "optimizer", "optimizer step")
            if self._alone:
                self._step_alone()
            elif self.worker is not None:
                self._step_by_owners(self.worker)
            else:
                self._do(self._steps.stepped())
            if not self._alone and self._mode.merges:
                self.session.coordination.begun()
        except BaseException as error:
            self.session.member.interrupted(error)
            raise
        finally:
            if optimizing is not None:
                optimizing.end()
        self._meeting, self._left = None, None

    def step_alone(self) -> None:
        """A worker's own step whose gradients stay with the framework, which ``Weights.update`` has made of them."""
        self._begin().clear()
        self.step()

    def drop(self) -> None:
        """The pass whose gradients are coming was given up, and the next ones are of another, in the same step.

        Raises GradientError, which ends the run for all, where some have gone.
        """
        if self._left is None:
            return
        if self._backward is not None:
            self._backward.end()
            self._backward = None
        try:
            if not self._alone:
                self._steps.dropped()
        except UsageError as error:
            raise self.fault(
                f"drop() in step {self.present}, gradients of which have gone to the other workers: begin the run again"
                " from a checkpoint; under schedule=fifo none go before step()"
            ) from error
        self._left = None if self._alone else dict.fromkeys(range(len(self.names)))

    @property
    def missing(self) -> list[int]:
        """The tensors whose gradients have not come in the present step, in their order."""
        return list(range(len(self.names)) if self._left is None else self._left)

    def _names_of(self, tensors: Sequence[int]) -> list[str]:
        found = [repr(self.names[tensor]) for tensor in tensors]
        return found if len(found) <= 8 else [*found[:8], f"{len(found) - 8} more"]

    def _step_by_owners(self, worker: Worker) -> None:
        """The update is made by the owners, bucket by bucket as pushes come, and the weights are pulled behind it."""
        assert self.held is not None
        worker.step(self.weights.values())
        pulls = [worker.pull(i, priority=priority) for i, priority in enumerate(self.layout.priorities)]
        self._do(self._steps.stepped())
        self.session.engine.wait(*pulls)
        self.weights.write(self.held.flat)

    def _step_alone(self) -> None:
        """A step of the worker's own, and what the workers exchange after it."""
        assert self.agreed is not None
        assert self.held is not None
        if self.follows:
            self.weights.read(self.held.flat)
            self.agreed.begin()
            self.follows = False
        self.weights.update(self.gradients.flat)
        self._steps.made_alone()
        self._kind = AVERAGE
        try:
            self._do(self._steps.updated())
        finally:
            self._kind = STEP

    # What the state machine says.

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Submit):
                self._works[action.operation] = self._submit(action)
            elif isinstance(action, Wait):
                self.session.engine.wait(*[self._works.pop(operation) for operation in action.operations])
            elif isinstance(action, Agree):
                self._agree(action.step)
            elif isinstance(action, Apply):
                self._apply()
            elif self.agreed is not None and self.held is not None:
                self.agreed.take()
                self.weights.write(self.held.flat)

    def _agree(self, step: int) -> None:
        rule = zlib.crc32(self._rule().encode())
        argument = step_argument(self.key, step)
        self._meeting = self._unchecked = self.session.meet(self._kind, argument, weight=1.0, flags=rule)
        if self.agreed is not None and self.held is not None and self._kind == AVERAGE:
            self.weights.read(self.held.flat)
            self.agreed.put()

    def _apply(self) -> None:
        """All buckets of a step: what engines do that wait at the end of backward."""
        if self.worker is None:  # owners have
            self.weights.update(self.gradients.flat)
            self.follows = True

    def _submit(self, submit: Submit) -> Work:
        number, meeting = submit.operation.bucket, self._meeting
        label = self._labels[number]
        options: dict[str, Any] = {"lane": self._lane, "priority": submit.priority}
        if meeting is not None:  # where pushes are not merged, there is nothing to agree on
            options["gate"], options["before"] = meeting.work, self._check
        if self.worker is not None:
            return self.worker.push(number, label, **options)
        compression = self.compression if self._kind == STEP else self.of_differences
        if compression is not None:
            return self.session.reduce(compression, number, self.key + number, label, **options)
        array, program = self.gradients.arrays[number], self._programs[number]
        return self.session.engine.exchange(program, array, self.key + number, label, **options)

    def _check(self) -> None:
        """Before a bucket goes, in the thread that drives: all workers have come for the same, which is seen once."""
        meeting, self._unchecked = self._unchecked, None
        if meeting is not None:
            tickets = meeting.tickets()
            mine = tickets[self.session.rank].flags
            for rank, ticket in enumerate(tickets):
                if ticket.flags != mine:
                    raise self._parted(rank, step_of(ticket))

    def _parted(self, rank: int, step: int) -> MismatchError:
        other, me = self.session.name(rank), self.session.name(self.session.rank)
        text = f"{other} updates with other values in step {step} than {me}, which has {self._rule()}"
        return MismatchError(self.session.titled(f"{text}: set the optimizer's attributes alike on all workers"))

    # Between steps.

    def take_weights(self, values: Sequence[Array]) -> None:
        """Let the weights be these, in the transport's memory too; owners elsewhere are not told."""
        self.weights.write(values)
        if self.held is not None:
            self.weights.read(self.held.flat)

    def check_between(self, what: str) -> None:
        """Raise GradientError in the middle of a step, gradients of which have gone."""
        self._check_not_gone()
        if self._left is not None:
            raise self.fault(
                f"{what} in the middle of a step, some gradients of which have gone: call it between two steps"
            )

    def let_go(self) -> None:
        """Another one has these weights from here on; between two steps.

        Raises UsageError where owners hold them, who know of no other.
        """
        if self.worker is not None:
            raise UsageError(
                f"owners of the weights hold {self.names[0]!r} as it was prepared first: prepare these arrays once, or"
                " use ring or another allreduce"
            )
        self.check_between("prepare()")
        self.gone = True
        del self.session.consolidates[self.key]

    def _check_not_gone(self) -> None:
        if self.gone:
            raise self.fault(
                f"{self.names[0]!r} has been prepared again: use what syncline.prepare() has returned last for it"
            )

    def _consolidate(self) -> None:
        """Have the owners' newest weights, or what becomes of those that workers have trained by themselves."""
        self.check_between("consolidate()")
        if self.worker is not None and self.held is not None and (pulls := self.worker.consolidate()):
            self.session.engine.wait(*pulls)
            self.weights.write(self.held.flat)
        if self.agreed is not None and self.held is not None:
            self.session.agree(CONSOLIDATE, step_argument(self.key, self.steps))
            self.weights.read(self.held.flat)
            if self.follows:
                self.agreed.begin()
            if self.agreed.put_own():
                for array in self.gradients.arrays:
                    self.session.run(self.session.allreduce_program(array.nbytes), array, "consolidate")
            self.agreed.take_final()
            self.weights.write(self.held.flat)

    def fault(self, text: str) -> GradientError:
        """An error of this rank that ends the run for all."""
        error = GradientError(self.session.titled(f"{self.session.name(self.session.index)}: {text}"))
        self.session.fail(error)
        return error


def fits(gradient: Array, place: Array) -> bool:
    """Whether these are real numbers of any type, or of the very one."""
    return gradient.dtype.kind in "fiu" or gradient.dtype == place.dtype


def unfit(name: str, gradient: Array, place: Array) -> str:
    """Why something is no gradient of these weights."""
    if gradient.shape != place.shape:
        return f"the gradients have {name!r} of shape {gradient.shape} for weights of shape {place.shape}"
    return f"the gradient of {name!r} is of {gradient.dtype}, for weights of {place.dtype}"


def flat_models(session: Session) -> list[FlatModel]:
    """Those that hold weights of this process, in groups of workers too."""
    calls = [call for one in session.family for call in one.consolidates.values()]
    return [made for made in (getattr(call, "__self__", None) for call in calls) if isinstance(made, FlatModel)]


def serve_model(
    session: Session, specs: Sequence[Spec], weights: Weights, build: Build, owner: object, rule: str = ""
) -> None:
    """A server's part in the training of a model; returns when all workers have left."""
    layout = agree_on_model(session, session.enter_model(owner), specs, rule)
    gradients, held = Blocks(session, layout), Blocks(session, layout)
    weights.read(held.flat)
    copy_from_rank_0(session, held.arrays)
    compression = session.compression(layout.layers, layout.buckets, gradients.arrays)
    if session.strategy.server_holds_weights:
        serve(session, Model(layout, gradients.arrays, held.arrays, compression), build, [])
    else:
        Summing(session, layout, gradients.arrays, compression).serve()
