"""Carries out the steps of one worker with one model, for every framework.

``engine.step`` is the state machine of a step. It decides what ranks agree on, submit, wait for, apply and average, and
in which order. This module owns the ticket of the current step, the submitted exchanges, and whether other ranks wait
for the rest of the step. ``exchange`` moves the buckets, ``weights`` exchanges weights, and ``Framework`` holds the
calls that differ between frameworks. Ranks may have different weights: rank i counts w_i / sum of w, and a rank without
batches left counts 0. The ticket carries w_i.

An adapter tells ``machine`` when a gradient is complete and when the optimizer is called, and passes the answers of
``machine`` to ``do``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..compression.saved import Saved
from ..engine.order import Work
from ..engine.step import Action, Agree, Apply, BucketPhase, Steps, Submit, Wait
from ..session.checks import ModelChecks
from ..session.communicator import Array
from ..session.layout import Layout
from ..session.session import Session
from ..session.stats import Pace
from ..session.tickets import AVERAGE, CONSOLIDATE, STEP, Meeting, step_argument
from ..sync import alone
from .exchange import BucketExchange
from .weights import WeightExchange


def nothing(*_: object) -> None:
    """The default of an optional call: it does nothing."""


def _all_alike() -> float:
    return 1.0


@dataclass(frozen=True)
class Framework:
    """The calls of a framework in the steps of a model; the default of each does nothing.

    ``kind`` is the kind of the ticket: STEP for an exchange of gradients, AVERAGE or CONSOLIDATE for one of weights.
    """

    check: Callable[[], None] = nothing
    """Raises if no exchange is allowed now."""
    begin: Callable[[], None] = nothing
    """A step with exchanged gradients begins. If pushes are not merged, this rank's weight is already known."""
    weight: Callable[[], float] = _all_alike
    """This rank's weight."""
    met: Callable[[int, Meeting, int], None] = nothing
    """This rank has sent its ticket of this kind, for this step or after it: buffers may be exchanged."""
    apply: Callable[[Apply], None] = nothing
    """Update the weights of these buckets."""
    averaged: Callable[[int], None] = nothing
    """Averaged weights have arrived, in an exchange of that kind: wait for the buffers."""
    weights: Callable[[], Iterable[tuple[str, Array]]] = tuple
    """The name and the bytes of each tensor of weights, for a comparison of the replicas."""


class TrainedModel:
    """A model of ``tensors`` tensors from its first step until ``close``; ``exchange`` moves its buckets."""

    def __init__(self, session: Session, exchange: BucketExchange, tensors: int, framework: Framework) -> None:
        self._session, self._exchange, self._tensors, self._framework = session, exchange, tensors, framework
        self.weights: WeightExchange | None = None
        """The exchange of weights, if the sync mode has one."""
        self.after_average: Callable[[], object] = nothing
        """Called once averaged weights are this worker's."""
        self.meeting: Meeting | None = None
        """The meeting of the current step, if ranks agree on steps."""
        self.begun = False
        """Whether other ranks wait for the rest of this step."""
        self.weight = 1.0
        """This rank's weight in its last push that was an update by itself."""
        self.share = 1.0 if alone(exchange.mode) else 1.0 / session.world_size
        """The factor of a gradient in its bucket: 1/N in a mean of N, 1 if each push is an update by itself."""
        self._works: dict[BucketPhase, Work] = {}
        self.pace = session.paces[exchange.key] = Pace()
        """Counts steps and their times, for monitors."""
        exchange.measure_error(self.pace, session.error_every)
        self._checks: ModelChecks | None = None
        if session.checks.asked:
            self._checks = ModelChecks(session, session.checks, [layer.spec.name for layer in exchange.layout.layers])
        self.steps = 0
        """The number of finished steps."""
        self.machine = self._machine(0)
        """The state machine of the current step."""

    def resume_at(self, step: int) -> None:
        """Continue at that step, counted from 0, with the present layout and schedule."""
        self.steps, self.machine = step, self._machine(step)

    def resume(self, step: int, saved: Mapping[str, Sequence[Saved] | None]) -> None:
        """Continue at that step with the result of ``BucketExchange.saved``; all workers call it together."""
        self._exchange.resume(step, saved)
        self.resume_at(step)

    def replace_layout(self) -> None:
        """Call ``BucketExchange.replace_layout``. No part of a step may be under way."""
        self.settle()
        self._exchange.replace_layout()
        self.begin_anew()  # the state machine depends on the buckets

    def resume_with(self, layout: Layout, measured: bool) -> None:
        """Call ``BucketExchange.resume_with``. No part of a step may be under way."""
        self.settle()
        self._exchange.resume_with(layout, measured)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Discard the progress of the current step."""
        self.resume_at(self.steps)

    def _machine(self, begun: int) -> Steps:
        exchange, held = self._exchange, self._session.strategy.server_holds_weights
        return Steps(self._tensors, exchange.layout, exchange.schedule, exchange.mode, begun=begun, held=held)

    def check_not_due(self) -> None:
        """Raise GradientError if owners of the weights must take part in the present step, which exchanges nothing."""
        strategy = self._session.strategy
        if strategy.server_holds_weights:
            raise self._session.fault(
                f"sync={strategy.sync.name} exchanges nothing in step {self.steps}, but owners of the weights must take"
                " part in every step: use ring or another allreduce, or ps(update=worker)"
            )

    def do(self, actions: Sequence[Action]) -> None:
        """Carry out the state machine's answers."""
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
        """Note a step that this worker makes alone; its gradients are not exchanged."""
        if self.weights is not None:
            self.weights.made_alone()
        self.machine.made_alone()
        self._count_step()

    def made_step(self, due: bool) -> None:
        """Note a step. If it was ``due``, its gradients have been exchanged or are in flight."""
        self._count_step()
        if due:
            self._exchange.exchanged(self.meeting)
            if self._exchange.mode.merges or self._session.alone:
                self._session.coordination.begun()
        if self.weights is not None:
            self.weights.follows = True

    def _count_step(self) -> None:
        self.steps += 1
        self.pace.stepped(self.steps)

    def end_backward(self) -> None:
        """Carry out the end of a backward pass. Raises GradientError for gradients that a check refuses."""
        step = self.machine.begun - 1
        self.do(self.machine.backward_ended())
        self._conclude(step)

    def _conclude(self, step: int) -> None:
        if self._checks is not None:
            self._checks.conclude(step, self._exchange.mode.merges)

    def settle(self) -> None:
        """Carry out an exchange of weights that is due before the next step."""
        if self.machine.averages_next:
            self._session.check_usable()
            actions = self.machine.updated()
            with self.others_waiting():
                self.do(actions)

    def rest(self) -> None:
        """``settle``, and take weights that are equal on all workers as the agreed ones, before a joint call."""
        self.settle()
        if self.weights is not None:
            self.weights.rest()

    def consolidate(self) -> None:
        """Give all workers the same weights, if the mode exchanges them. All call it together, between steps."""
        if self.weights is None:
            return
        self.rest()
        framework, step = self._framework, self.machine.begun
        with self.others_waiting():
            framework.check()
            self.weights.consolidate(step, framework.weight, lambda met: framework.met(CONSOLIDATE, met, step))
            framework.averaged(CONSOLIDATE)

    def shadow(self, kind: int, meeting: Meeting, step: int) -> None:
        """Take part in the exchanges of a step of the other ranks, which this rank does not make.

        The present contents of the buckets are sent. All ranks have met already.
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
        if kind == STEP and self._checks is not None:
            self._checks.compare(step, None)
        self.do([action for action in actions if not isinstance(action, Agree)])
        if kind == STEP:
            self._conclude(step)

    def forget(self) -> None:
        """Forget the current step: it is over, or was abandoned before any other rank knew of it."""
        self.meeting = None
        self.begun = False

    def close(self) -> None:
        """Release all references to the framework."""
        self._framework, self._works, self.weights = Framework(), {}, None
        self.after_average = nothing
        self.forget()

    @contextmanager
    def others_waiting(self) -> Iterator[None]:
        """Report an exception inside to the other ranks, which would wait for the rest of an exchange."""
        try:
            yield
        except BaseException as error:
            self._session.process.interrupted(error)
            raise

    def _agree(self, step: int) -> None:
        framework, weights = self._framework, self.weights
        framework.check()
        self._note_step(step)
        argument = step_argument(self._exchange.key, step)
        if weights is not None and self._exchange.of_weights(step):
            kind, weight = AVERAGE, weights.weight(framework.weight)
            flags = weights.fingerprint | self._exchange.renews
        else:
            framework.begin()
            kind, weight, flags = STEP, framework.weight(), self._exchange.flags
        meeting = self._session.meet(kind, argument, weight=weight, flags=flags)
        self.begun = True
        self._met(kind, meeting, step)
        if kind == STEP and self._checks is not None:
            self._checks.compare(step, framework.weights)

    def _note_step(self, step: int) -> None:
        """Exchanges from now on belong to that step in the flight record."""
        flight = self._session.process.flight
        if flight is not None:
            flight.step = step

    def _met(self, kind: int, meeting: Meeting, step: int) -> None:
        """Note a meeting, in that step or after it."""
        self.meeting = meeting
        self._framework.met(kind, meeting, step)
        if self.weights is not None and kind == AVERAGE:
            self.weights.put()

    def _average(self, step: int) -> None:
        """Take the result of the exchange of weights after a step."""
        assert self.weights is not None
        assert self.meeting is not None
        self.weights.take(self.meeting, step)
        self._framework.averaged(AVERAGE)
        self._exchange.exchanged(self.meeting)
        self.forget()
        self.after_average()

    def _submit(self, submit: Submit) -> None:
        """Start the exchange of a complete bucket."""
        if self.meeting is None and not self.begun:  # pushes that are not merged have no meeting
            self._framework.check()
            self._note_step(submit.operation.step)
            self.weight = self._framework.weight()
            self._framework.begin()
        self.begun = True
        if self._checks is not None and self._checks.finite and submit.after is None:
            self._checks.look(*self._exchange.bucket(submit.operation))
        after = None if submit.after is None else self._works.pop(submit.after)
        started = self._exchange.start(submit.operation, self.meeting, submit.priority, after)
        self._works[submit.operation] = started
