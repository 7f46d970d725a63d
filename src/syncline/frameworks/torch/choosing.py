"""``schedule=auto`` for one model: what runs is chosen when the first steps have been measured, and may change back.

    begun       as ``fixed``, for steps that count for nothing
    measuring   in buckets of all sizes; rank 0 times its layers and exchanges, and every rank watches its script
    crossing    the fastest ends its steps in the next iteration (``tuning.schedule_choice`` predicts which it is)
    waiting     the best of the others runs, for some time; twice as long each time, unless iterations have been crossed
                for longer than that
    watching    it does, and every rank watches its script again
    trying      in place of a prediction: layouts run in turn for some steps each, under ``auto(budget=...)``
    over        the best runs, and none that crosses iterations goes with the strategy

Steps may end in the next iteration only where that pays: where no rank looks at gradients between backward and the
optimizer's step, changes them, calls the optimizer with a closure, or looks at weights between two steps. Ranks watch
for it as they would complete what is looked at (``overlap``), and their tickets say what they have seen. Rank 0
chooses such a schedule if no rank has seen anything in the steps that were measured, or watched, and the best of the
others when one does later. Every rank is told with the layout, and goes by that alone: all phases follow from it, and
whatever is looked at before is right under the schedule that runs. Some ranks, models and optimizers can make no such
steps; their tickets say so all along.

What nobody sees are tensors that share the memory of a parameter and were made before. Where there are any, iterations
are not crossed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...costs.plans import LinearCost
from ...errors import UsageError
from ...nouns import Layer
from ...session.communicator import has_phases, planned
from ...session.layout import Lay, Layout
from ...session.tickets import STEP, Ticket
from ...strategy.strategy import Strategy
from ...training.exchange import REPLACES
from ...tuning.schedule_choice import Trials, candidates, choose_schedule, with_measuring_buckets, worth_a_trial
from .compiled import is_compiled
from .deferred import updates_alone
from .optimizer import defer_steps, end_deferred_steps
from .passes import TrainedReplica
from .staging import device_of
from .supported import check_crossing

log = logging.getLogger("syncline")

_UNTRIED = "; no other schedule was tried, since other buckets change the order in which the fastest algorithm adds"

_OBJECTS = 2
"""Flag of any rank's ticket: it cannot cross iterations, or its script has looked since the last one."""

_UNCOUNTED, _MEASURED = 2, 6
"""Steps before those that are measured, which load what is needed, and those."""

_PATIENCE = 100
"""Steps until scripts are watched again, at first: a checkpoint looks at all weights, and then nobody for long."""

_BEGUN, _MEASURING, _CROSSING, _WAITING, _WATCHING, _TRYING, _OVER = range(7)


class Choosing:
    """Chooses the schedule of the model of ``replica``; ``optimizer`` updates its weights, if one is known."""

    def __init__(self, replica: TrainedReplica, optimizer: torch.optim.Optimizer | None) -> None:
        self._replica, self._optimizer = replica, optimizer
        self._phase, self._patience = _BEGUN, _PATIENCE
        self._steps = 0  # in this phase
        self._refused = False  # by this rank
        self._seen = False  # that some rank objects, in this phase
        self._trials: Trials | None = None  # of rank 0, where the strategy has a budget for some
        self._until_s = time.perf_counter() + replica.session.strategy.budget_s
        replica.exchange.measured = False
        replica.session.schedules.pop(replica.first_key, None)  # of the same model, prepared before

    @property
    def over(self) -> bool:
        """Whether nothing will be chosen any more."""
        return self._phase == _OVER

    @property
    def _strategy(self) -> Strategy:
        """What the schedule goes with; a run that is resumed may bring another codec (``Session.resume_codec``)."""
        return self._replica.session.strategy

    @property
    def _crossed(self) -> Strategy | None:
        """One of the strategies with which iterations would be crossed, if any."""
        return next(filter(_crosses, candidates(self._strategy, crossing=True)), None)

    # Between two tickets.

    def objects(self) -> bool:
        """Whether this rank cannot cross iterations, or its script has looked since it was asked last."""
        crossing = self._replica.crossing
        return self._refused or crossing is None or crossing.take_looked() or crossing.refused

    def flags(self) -> int:
        """What this rank's ticket says."""
        watched = self._phase in (_MEASURING, _CROSSING, _WATCHING, _TRYING)
        found = _OBJECTS if watched and self.objects() else 0
        if self._replica.session.rank == 0 and self._wants_another:
            found |= REPLACES
        return found

    @property
    def _wants_another(self) -> bool:
        """Whether rank 0 shall choose after the step that begins; the last one that is measured says it by itself."""
        if self._seen and self._crosses_now:
            return True
        if self._phase == _TRYING:
            return self._trials is not None and self._trials.ends
        wanted = {_BEGUN: _UNCOUNTED, _WAITING: self._patience, _WATCHING: _MEASURED}.get(self._phase)
        return wanted is not None and self._steps + 1 >= wanted

    def saw(self, tickets: Sequence[Ticket]) -> None:
        """A step is over."""
        self._steps += 1
        self._seen |= any(ticket.kind == STEP and ticket.flags & _OBJECTS for ticket in tickets)
        if self._phase == _TRYING and self._trials is not None:
            self._trials.step_ended()

    # Another layout.

    def choose(
        self, layers: Sequence[Layer], cost: LinearCost | None, resumed: Layout | None, objected: bool, lay: Lay
    ) -> Layout:
        """Rank 0's choice; ``objected`` says whether a rank does now, ``resumed`` what a run before went on with."""
        if resumed is not None and not (objected and _crosses(resumed.strategy_in(self._strategy))):
            return resumed
        if self._phase == _BEGUN and resumed is None:
            return with_measuring_buckets(self._strategy, lay)
        if self._phase == _WAITING and resumed is None:
            return self._replica.exchange.layout
        watched = self._phase in (_MEASURING, _WATCHING, _TRYING)
        crossing = watched and not (self._seen or objected)
        tries = self._trials is None and self._strategy.budget_s > 0
        keeps_bits = tries and self._replica.session.adds_in_one_order
        if self._phase == _MEASURING and keeps_bits:
            layouts = worth_a_trial(
                self._strategy, layers, cost, lay, crossing, self._keeps_bits, crowded=self._crowded
            )
            self._trials = Trials(layouts, self._until_s, time.perf_counter, self._crossed_by)
        if self._trials is None:
            found = choose_schedule(self._strategy, layers, cost, lay, crossing, crowded=self._crowded)
            return replace(found, reason=f"{found.reason}{_UNTRIED}") if tries and not keeps_bits else found
        if self._phase not in (_MEASURING, _TRYING):
            return self._trials.best(crossing=crossing)
        if not crossing:
            self._trials.refuse_crossing()
        return self._trials.following()

    @property
    def _crowded(self) -> bool:
        """Whether computing and exchanging take turns on cores: on one host with fewer of them than processes.

        Messages between hosts, or over a link that is slowed down, wait for the link and leave the cores alone.
        """
        roll = self._replica.session.family[0].roll
        if roll is None or roll.hosts > 1 or not roll.crowded or device_of(self._replica.named).type != "cpu":
            return False
        link = self._strategy.transport.arguments
        return not (link.get("rate") or link.get("delay"))

    def _crossed_by(self, layout: Layout) -> bool:
        return _crosses(layout.strategy_in(self._strategy))

    def _keeps_bits(self, strategy: Strategy) -> bool:
        """Whether a schedule leaves the order of additions: one in two phases does where every algorithm has these.

        Where an algorithm has none a ring takes its place, which adds in another order.
        """
        session = self._replica.session
        if strategy.schedule_object().phases == "whole" or session.world_size == 2:
            return True
        names = {session.strategy.architecture.name} if session.choice is None else session.choice.names
        return all(has_phases(planned(name, session.group)) for name in names)

    def replaced(self) -> None:
        """The layout is another one, or was found to be best again."""
        if self._phase == _CROSSING and self._steps > self._patience // 2:  # longer than ranks have waited for it
            self._patience = _PATIENCE
        self._seen, self._steps = False, 0
        if self._replica.exchange.layout.trial:
            self._phase = _TRYING
            if self._replica.crossing is not None:
                self._replica.crossing.watches = not self._crosses_now
            if self._trials is not None:
                self._trials.began()
        elif self._phase == _BEGUN:
            self._phase = _MEASURING
            self._watch()
            forward = self._crossed is not None and not is_compiled(self._replica.model)
            self._replica.exchange.measure(_MEASURED, forward=forward)
        elif self._phase == _WAITING:
            self._phase, self._patience = _WATCHING, 2 * self._patience
            self._watch()
        else:
            self._settle()

    def resume(self, layout: Layout, measured: bool) -> None:
        """A layout of a run before is about to take the place of this one."""
        if measured and _crosses(layout.strategy_in(self._strategy)):
            self._watch()

    def resumed(self, measured: bool) -> None:
        """It has; a run that had not measured enough begins to."""
        self._seen, self._steps = False, 0
        if measured:
            self._settle()
        else:
            self._phase = _BEGUN
            self._replica.exchange.measured = False
            self._detach()

    @property
    def _crosses_now(self) -> bool:
        return self._replica.exchange.schedule.apply != "step"

    def _settle(self) -> None:
        crossing = self._replica.crossing
        if crossing is not None and self._replica.exchange.schedule.apply != "step":
            self._phase, crossing.watches = _CROSSING, False
        else:
            self._phase = _OVER if self._crossed is None else _WAITING
            self._detach()
        session = self._replica.session
        log.info("%s: schedule=auto: %s", session.name(session.index), self._replica.exchange.layout.reason)

    def _watch(self) -> None:
        """See from now on whether the script looks at what could be under way."""
        crossed = self._crossed
        if crossed is None or self._optimizer is None or self._replica.crossing is not None:
            return
        self._refused = not updates_alone(self._optimizer) or is_compiled(self._replica.model)
        if not self._refused:
            try:
                check_crossing(crossed, self._optimizer, self._replica.selection)
                defer_steps(self._replica, self._optimizer, gives_way=True)
            except UsageError:
                self._refused = True

    def _detach(self) -> None:
        if self._replica.crossing is not None:
            self._replica.crossing.detach()
            self._replica.crossing = None
            end_deferred_steps(self._optimizer)


def _crosses(strategy: Strategy) -> bool:
    return strategy.schedule_object().apply != "step"
