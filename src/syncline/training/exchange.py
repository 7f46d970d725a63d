"""How the buckets of a model travel, in every framework, and how they are cut anew between two steps.

``BucketExchange`` owns what is prepared of each bucket (order, key, lane), the codec's memory of it, by which share it
is weighed, and who takes it: the strategy's architecture, owners of the weights, or a plan that mixes some workers'.
The sync mode says, step by step, whether gradients lie in the buckets or weights. Each of the two has a storage, and a
codec's memory, of its own. Does not know when a bucket is complete (``engine.step``), nor what a tensor is.

How tensors travel is a layout: buckets, the storage that is cut into them, and the codec's memory of them. Another one
may take its place between two steps (``session.layout``): the storage stays, with tensors where they are in it, and
is cut into other buckets. That happens after steps in which rank 0 has timed the layers, or when it chooses another
schedule (``Chooser``), which its ticket says, or as a checkpoint has it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Protocol

from ..collectives import Collective
from ..compression.compression import Compression
from ..compression.saved import Saved
from ..costs.plans import LinearCost, fit_line
from ..engine.order import CodedOrder, Exchanger, Lane, Order, When, Work
from ..engine.step import BucketPhase, Phase
from ..errors import MismatchError, UsageError
from ..kernels import cpu
from ..nouns import Bucket, Layer
from ..plans.messages import Program
from ..schedules import Cost, PushAndPull
from ..session.communicator import Array
from ..session.layout import (
    BUCKETS,
    Lay,
    Layout,
    Passed,
    Recompressing,
    agree_on_layout,
    gather_saved,
    place_tensors,
    push_nothing,
)
from ..session.session import Session
from ..session.tickets import JOINED, STEP, Meeting, Ticket, step_of
from ..strategy.strategy import Strategy
from ..sync import Averages, exchanges_gradients
from .memory import Staging, Stored

REPLACES = 1
"""Flag of rank 0's ticket: another layout takes the place of this one after the step."""

_RULE_AT = 32
"""Where the digest of the optimizer's rule begins in a ticket's flags."""


class MeasuresLayers(Protocol):
    """What times the layers of a model in some training steps."""

    @property
    def last(self) -> bool:
        """Whether the step that begins is the last one to be measured."""
        ...

    def produced(self, tensor: int) -> None:
        """A gradient is complete."""
        ...

    def end_step(self) -> None:
        """All gradients of a step have come."""
        ...

    def forget(self) -> None:
        """What has come since the last step is of none."""
        ...

    def of(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        """The layers with their times."""
        ...

    def detach(self) -> None:
        """Measure no more."""
        ...


class Chooser(Protocol):
    """What chooses the schedule, where the strategy leaves it open; all workers have one, and rank 0's decides."""

    @property
    def over(self) -> bool:
        """Whether nothing will be chosen any more."""
        ...

    def flags(self) -> int:
        """What this rank's ticket says."""
        ...

    def objects(self) -> bool:
        """Whether this rank cannot have steps end in the next iteration."""
        ...

    def saw(self, tickets: Sequence[Ticket]) -> None:
        """A step is over, whose tickets these are."""
        ...

    def choose(
        self, layers: Sequence[Layer], cost: LinearCost | None, resumed: Layout | None, objected: bool, lay: Lay
    ) -> Layout:
        """Rank 0's choice; ``objected`` says whether a rank does now, ``resumed`` what a run before went on with."""
        ...

    def replaced(self) -> None:
        """The layout is another one, or was found to be best again."""
        ...

    def resume(self, layout: Layout, measured: bool) -> None:
        """A layout of a run before is about to take the place of this one."""
        ...

    def resumed(self, measured: bool) -> None:
        """It has; a run that had not measured enough begins to."""
        ...


class BucketTimes:
    """Measures the exchanges of buckets; called in the thread that drives.

    An exchange takes from where it begins here to its end. The shortest of the steps counts: in it nobody was waited
    for.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun: dict[int, float] = {}
        self._shortest_s: dict[int, float] = {}

    def begin(self, number: int) -> None:
        """The exchange of a bucket begins."""
        self._begun[number] = self._clock()

    def end(self, number: int) -> None:
        """It is over."""
        spent_s = self._clock() - self._begun.pop(number)
        self._shortest_s[number] = min(spent_s, self._shortest_s.get(number, spent_s))

    def cost(self, buckets: Sequence[Bucket]) -> LinearCost | None:
        """What an exchange takes by its bytes, as far as these buckets show; None where none was measured."""
        measured = sorted(self._shortest_s.items())
        return fit_line([buckets[number].nbytes for number, _ in measured], [seconds for _, seconds in measured])


def storages_of(strategy: Strategy) -> int:
    """How many storages a model's tensors have: one, or two.

    One for gradients that are made and one for those that are under way, where they are used a step later; or one for
    how weights differ, where gradients, which scripts may look at, are in another one.
    """
    mode = strategy.sync_mode()
    both = isinstance(mode, Averages) and exchanges_gradients(mode)
    return 2 if both or strategy.schedule_object().apply == "next_step" else 1


class BucketExchange:
    """The buckets of one model in ``storages``, as ``storages_of`` counts them; ``key`` begins the range of their keys.

    ``rule`` says what the optimizer is, in words that have to be the same on all workers that make a step together;
    ``measuring`` makes what times the layers in so many steps, forward passes too if it is told so. All processes make
    it together.
    """

    def __init__(
        self,
        session: Session,
        key: int,
        layout: Layout,
        storages: Sequence[Stored],
        staging: Staging,
        *,
        rule: Callable[[], str] | None = None,
        measuring: Callable[[int, bool], MeasuresLayers] | None = None,
    ) -> None:
        self.session, self.key, self.layout, self.storages, self.staging = session, key, layout, storages, staging
        self._rule, self._measuring = rule, measuring
        self.schedule, self.mode = session.strategy.schedule_object(), session.strategy.sync_mode()
        self._averages = self.mode if isinstance(self.mode, Averages) else None
        self._compressions: list[Compression] = []  # of each storage, where there is a codec
        self._reduced: dict[int, Work] = {}  # the last reduction of each bucket, where steps overlap
        self._orders: dict[tuple[int, int, Phase], Order | CodedOrder] = {}  # by storage, bucket and phase
        self._planned, self._chosen = session.strategy, session.choice  # what they run
        self._checked: Meeting | None = None  # the last one of which all came with the same rule
        self.compress()
        self._exchanges = 0  # in this layout
        self._shown: Meeting | None = None  # of the last step, where what rank 0 tells in it counts
        self._replaces = False
        self.measured = self.schedule.measures == 0
        """Whether the schedule asks for no other layout any more."""
        self.times: MeasuresLayers | None = None
        """What measures the layers, on rank 0 while it does."""
        self._costs: BucketTimes | None = None
        self._pull_costs: BucketTimes | None = None  # the same where weights are pulled, and have not come with that
        self._lanes = _lanes(self.schedule.in_flight)
        if not self.measured:
            self.measure(self.schedule.measures, forward=self.schedule.apply == "layer")  # others do not ask for it

    choosing: Chooser | None = None
    """What chooses the schedule, where the strategy leaves it open."""

    program: Callable[[int], Program] | None = None
    """Gives what exchanges weights after a step in place of the strategy's architecture."""

    owners: Exchanger | None = None
    """Takes the buckets where others own the weights."""

    on_replacing: Callable[[], Callable[[], None]] | None = None
    """Called when another layout is about to take the place of this one; what it gives is called when it has."""

    @property
    def compression(self) -> Compression | None:
        """The codec's memory; None where buckets travel as they are."""
        return self._compressions[0] if self._compressions else None

    @property
    def of_differences(self) -> Compression | None:
        """The codec's memory of how weights differ, where it has another one of gradients."""
        return self._compressions[1] if self._averages is not None and len(self._compressions) > 1 else None

    def compress(self) -> None:
        """Compress as the session's strategy says, with a memory that is empty; between steps."""
        arrays = self.storages[0].arrays
        self._compress(self.session.compression(self.layout.layers, self.layout.buckets, arrays))

    def _compress(self, compression: Compression | None) -> None:
        others, buckets = self.storages[1:], self.layout.buckets
        if compression is None:
            self._compressions = []
        elif self._averages is not None:  # what is left of gradients is nothing that weights differ by
            self._compressions = [compression, *(compression.fresh(buckets, other.arrays) for other in others)]
        else:
            self._compressions = [compression, *(compression.beside(other.arrays) for other in others)]
        self._reduced, self._orders = {}, {}

    def close(self) -> None:
        """Nothing travels any more; tensors keep their values."""
        self._measure_no_more()
        self._reduced, self._orders = {}, {}
        self.staging.close()

    # Exchange.

    def place(self, step: int) -> int:
        """The number of the storage that has the gradients of a step, or how weights differ after it."""
        if self._averages is not None:
            return len(self.storages) - 1 if self._averages.averages(step) else 0
        return step % len(self.storages)

    def of_weights(self, step: int) -> bool:
        """Whether it is weights that are exchanged, after that step; gradients are not then, in it."""
        return self._averages is not None and self._averages.averages(step)

    def start(self, operation: BucketPhase, meeting: Meeting | None, priority: float, after: Work | None) -> Work:
        """A bucket is complete: copy it down where it lives elsewhere, exchange it, copy it up.

        In two phases the first begins with the copy down, and the second, which goes behind it, ends with the copy up.
        What is pushed to those who hold the weights does not come back.
        Without a meeting there is nothing to agree on in the step.
        """
        place, staging = self.place(operation.step), self.staging
        gate = after if after is not None or meeting is None else meeting.work
        if staging.device is None:
            return self._exchange(operation, place, meeting, gate, priority)
        pair, label = self.storages[place].pair(operation.bucket), f"bucket {operation.bucket}"
        if after is None:
            gate = staging.down(pair, gate, label)
        work = self._exchange(operation, place, meeting, gate, priority)
        stays = operation.phase == "reduce_scatter" or self.owners is not None
        return work if stays else staging.up(pair, work, label)

    def _exchange(
        self, operation: BucketPhase, place: int, meeting: Meeting | None, gate: Work | None, priority: float
    ) -> Work:
        before = None
        if meeting is not None and operation.phase != "all_gather":
            before = partial(self._check_and_weigh, self.storages[place].arrays[operation.bucket], meeting)
        when = When(gate, before, self._lanes[operation.phase], priority)
        if self._costs is not None and operation.phase != "all_gather":
            return self._timed(self._costs, operation, place, when)
        return self._begin(operation, place, when)

    def _check_and_weigh(self, array: Array, meeting: Meeting) -> None:
        """In the thread that drives, when the tickets have come: a bucket may go, as much as this rank counts."""
        if self._rule is not None and meeting is not self._checked:
            self._check_rule(meeting)
        if (share := meeting.share()) != 1.0:
            cpu.weigh(array, share)

    def _timed(self, costs: BucketTimes, operation: BucketPhase, place: int, when: When) -> Work:
        """Measure the exchange, without what comes before."""

        def begin() -> None:
            if when.before is not None:
                when.before()
            costs.begin(operation.bucket)

        work = self._begin(operation, place, when._replace(before=begin))
        return self.session.engine.then(work.label, [work], partial(costs.end, operation.bucket))

    def pull(self, number: int, start: Callable[[int, When], Work], priority: float) -> Work:
        """Pull a bucket's new weights, as ``start`` does; in steps that are measured one exchange follows the other."""
        if self.measured:
            return start(number, When(priority=priority))
        lane, costs = self._lanes["allreduce"], self._pull_costs
        if costs is None:
            return start(number, When(lane=lane, priority=priority))
        work = start(number, When(before=partial(costs.begin, number), lane=lane, priority=priority))
        return self.session.engine.then(work.label, [work], partial(costs.end, number))

    def _begin(self, operation: BucketPhase, place: int, when: When) -> Work:
        number = operation.bucket
        if self.owners is not None:
            return self.owners.start(number, when)
        order, before = self._order(operation, place), self._reduced.get(number)
        if before is not None and not before.done:  # what a codec has left of the step before goes into this one
            gate = before if when.gate is None else self.session.engine.then(order.label, [when.gate, before])
            when = when._replace(gate=gate)
        work = self.session.engine.start(order, when)
        if len(self._compressions) > 1:
            self._reduced[number] = work
        return work

    def plan(self) -> None:
        """Prepare all orders as the session's strategy says now: what it cannot run is refused here, not in a step."""
        self._orders, self._planned, self._chosen = {}, self.session.strategy, self.session.choice
        phases: tuple[Phase, ...] = ("allreduce",)
        if self.schedule.phases == "split":
            phases = ("reduce_scatter", "all_gather")
        if self.owners is None:
            places, numbers = range(len(self.storages)), range(len(self.layout.buckets))
            self._orders = {what: self._prepared(*what) for what in product(places, numbers, phases)}

    def _order(self, operation: BucketPhase, place: int) -> Order | CodedOrder:
        """What exchanges a bucket, made once for what runs; but where weights go another way after every step."""
        step, number, phase = operation
        session = self.session
        if self.program is not None and not self._compressions and self.of_weights(step):
            return self._plain(place, number, phase, self.program(step))
        if self._planned is not session.strategy or self._chosen is not session.choice:
            self._orders, self._planned, self._chosen = {}, session.strategy, session.choice
        order = self._orders.get((place, number, phase))
        if order is None:
            order = self._orders[place, number, phase] = self._prepared(place, number, phase)
        return order

    def _prepared(self, place: int, number: int, phase: Phase) -> Order | CodedOrder:
        session = self.session
        if self._compressions:
            key, label = self._key(place, number, phase), self.layout.labels[number]
            return session.coded_order(self._compressions[place], number, key, label)
        nbytes = self.storages[place].arrays[number].nbytes
        if phase == "allreduce":
            return self._plain(place, number, phase, session.bucket_program(nbytes))
        return self._plain(place, number, phase, session.bucket_phase_program(phase, nbytes))

    def _plain(self, place: int, number: int, phase: Phase, program: Program | Collective) -> Order:
        label = self.layout.labels[number]
        if phase != "allreduce":
            label = f"{label}, {phase.replace('_', '-')}"
        return Order(program, self.storages[place].arrays[number], self._key(place, number, phase), label)

    def _key(self, place: int, number: int, phase: Phase) -> int:
        """Of two phases of a bucket, and of two steps, both may be under way."""
        turn = place if self._averages is None else 0  # weights are waited for at once
        return self.key + number + BUCKETS * (2 * turn + (phase == "all_gather"))

    # What all workers update by.

    def _check_rule(self, meeting: Meeting) -> None:
        """Raise MismatchError where a worker that makes the step updates by another rule than this one does."""
        tickets = meeting.tickets()
        mine = tickets[self.session.rank]
        for rank, ticket in enumerate(tickets):  # flags of one that has no batches left say something else
            if JOINED not in (mine.kind, ticket.kind) and ticket.flags >> _RULE_AT != mine.flags >> _RULE_AT:
                raise self._parted(rank, step_of(ticket))
        self._checked = meeting

    def _parted(self, rank: int, step: int) -> MismatchError:
        assert self._rule is not None
        other, me = self.session.name(rank), self.session.name(self.session.rank)
        text = f"{other} updates with other values in step {step} than {me}, which has {self._rule()}"
        return MismatchError(self.session.titled(f"{text}: set the optimizer's attributes alike on all workers"))

    # Another layout.

    @property
    def flags(self) -> int:
        """What this rank's ticket says of the layout, and of what updates the weights."""
        found = REPLACES if self.times is not None and self.times.last else 0
        if self.choosing is not None:
            found |= self.choosing.flags()
        if self._rule is not None:
            found |= zlib.crc32(self._rule().encode()) << _RULE_AT
        return found

    def exchanged(self, meeting: Meeting | None) -> None:
        """A step is over, in which rank 0 may tell that another layout is wanted."""
        self._exchanges += 1
        watches = self.choosing is not None and not self.choosing.over
        if watches or not self.measured:
            self._shown = meeting

    @property
    def replaces(self) -> bool:
        """Whether another layout has to take the place of this one before the next exchange; between two steps."""
        if self._shown is not None:
            meeting, self._shown = self._shown, None
            self.session.engine.wait(*([] if meeting.work is None else [meeting.work]))
            tickets = meeting.tickets()
            self._replaces = tickets[0].kind == STEP and bool(tickets[0].flags & REPLACES)
            if self.choosing is not None:
                self.choosing.saw(tickets)
        return self._replaces

    def replace_layout(self) -> None:
        """Go on with the buckets that the schedule makes of measured times, or with another schedule's.

        Between steps; all workers call it together, and rank 0's count.
        """
        layers = self.layout.layers if self.times is None else self.times.of(self.layout.layers)
        buckets = self.layout.buckets
        cost = self.layout.cost if self._costs is None else self._costs.cost(buckets)
        pull = None if self._pull_costs is None else self._pull_costs.cost(buckets)
        self._measure_no_more()
        self._replace(Passed(self._exchanges, self._codec_step), layers, cost, choosing=self.choosing, pull=pull)
        if self.choosing is not None:
            self.choosing.replaced()

    def resume_with(self, layout: Layout, measured: bool) -> None:
        """Go on with the buckets that a run before had, and measure where that one still did; all workers call it.

        Raises UsageError for those that do not fit.
        """
        self._fits(layout.buckets)
        if self.choosing is not None:
            self.choosing.resume(layout, measured)
        if not layout.travels_like(self.layout) or layout.schedule != self.layout.schedule:
            passed = Passed(self._exchanges, self._codec_step)
            self._replace(passed, layout.layers, layout.cost, layout, self.choosing)
        if self.choosing is not None:
            self._measure_no_more()
            self.choosing.resumed(measured)
        elif measured:
            self._measure_no_more()
        elif self.measured:
            self.measure(self.schedule.measures, forward=self.schedule.apply == "layer")

    def saved(self) -> dict[str, list[Saved]]:
        """What every worker's codec has to keep in a checkpoint, in rank order, of gradients and of differences.

        All workers call it together. A codec that keeps nothing is not in it.
        """
        return {
            what: gather_saved(self.session, one.saved())
            for what, one in self._memories.items()
            if one is not None and one.keeps
        }

    def resume(self, step: int, saved: Mapping[str, Sequence[Saved] | None]) -> None:
        """Go on from that step, counted from 0, with what ``saved`` gave; all workers call it together."""
        self._begin_at(step)
        if self.of_differences is not None:
            self.of_differences.resume_at(0)
        for what, one in self._memories.items():
            if one is not None:
                kept = saved.get(what)
                one.forget() if kept is None else one.load(kept)

    @property
    def _memories(self) -> dict[str, Compression | None]:
        return {"codec": self.compression, "differences": self.of_differences}

    def _begin_at(self, step: int) -> None:
        """Servers have posted what the first step of all begins with: where its payloads are others, all begin anew."""
        if self.compression is not None and self.compression.warms_up and self.session.group.servers:
            self._replace(Passed(self._exchanges, step, anew=True), self.layout.layers, chosen=self.layout)
        elif self.compression is not None:
            self.compression.resume_at(step)

    @property
    def _codec_step(self) -> int:
        return 0 if self.compression is None else self.compression.step

    def _replace(
        self,
        passed: Passed,
        layers: Sequence[Layer],
        cost: LinearCost | None = None,
        chosen: Layout | None = None,
        choosing: Chooser | None = None,
        pull: LinearCost | None = None,
    ) -> None:
        before, session = self.layout, self.session
        lay_out = None if self.on_replacing is None else self.on_replacing()
        both: Cost | None = cost
        if cost is not None and pull is not None:  # predicted as if one came behind the other
            both, cost = PushAndPull(cost, pull), cost + pull
        choose = None if choosing is None else partial(choosing.choose, layers, cost, chosen)
        kept = before if choosing is None else replace(before, cost=cost)  # where none can be chosen
        self.layout = agree_on_layout(
            session,
            layers,
            self.key,
            both,
            chosen,
            choose=choose,
            objects=choosing is not None and choosing.objects(),
            passed=passed,
            before=kept,
            fits=self._fits,
        )
        running = self.layout.strategy_in(session.strategy)
        self.schedule = running.schedule_object()
        self._lanes = _lanes(self.schedule.in_flight)
        if self.layout.schedule:
            session.schedules[self.key] = running, self.layout.reason
        if self.layout.travels_like(before) and not passed.anew:
            return
        compression = Recompressing(session, self.compression)
        program = session.bucket_program if self.owners is None else session.push_program
        push_nothing(session, program, before.buckets, self.compression, self.key)
        for storage in self.storages:
            storage.cut(self.layout.buckets)
        self._compress(compression.on(self.layout.buckets, self.storages[0].arrays, passed))
        self._exchanges = 0
        if lay_out is not None:
            lay_out()

    def _fits(self, buckets: Sequence[Bucket]) -> None:
        """Raise UsageError for buckets that cannot take the place of these."""
        if place_tensors([layer.spec.elements for layer in self.layout.layers], buckets) != self.storages[0].placed:
            raise UsageError("other buckets list tensors in another order than the first ones, which memory has")
        if self.compression is not None:
            self.compression.check_cuts(buckets)

    def measure(self, steps: int, *, forward: bool) -> None:
        """From now on time the layers, and one exchange after the other, so that each shows what it takes by itself."""
        self.measured, self._lanes = False, _lanes(1)
        if self.session.rank == 0 and self._measuring is not None:
            self.times = self._measuring(steps, forward)
            self._costs, self._pull_costs = BucketTimes(), BucketTimes()

    def _measure_no_more(self) -> None:
        if self.times is not None:
            self.times.detach()
        self._lanes = _lanes(self.schedule.in_flight)
        self.times = self._costs = self._pull_costs = None
        self.measured, self._shown, self._replaces = True, None, False


def _lanes(in_flight: int) -> dict[Phase, Lane]:
    """A gather goes behind its bucket's reduction, and must not keep the next reductions waiting."""
    reducing = Lane(in_flight)
    return {"allreduce": reducing, "reduce_scatter": reducing, "all_gather": Lane(in_flight)}
