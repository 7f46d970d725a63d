"""Implements ``schedule=auto`` for one model: measures the first steps, chooses a schedule, and may choose again later.

    begun        like ``fixed``; these steps are not measured
    measuring    in buckets of all sizes: rank 0 times its layers and exchanges, every rank watches its script
    overlapping  the fastest schedule (``tuning.schedule_choice``) overlaps the exchange with the next forward pass
    waiting      the best schedule without such overlap runs for a number of steps, which doubles each time unless the
                 overlap before lasted longer
    watching     the same schedule runs, and every rank watches its script again
    trying       under ``auto(budget=...)``: instead of a prediction, layouts take turns for some steps each
    over         the choice is final: the strategy allows no overlap

Overlap with the next forward pass pays only if no rank's script reads gradients between backward and the optimizer's
step, changes them, calls the optimizer with a closure, or reads weights between two steps. Such a read would wait for
the exchange. Ranks watch for such reads (``deferred``) and report them in their tickets. Rank 0 chooses an overlapping
schedule if no rank reported a read in the measured or watched steps, and the best other schedule as soon as one rank
does. Rank 0 sends the choice with the layout, and the phase of every rank follows from it. Until the change, a read is
correct under the running schedule. A rank whose model or optimizer cannot defer updates reports that in every ticket.

Reads through tensors that share a parameter's memory cannot be detected. With such tensors no schedule overlaps.
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
from ...session.communicator import phases_of, planned
from ...session.layout import Lay, Layout
from ...session.tickets import STEP, Ticket
from ...strategy.strategy import Strategy
from ...training.exchange import REPLACES
from ...tuning.schedule_choice import Trials, candidates, choose_schedule, with_measuring_buckets, worth_a_trial
from .compiled import is_compiled
from .optimizer import defer_steps, end_deferred_steps
from .partial_optimizer import updates_alone
from .passes import TrainedReplica
from .staging import device_of
from .supported import check_deferred

log = logging.getLogger("syncline")

_UNTRIED = "; no other schedule was tried, since other buckets change the order in which the fastest algorithm adds"

_OBJECTS = 2
"""A ticket's flag: the rank cannot defer updates, or its script has read a value since the last ticket."""

_UNCOUNTED, _MEASURED = 2, 6
"""The numbers of steps before the measurement, in which code is loaded, and of measured steps."""

_PATIENCE = 100
"""The initial number of steps until scripts are watched again: a checkpoint reads all weights, but seldom."""

_BEGUN, _MEASURING, _OVERLAPPING, _WAITING, _WATCHING, _TRYING, _OVER = range(7)


class Choosing:
    """Chooses the schedule of the model of ``replica``. ``optimizer`` updates its weights; None if it is unknown."""

    def __init__(self, replica: TrainedReplica, optimizer: torch.optim.Optimizer | None) -> None:
        self._replica, self._optimizer = replica, optimizer
        self._phase, self._patience = _BEGUN, _PATIENCE
        self._steps = 0  # in this phase
        self._refused = False  # this rank cannot defer updates
        self._seen = False  # a rank has objected in this phase
        self._trials: Trials | None = None  # on rank 0, if the strategy has a budget for trials
        self._until_s = time.perf_counter() + replica.session.strategy.budget_s
        replica.exchange.measured = False
        replica.session.schedules.pop(replica.first_key, None)  # left by an earlier prepare of the same model

    @property
    def over(self) -> bool:
        """Whether the choice is final."""
        return self._phase == _OVER

    @property
    def _strategy(self) -> Strategy:
        """The run's strategy. A resumed run may change its codec (``Session.resume_codec``)."""
        return self._replica.session.strategy

    @property
    def _overlapping(self) -> Strategy | None:
        """A candidate strategy that overlaps with the next forward pass; None if there is none."""
        return next(filter(_overlaps, candidates(self._strategy, overlap=True)), None)

    # Between two tickets.

    def objects(self) -> bool:
        """Whether this rank cannot defer updates, or its script has read a value since the last call."""
        deferred = self._replica.deferred
        return self._refused or deferred is None or deferred.take_looked() or deferred.refused

    def flags(self) -> int:
        """The flags of this rank's next ticket."""
        watched = self._phase in (_MEASURING, _OVERLAPPING, _WATCHING, _TRYING)
        found = _OBJECTS if watched and self.objects() else 0
        if self._replica.session.rank == 0 and self._wants_another:
            found |= REPLACES
        return found

    @property
    def _wants_another(self) -> bool:
        """Whether rank 0 has to choose after the step that begins. The exchange itself asks after a measurement."""
        if self._seen and self._overlaps_now:
            return True
        if self._phase == _TRYING:
            return self._trials is not None and self._trials.ends
        wanted = {_BEGUN: _UNCOUNTED, _WAITING: self._patience, _WATCHING: _MEASURED}.get(self._phase)
        return wanted is not None and self._steps + 1 >= wanted

    def saw(self, tickets: Sequence[Ticket]) -> None:
        """Note the tickets of a finished step."""
        self._steps += 1
        self._seen |= any(ticket.kind == STEP and ticket.flags & _OBJECTS for ticket in tickets)
        if self._phase == _TRYING and self._trials is not None:
            self._trials.step_ended()

    # A new layout.

    def choose(
        self, layers: Sequence[Layer], cost: LinearCost | None, resumed: Layout | None, objected: bool, lay: Lay
    ) -> Layout:
        """Make rank 0's choice. ``objected``: a rank objects now. ``resumed``: the layout of a resumed state."""
        if resumed is not None and not (objected and self._overlaps_in(resumed)):
            return resumed
        if self._phase == _BEGUN and resumed is None:
            return with_measuring_buckets(self._strategy, lay)
        if self._phase == _WAITING and resumed is None:
            return self._replica.exchange.layout
        watched = self._phase in (_MEASURING, _WATCHING, _TRYING)
        overlap = watched and not (self._seen or objected)
        tries = self._trials is None and self._strategy.budget_s > 0
        keeps_bits = tries and self._replica.session.adds_in_one_order
        if self._phase == _MEASURING and keeps_bits:
            layouts = worth_a_trial(self._strategy, layers, cost, lay, overlap, self._keeps_bits, crowded=self._crowded)
            self._trials = Trials(layouts, self._until_s, time.perf_counter, self._overlaps_in)
        if self._trials is None:
            found = choose_schedule(self._strategy, layers, cost, lay, overlap, crowded=self._crowded)
            return replace(found, reason=f"{found.reason}{_UNTRIED}") if tries and not keeps_bits else found
        if self._phase not in (_MEASURING, _TRYING):
            return self._trials.best(overlap=overlap)
        if not overlap:
            self._trials.refuse_overlap()
        return self._trials.following()

    @property
    def _crowded(self) -> bool:
        """Whether computation and exchange compete for cores: there is one host, with fewer cores than processes.

        Messages between hosts, or over a shaped link, wait for the link and leave the cores free.
        """
        roll = self._replica.session.family[0].roll
        if roll is None or roll.hosts > 1 or not roll.crowded or device_of(self._replica.named).type != "cpu":
            return False
        link = self._strategy.transport.arguments
        return not (link.get("rate") or link.get("delay"))

    def _overlaps_in(self, layout: Layout) -> bool:
        return _overlaps(layout.strategy_in(self._strategy))

    def _keeps_bits(self, strategy: Strategy) -> bool:
        """Whether a schedule keeps the order of additions. With two phases it does if every algorithm has two phases.

        Otherwise a ring replaces the algorithm and adds in another order.
        """
        session = self._replica.session
        if strategy.schedule_object().phases == "whole" or session.world_size == 2:
            return True
        names = {session.strategy.architecture.name} if session.choice is None else session.choice.names
        return all(phases_of(planned(name, session.group)) is not None for name in names)

    def replaced(self) -> None:
        """Enter the phase that belongs to the layout, which has changed or was confirmed."""
        if self._phase == _OVERLAPPING and self._steps > self._patience // 2:  # the overlap has paid for the wait
            self._patience = _PATIENCE
        self._seen, self._steps = False, 0
        if self._replica.exchange.layout.trial:
            self._phase = _TRYING
            if self._replica.deferred is not None:
                self._replica.deferred.watches = not self._overlaps_now
            if self._trials is not None:
                self._trials.began()
        elif self._phase == _BEGUN:
            self._phase = _MEASURING
            self._watch()
            forward = self._overlapping is not None and not is_compiled(self._replica.model)
            self._replica.exchange.measure(_MEASURED, forward=forward)
        elif self._phase == _WAITING:
            self._phase, self._patience = _WATCHING, 2 * self._patience
            self._watch()
        else:
            self._settle()

    def resume(self, layout: Layout, measured: bool) -> None:
        """Prepare for the layout of a resumed run, which is about to replace the present one."""
        if measured and self._overlaps_in(layout):
            self._watch()

    def resumed(self, measured: bool) -> None:
        """Continue with the layout of a resumed run. If that run had not measured enough steps, measure again."""
        self._seen, self._steps = False, 0
        if measured:
            self._settle()
        else:
            self._phase = _BEGUN
            self._replica.exchange.measured = False
            self._detach()

    @property
    def _overlaps_now(self) -> bool:
        return self._replica.exchange.schedule.apply != "step"

    def _settle(self) -> None:
        deferred = self._replica.deferred
        if deferred is not None and self._overlaps_now:
            self._phase, deferred.watches = _OVERLAPPING, False
        else:
            self._phase = _OVER if self._overlapping is None else _WAITING
            self._detach()
        session = self._replica.session
        log.info("%s: schedule=auto: %s", session.name(session.index), self._replica.exchange.layout.reason)

    def _watch(self) -> None:
        """Watch from now on whether the script reads values that could be in flight."""
        strategy = self._overlapping
        if strategy is None or self._optimizer is None or self._replica.deferred is not None:
            return
        self._refused = not updates_alone(self._optimizer) or is_compiled(self._replica.model)
        if not self._refused:
            try:
                check_deferred(strategy, self._optimizer, self._replica.selection)
                defer_steps(self._replica, self._optimizer, gives_way=True)
            except UsageError:
                self._refused = True

    def _detach(self) -> None:
        if self._replica.deferred is not None:
            self._replica.deferred.detach()
            self._replica.deferred = None
            end_deferred_steps(self._optimizer)


def _overlaps(strategy: Strategy) -> bool:
    return strategy.schedule_object().apply != "step"
