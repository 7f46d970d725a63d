"""The steps of a model whose gradients come as arrays of the host: what adapters of frameworks share.

An adapter tells of each gradient as backward makes it (``produced``), and of the end of the step (``step``); gradients
lie in contiguous buckets in the transport's memory, the state machine of ``engine.step`` says what goes when, and the
engine exchanges them while backward goes on. What has come is applied by the framework (``Weights.update``) or by the
owners of the weights (``serving``). Where workers train by themselves it is weights that lie in the buckets.

No framework is known here, and none of its objects: ``Weights`` is all that one has to do. Weights stay where the
framework has them; copies in the transport's memory are made only where others hold the weights, or all agree on them.
Which gradients have come is ``_gradients``', how buckets travel, what a step does, and what owners do, ``training``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from ..engine.step import Apply
from ..engine.trace import Span, begin
from ..errors import GradientError, UsageError
from ..nouns import Spec
from ..serving.shard import Build
from ..session.session import Session
from ..sync import Averages
from ..training.exchange import BucketExchange, storages_of
from ..training.memory import Blocks, InPlace, agree_on_model, copy_from_rank_0
from ..training.model import Framework, TrainedModel
from ..training.owners import OwnedModel, add_up, serve_model
from ..training.weights import WeightExchange
from ._gradients import Coming
from ._weights import Array, HeldWeights, Weights

Kind = Literal["exchanged", "own", "averaged"]
"""A step whose gradients are exchanged, a worker's own one, and one after which weights are."""


class FlatModel:
    """One worker's part in the training of a model; ``owner`` is for ``Session.enter_model``.

    All processes make one at the same place, or call ``serve_flat``. They begin with rank 0's weights. ``rule`` says
    what the optimizer is, in words that have to be the same on all: at first, and in every step whose gradients all
    exchange where each updates its own weights.
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
        self.gradients = Blocks(layout.layers, layout.buckets, session.engine.allocate)
        self.coming = Coming(specs, self.gradients.flat)
        weights.read(self.gradients.flat)
        copy_from_rank_0(session, self.gradients.arrays)
        weights.write(self.gradients.flat)
        held_or_agreed = isinstance(session.strategy.sync_mode(), Averages) or session.strategy.server_holds_weights
        storages, said = [self.gradients] * storages_of(session.strategy), None if held_or_agreed else rule
        self.exchange = BucketExchange(session, self.key, layout, storages, InPlace(session.engine), rule=said)
        self._mode = self.exchange.mode
        self.trained = TrainedModel(session, self.exchange, len(self.specs), Framework(apply=self._apply))
        self.held: Blocks | None = None  # the weights as they travel, where they do
        self.owned: OwnedModel | None = None
        if held_or_agreed:
            self.held = Blocks(layout.layers, layout.buckets, session.engine.allocate)
            self.held.take(self.gradients)
        if self.held is not None and isinstance(self._mode, Averages):
            memory = HeldWeights(weights, self.held, self.gradients, session.world_size)
            self.averaging = WeightExchange(session, self.key, self._mode, memory, follows=True)
            self.trained.weights, self.exchange.program = self.averaging, self.averaging.program
        elif self.held is not None:
            self.owned = OwnedModel(self.exchange, self.trained, self.held, build)
            self.owned.taken = partial(weights.write, self.held.flat)
        self._alone = False  # the present step is the worker's own
        self.gone = False  # another has the weights
        self._backward: Span | None = None
        self.exchange.plan()
        session.consolidates[self.key] = self._consolidate

    averaging: WeightExchange | None = None
    """What exchanges weights, where workers train by themselves."""

    @property
    def steps(self) -> int:
        """How many have been made."""
        return self.trained.steps

    @property
    def follows(self) -> bool:
        """Whether all have the same weights, which those that are agreed on have yet to become."""
        return self.averaging is not None and self.averaging.follows

    @property
    def kind(self) -> Kind:
        """What the next step is."""
        if self.trained.machine.due:
            return "exchanged"
        return "averaged" if isinstance(self._mode, Averages) and self._mode.averages(self.steps) else "own"

    def resume(self, step: int, saved: Mapping[str, Any]) -> None:
        """As ``TrainedModel.resume``, between two steps."""
        self.trained.resume(step, saved)
        self.exchange.plan()

    # One step.

    def produced(self, tensor: int, gradient: Array, *, tells: bool = True) -> None:
        """The gradient of a tensor is complete: copy it into its bucket, which goes when it is complete.

        Where ``tells``, backward is still running. Raises GradientError for what is no gradient of this tensor.
        """
        coming = self.coming
        if not coming.begun:
            self._begin()
        if tells:
            self._mark()
        if not coming.fits(tensor, gradient):
            self.session.engine.check_error()  # of which the script may have heard before
            raise self.fault(coming.wrong(tensor, gradient, self.steps))
        self._place(tensor, gradient)

    def begin(self) -> float:
        """A step begins whose gradients are put into their places, times this; ``placed`` is told of them."""
        self._begin()
        self._mark()
        return self._share

    def placed(self, tensor: int) -> None:
        """The gradient of a tensor lies in its place, for the first time in this step."""
        self._place(tensor, None)

    def _place(self, tensor: int, gradient: Array | None) -> None:
        self.coming.came(tensor)
        try:
            if gradient is not None:
                self.coming.places[tensor].put(gradient, self._share)
            if not self._alone:
                self.trained.do(self.trained.machine.produced(tensor))
        except BaseException as error:
            self.session.member.process.interrupted(error)  # the others wait for the rest of this step
            raise

    def _mark(self) -> None:
        """Backward is running."""
        if self._backward is None and self.session.observer is not None:
            self._backward = begin(self.session.observer, "backward", "backward")

    def _begin(self) -> None:
        self.session.check_usable()
        self._check_not_gone()
        due = self.trained.machine.due
        if self.owned is not None and not due:
            raise self.fault(
                f"sync={self.session.strategy.sync.name} exchanges nothing in step {self.steps}, and the owners"
                " of the weights have to be told every step: use ring or another allreduce, or ps(update=worker)"
            )
        self._alone = self.averaging is not None and not due
        self._share = self.trained.share if due else 1.0
        self.coming.begin()

    def step(self) -> None:
        """All gradients have come: have the weights updated with the workers' mean; all workers call it."""
        if self.coming.missing:
            raise self.fault(f"step() without the gradients of {self.coming.names_of_missing()}")
        if self._backward is not None:
            self._backward.end()
            self._backward = None
        due = self.trained.machine.due
        with self.trained.others_waiting():
            if not self._alone:
                self.trained.do(self.trained.machine.backward_ended())
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
        """The weights become the new ones."""
        if self._alone:
            self._step_alone()
        elif self.owned is not None:
            self.owned.step(self.weights.values())
        else:
            self.trained.do(self.trained.machine.stepped())
        if self.exchange.schedule.apply == "layer":  # nobody shows when a weight is read first, so all are waited for
            self.trained.do(self.trained.machine.flush())

    def step_alone(self) -> None:
        """A worker's own step whose gradients stay with the framework, which ``Weights.update`` has made of them."""
        self._begin()
        self.coming.all_came()
        self.step()

    def drop(self) -> None:
        """The pass whose gradients are coming was given up, and the next ones are of another, in the same step.

        Raises GradientError, which ends the run for all, where some have gone.
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
                f"drop() in step {self.steps}, gradients of which have gone to the other workers: begin the run again"
                " from a checkpoint; under schedule=fifo none go before step()"
            ) from error
        if self._alone:
            self.coming.end()
        else:
            self.coming.begin()

    def _step_alone(self) -> None:
        """A step of the worker's own, and what the workers exchange after it."""
        self.trained.made_alone()
        self.weights.update(self.gradients.flat)
        self.trained.settle()

    def _apply(self, action: Apply) -> None:  # noqa: ARG002
        """All buckets of a step: what engines do that wait at the end of backward."""
        if self.owned is None:  # owners have
            self.weights.update(self.gradients.flat)

    # Between steps.

    def take_weights(self, values: Sequence[Array]) -> None:
        """Let the weights be these, in the transport's memory too; owners elsewhere are not told."""
        self.weights.write(values)
        if self.held is not None:
            self.weights.read(self.held.flat)

    def check_between(self, what: str) -> None:
        """Raise GradientError in the middle of a step, gradients of which have gone."""
        self._check_not_gone()
        if self.coming.begun:
            raise self.fault(
                f"{what} in the middle of a step, some gradients of which have gone: call it between two steps"
            )

    def let_go(self) -> None:
        """Another one has these weights from here on; between two steps.

        Raises UsageError where owners hold them, who know of no other.
        """
        if self.owned is not None:
            raise UsageError(
                f"owners of the weights hold {self.specs[0].name!r} as it was prepared first: prepare these arrays"
                " once, or use ring or another allreduce"
            )
        self.check_between("prepare()")
        self.gone = True
        self.session.leave_model(self.key)
        self.trained.close()  # which holds this model, and so its memory until Python looks for cycles
        self.exchange.close()

    def _check_not_gone(self) -> None:
        if self.gone:
            raise self.fault(
                f"{self.specs[0].name!r} has been prepared again: use what syncline.prepare() has returned last for it"
            )

    def _consolidate(self) -> None:
        """Have the owners' newest weights, or what becomes of those that workers have trained by themselves."""
        self.check_between("consolidate()")
        if self.owned is not None:
            self.owned.consolidate()
        self.trained.consolidate()

    def fault(self, text: str) -> GradientError:
        """As ``Session.fault``."""
        return self.session.fault(text)


def serve_flat(
    session: Session, specs: Sequence[Spec], weights: Weights, build: Build, owner: object, rule: str = ""
) -> None:
    """A server's part until all workers have left: it owns weights, or adds gradients up."""
    layout = agree_on_model(session, session.enter_model(owner), specs, rule)
    gradients, held = (Blocks(layout.layers, layout.buckets, session.engine.allocate) for _ in range(2))
    weights.read(held.flat)
    copy_from_rank_0(session, held.arrays)
    if session.strategy.server_holds_weights:
        serve_model(session, layout, gradients, held, build)
    else:
        add_up(session, layout, gradients)


def flat_models(session: Session) -> list[FlatModel]:
    """Those that hold weights of this process, in groups of workers too."""
    calls = [call for one in session.family for call in one.consolidates.values()]
    return [made for made in (getattr(call, "__self__", None) for call in calls) if isinstance(made, FlatModel)]
