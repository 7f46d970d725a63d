"""What the state machine of a step says, carried out: tickets, buckets and buffers of the step that is under way.

Owns the ticket exchange, what has been started of a step and not been waited for, and how much the step counts. Ranks
may count differently (rank i counts w_i / sum of w; one without batches left counts nothing): the ticket shows it, and
the progress thread corrects a bucket by w_i N / sum of w before it goes. Does not know when gradients come, nor when a
step begins: ``engine.step`` says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...engine.order import Work
from ...engine.step import Action, Agree, Apply, BucketPhase, Submit, Wait
from ...session.session import Session
from ...session.tickets import STEP, Meeting, step_argument
from ...training.exchange import BucketExchange
from .buffers import Buffers
from .hooks import Listeners


class Exchanging:
    """The exchange of one model's steps, one after the other.

    ``check`` raises where a step may not begin, ``weigh`` says how much this rank counts in it, and ``apply`` updates
    parameters, which schedules that cross iterations ask for.
    """

    def __init__(
        self,
        session: Session,
        exchange: BucketExchange,
        buffers: Buffers,
        first_key: int,
        listeners: Listeners,
        *,
        check: Callable[[], None],
        weigh: Callable[[], float],
        apply: Callable[[Apply], None],
    ) -> None:
        self._session, self._exchange, self._buffers, self._first_key = session, exchange, buffers, first_key
        self._listeners, self._check, self._weigh, self._apply = listeners, check, weigh, apply
        self.meeting: Meeting | None = None
        """What all have come to, where they agree on a step."""
        self.begun = False
        """Whether others wait for the rest of this step."""
        self.weight = 1.0
        """What the gradients of the last step that was pushed by itself count."""
        self._works: dict[BucketPhase, Work] = {}

    def do(self, actions: Sequence[Action]) -> None:
        """What the state machine says."""
        for action in actions:
            if isinstance(action, Submit):
                self._submit(action)
            elif isinstance(action, Agree):
                self._agree(action.step)
            elif isinstance(action, Wait):
                self._session.engine.wait(*[self._works.pop(operation) for operation in action.operations])
                self._exchange.staging.join()
            elif isinstance(action, Apply):
                self._apply(action)

    def take_part(self, meeting: Meeting) -> None:
        """Come to a step that the others make, of which this rank has no gradients."""
        self.meeting = meeting
        self._buffers.start(meeting)

    def finish_buffers(self) -> None:
        """Buffers are there when backward ends, whatever schedule gradients have."""
        self._buffers.finish()

    def forget(self) -> None:
        """The step is over, or was given up."""
        self.meeting = None
        self.begun = False

    def _agree(self, step: int) -> None:
        self._check()
        self._listeners.begin()
        argument, flags = step_argument(self._first_key, step), self._exchange.flags
        self.meeting = self._session.meet(STEP, argument, weight=self._weigh(), flags=flags)
        self.begun = True
        self._buffers.start(self.meeting)

    def _submit(self, submit: Submit) -> None:
        """A bucket is complete."""
        if self.meeting is None and not self.begun:  # nothing is agreed on where pushes are not merged
            self._check()
            self.weight = self._weigh()
            self._listeners.begin()
        self.begun = True
        after = None if submit.after is None else self._works.pop(submit.after)
        started = self._exchange.start(submit.operation, self.meeting, submit.priority, after)
        self._works[submit.operation] = started
