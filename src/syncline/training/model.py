"""One worker's steps with one model, in every framework: what the state machine of a step says is carried out here.

``engine.step`` decides what is agreed on, handed over, waited for, applied and averaged, and in which order.
``exchange`` knows how buckets travel, ``weights`` what of weights does. ``Framework`` is what differs between
frameworks. Owns the ticket of the step
that is under way, what was handed over and has not been waited for, and whether the others wait for the rest of the
step. Ranks may count differently (rank i counts w_i / sum of w; one without batches left counts nothing): the ticket
shows it.

Does not know when a gradient is there, nor when the optimizer is called. An adapter tells ``machine`` of that, and has
``do`` carry out what it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..compression.saved import Saved
from ..engine.order import Work
from ..engine.step import Action, Agree, Apply, BucketPhase, Steps, Submit, Wait
from ..session.layout import Layout
from ..session.session import Session
from ..session.tickets import AVERAGE, CONSOLIDATE, STEP, Meeting, step_argument
from ..sync import alone
from .exchange import BucketExchange
from .weights import WeightExchange


def _nothing(*_: object) -> None:
    pass


def _all_alike() -> float:
    return 1.0


@dataclass(frozen=True)
class Framework:
    """What a framework has to do in the steps of a model; one that leaves a part out has nothing to do there.

    A ``kind`` is that of the ticket: STEP where gradients are exchanged, AVERAGE or CONSOLIDATE where weights are.
    """

    check: Callable[[], None] = _nothing
    """Raises where nothing may be exchanged now."""
    begin: Callable[[], None] = _nothing
    """A step begins whose gradients are exchanged; what they count is known where pushes are not merged."""
    weight: Callable[[], float] = _all_alike
    """How much this rank counts."""
    met: Callable[[int, Meeting, int], None] = _nothing
    """The ticket of a kind is out, in that step or after it: buffers may go."""
    apply: Callable[[Apply], None] = _nothing
    """The weights of these buckets are to be updated."""
    averaged: Callable[[int], None] = _nothing
    """Weights have come, in an exchange of that kind: buffers have to."""


class TrainedModel:
    """A model of so many ``tensors``, whose buckets ``exchange`` moves, from its first step until ``close``."""

    def __init__(self, session: Session, exchange: BucketExchange, tensors: int, framework: Framework) -> None:
        self._session, self._exchange, self._tensors, self._framework = session, exchange, tensors, framework
        self.weights: WeightExchange | None = None
        """What exchanges weights, where the sync mode does."""
        self.meeting: Meeting | None = None
        """What all have come to, where they agree on a step."""
        self.begun = False
        """Whether others wait for the rest of this step."""
        self.weight = 1.0
        """What the gradients of the last step that was pushed by itself count."""
        self.share = 1.0 if alone(exchange.mode) else 1.0 / session.world_size
        """Of a gradient in what is exchanged: a part of a mean, unless each push is an update by itself."""
        self._works: dict[BucketPhase, Work] = {}
        self.steps = 0
        """How many steps have been made."""
        self.machine = self._machine(0)
        """Which step it is, and how far it has come."""

    def resume_at(self, step: int) -> None:
        """Go on from a step, counted from 0, of which nothing has begun, by the layout and the schedule of now."""
        self.steps, self.machine = step, self._machine(step)

    def resume(self, step: int, saved: Mapping[str, Sequence[Saved] | None]) -> None:
        """Go on from there with what ``BucketExchange.saved`` gave; all workers call it together."""
        self._exchange.resume(step, saved)
        self.resume_at(step)

    def replace_layout(self) -> None:
        """As ``BucketExchange.replace_layout``; nothing of a step is under way."""
        self.settle()
        self._exchange.replace_layout()
        self.begin_anew()  # the state machine goes by the buckets

    def resume_with(self, layout: Layout, measured: bool) -> None:
        """As ``BucketExchange.resume_with``; nothing of a step is under way."""
        self.settle()
        self._exchange.resume_with(layout, measured)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Nothing is left of a step that was begun."""
        self.resume_at(self.steps)

    def _machine(self, begun: int) -> Steps:
        exchange, held = self._exchange, self._session.strategy.server_holds_weights
        return Steps(self._tensors, exchange.layout, exchange.schedule, exchange.mode, begun=begun, held=held)

    def do(self, actions: Sequence[Action]) -> None:
        """What the state machine says."""
        for action in actions:
            if isinstance(action, Submit):
                self._submit(action)
            elif isinstance(action, Agree):
                self._agree(action.step)
            elif isinstance(action, Wait):
                self._session.engine.wait(*[self._works.pop(operation) for operation in action.operations])
                if self._exchange.staging.device is not None:
                    self._exchange.staging.join()
            elif isinstance(action, Apply):
                self._framework.apply(action)
            else:
                self._average(action.step)

    def made_alone(self) -> None:
        """A step of the worker's own is made, whose gradients are left as they are."""
        if self.weights is not None:
            self.weights.made_alone()
        self.machine.made_alone()
        self.steps += 1

    def made_step(self, due: bool) -> None:
        """A step was made, whose gradients were exchanged where that was ``due``, or are under way."""
        self.steps += 1
        if due:
            self._exchange.exchanged(self.meeting)
            if self._exchange.mode.merges or self._session.alone:
                self._session.coordination.begun()
        if self.weights is not None:
            self.weights.updated_alike()

    def settle(self) -> None:
        """Exchange the weights that are to be exchanged before another step."""
        if self.machine.owes:
            self._session.check_usable()
            actions = self.machine.updated()
            with self.others_waiting():
                self.do(actions)

    def rest(self) -> None:
        """The same, and let what all agree on be what they have, before all do something together."""
        self.settle()
        if self.weights is not None:
            self.weights.rest()

    def consolidate(self) -> None:
        """Give all workers the same weights, where they exchange them; all call it together, between two steps."""
        if self.weights is None:
            return
        self.rest()
        framework, step = self._framework, self.machine.begun
        with self.others_waiting():
            framework.check()
            self.weights.consolidate(step, framework.weight, lambda met: framework.met(CONSOLIDATE, met, step))
            framework.averaged(CONSOLIDATE)

    def shadow(self, kind: int, meeting: Meeting, step: int) -> None:
        """Take part in what the others exchange in a step of theirs, or after it, with what lies in the buckets.

        This rank makes no such step. All have met already.
        """
        with self.others_waiting():
            self._shadow(kind, meeting, step)

    def _shadow(self, kind: int, meeting: Meeting, step: int) -> None:
        self._met(kind, meeting, step)
        machine, actions = self._machine(step), list[Action]()
        if kind == AVERAGE:
            machine.made_alone()
            actions += machine.updated()
        else:
            for tensor in range(self._tensors):
                actions += machine.produced(tensor)
            actions += [*machine.backward_ended(), *machine.flush()]
        self.do([action for action in actions if not isinstance(action, Agree)])

    def forget(self) -> None:
        """The step is over, or was given up before the others were told of it."""
        self.meeting = None
        self.begun = False

    def close(self) -> None:
        """Nothing of the framework is held any more."""
        self._framework, self._works, self.weights = Framework(), {}, None
        self.forget()

    @contextmanager
    def others_waiting(self) -> Iterator[None]:
        """What is raised inside leaves the others waiting for the rest of an exchange, of which they are told."""
        try:
            yield
        except BaseException as error:
            self._session.member.process.interrupted(error)
            raise

    def _agree(self, step: int) -> None:
        framework, weights = self._framework, self.weights
        framework.check()
        argument = step_argument(self._exchange.key, step)
        if weights is not None and self._exchange.of_weights(step):
            kind, weight, flags = AVERAGE, weights.weight(framework.weight), weights.fingerprint
        else:
            framework.begin()
            kind, weight, flags = STEP, framework.weight(), self._exchange.flags
        meeting = self._session.meet(kind, argument, weight=weight, flags=flags)
        self.begun = True
        self._met(kind, meeting, step)

    def _met(self, kind: int, meeting: Meeting, step: int) -> None:
        """All come, in that step or after it."""
        self.meeting = meeting
        self._framework.met(kind, meeting, step)
        if self.weights is not None and kind == AVERAGE:
            self.weights.put()

    def _average(self, step: int) -> None:
        """The exchange of weights after a step has come: they are what follows from it."""
        assert self.weights is not None
        assert self.meeting is not None
        self.weights.take(self.meeting, step)
        self._framework.averaged(AVERAGE)
        self._exchange.exchanged(self.meeting)
        self.forget()

    def _submit(self, submit: Submit) -> None:
        """A bucket is complete."""
        if self.meeting is None and not self.begun:  # nothing is agreed on where pushes are not merged
            self._framework.check()
            self.weight = self._framework.weight()
            self._framework.begin()
        self.begun = True
        after = None if submit.after is None else self._works.pop(submit.after)
        started = self._exchange.start(submit.operation, self.meeting, submit.priority, after)
        self._works[submit.operation] = started
