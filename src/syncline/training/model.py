"""One worker's steps with one model, in every framework: what the state machine of a step says is carried out here.

``engine.step`` decides what is agreed on, handed over, waited for, applied and averaged, and in which order.
``exchange`` knows how buckets travel. ``Framework`` is what differs between frameworks. Owns the ticket of the step
that is under way, what was handed over and has not been waited for, and whether the others wait for the rest of the
step. Ranks may count differently (rank i counts w_i / sum of w; one without batches left counts nothing): the ticket
shows it.

Does not know when a gradient is there, nor when the optimizer is called. An adapter tells ``machine`` of that, and has
``do`` carry out what it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..engine.order import Work
from ..engine.step import Action, Agree, Apply, BucketPhase, Steps, Submit, Wait
from ..session.session import Session
from ..session.tickets import AVERAGE, STEP, Meeting, step_argument
from .exchange import BucketExchange


def _nothing(*_: object) -> None:
    pass


def _all_alike(_: int) -> float:
    return 1.0


def _no_mark() -> int:
    return 0


@dataclass(frozen=True)
class Framework:
    """What a framework has to do in the steps of a model; one that leaves a part out has nothing to do there.

    A ``kind`` is that of the ticket: STEP where gradients are exchanged, AVERAGE where weights are.
    """

    check: Callable[[], None] = _nothing
    """Raises where nothing may be exchanged now."""
    begin: Callable[[], None] = _nothing
    """A step begins whose gradients are exchanged; what they count is known where pushes are not merged."""
    weight: Callable[[int], float] = _all_alike
    """How much this rank counts, by kind."""
    fingerprint: Callable[[], int] = _no_mark
    """What has to be the same on all workers for their weights to be averaged; 32 bits."""
    met: Callable[[int, Meeting, int], None] = _nothing
    """The ticket of a kind is out, in that step or after it: buckets of weights are filled, and buffers may go."""
    apply: Callable[[Apply], None] = _nothing
    """The weights of these buckets are to be updated."""
    average: Callable[[int], None] = _nothing
    """The exchange of weights after a step has come: they are what follows from it."""


class TrainedModel:
    """A model of so many ``tensors``, whose buckets ``exchange`` moves, from its first step until ``close``."""

    def __init__(self, session: Session, exchange: BucketExchange, tensors: int, framework: Framework) -> None:
        self._session, self._exchange, self._tensors, self._framework = session, exchange, tensors, framework
        self.meeting: Meeting | None = None
        """What all have come to, where they agree on a step."""
        self.begun = False
        """Whether others wait for the rest of this step."""
        self.weight = 1.0
        """What the gradients of the last step that was pushed by itself count."""
        self._works: dict[BucketPhase, Work] = {}
        self.machine = self._machine(0)
        """Which step it is, and how far it has come."""

    def resume_at(self, step: int) -> None:
        """Go on from a step, counted from 0, of which nothing has begun, by the layout and the schedule of now."""
        self.machine = self._machine(step)

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
                self._framework.average(action.step)
                self.forget()

    def shadow(self, kind: int, meeting: Meeting, step: int) -> None:
        """Take part in what the others exchange in a step of theirs, or after it, with what lies in the buckets.

        This rank makes no such step. All have met already.
        """
        self.meeting = meeting
        self._framework.met(kind, meeting, step)
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
        self._framework, self._works = Framework(), {}
        self.forget()

    def _agree(self, step: int) -> None:
        framework, kind = self._framework, AVERAGE if self._exchange.of_weights(step) else STEP
        framework.check()
        if kind == STEP:
            framework.begin()
            flags = self._exchange.flags
        else:
            flags = framework.fingerprint()
        argument = step_argument(self._exchange.key, step)
        self.meeting = self._session.meet(kind, argument, weight=framework.weight(kind), flags=flags)
        self.begun = True
        framework.met(kind, self.meeting, step)

    def _submit(self, submit: Submit) -> None:
        """A bucket is complete."""
        if self.meeting is None and not self.begun:  # nothing is agreed on where pushes are not merged
            self._framework.check()
            self.weight = self._framework.weight(STEP)
            self._framework.begin()
        self.begun = True
        after = None if submit.after is None else self._works.pop(submit.after)
        started = self._exchange.start(submit.operation, self.meeting, submit.priority, after)
        self._works[submit.operation] = started
