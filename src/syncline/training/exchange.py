"""Owns the exchange of a model's buckets, for every framework, and the replacement of their layout between steps.

``BucketExchange`` prepares the order, key and lane of each bucket, keeps the codec's memory, scales buckets by the
rank's weight, and submits them to the strategy's architecture, to owners of the weights, or to a plan that mixes some
workers' weights. The sync mode decides for each step whether the buckets hold gradients or weights; each of the two has
its own storage and its own codec memory. ``engine.step`` decides when a bucket is complete.

A layout is the buckets, the storage that is cut into them, and the codec's memory of them. Another layout may replace
it between two steps (``session.layout``). The storage stays, with the tensors in place, and is cut into other buckets.
A layout is replaced after steps in which rank 0 has timed the layers, when rank 0's ticket announces another schedule
(``Chooser``), or when a checkpoint is loaded.
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
from ..errors import MismatchError, UsageError, ViewEnds
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
from ..session.stats import Pace
from ..session.tickets import JOINED, STEP, Meeting, Ticket, step_of
from ..strategy.strategy import Strategy
from ..sync import Averages, exchanges_gradients
from .memory import Blocks, Staging
from .weights import Mix

REPLACES = 1
"""Flag of rank 0's ticket: another layout replaces this one after the step."""

_RENEWS = 1 << 31
"""Flag of rank 0's ticket in an elastic run: all end the session after the step, because a worker joins."""

_RULE_AT = 32
"""The first bit of the digest of the optimizer's rule in a ticket's flags."""


class MeasuresLayers(Protocol):
    """Times the layers of a model in some training steps."""

    @property
    def last(self) -> bool:
        """Whether the step that begins is the last measured one."""
        ...

    def produced(self, tensor: int) -> None:
        """A gradient is complete."""
        ...

    def end_step(self) -> None:
        """All gradients of a step are complete."""
        ...

    def forget(self) -> None:
        """Discard the times since the last step."""
        ...

    def of(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        """The layers with their times."""
        ...

    def detach(self) -> None:
        """Stop measuring."""
        ...


class Chooser(Protocol):
    """Chooses the schedule where the strategy leaves it open. All workers have one; rank 0's decides."""

    @property
    def over(self) -> bool:
        """Whether the choice is final."""
        ...

    def flags(self) -> int:
        """The flags of the choice in this rank's ticket."""
        ...

    def objects(self) -> bool:
        """Whether this rank cannot defer updates into the next iteration."""
        ...

    def saw(self, tickets: Sequence[Ticket]) -> None:
        """Note the tickets of a finished step."""
        ...

    def choose(
        self, layers: Sequence[Layer], cost: LinearCost | None, resumed: Layout | None, objected: bool, lay: Lay
    ) -> Layout:
        """Rank 0's choice. ``objected``: a rank objects now; ``resumed``: the layout of the resumed run."""
        ...

    def replaced(self) -> None:
        """A layout has been chosen: another one, or the present one again."""
        ...

    def resume(self, layout: Layout, measured: bool) -> None:
        """The layout of a resumed run is about to replace this one."""
        ...

    def resumed(self, measured: bool) -> None:
        """The layout of a resumed run has replaced this one. Measure if the run had not finished measuring."""
        ...


class BucketTimes:
    """Measures the exchanges of buckets, in the driving thread.

    The time of a bucket is its shortest over the steps: in that step it waited for no rank.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun: dict[int, float] = {}
        self._shortest_s: dict[int, float] = {}

    def begin(self, number: int) -> None:
        """The exchange of a bucket begins."""
        self._begun[number] = self._clock()

    def end(self, number: int) -> None:
        """The exchange of a bucket is over."""
        spent_s = self._clock() - self._begun.pop(number)
        self._shortest_s[number] = min(spent_s, self._shortest_s.get(number, spent_s))

    def cost(self, buckets: Sequence[Bucket]) -> LinearCost | None:
        """The cost of an exchange by its bytes, fitted to the measured buckets. None without measurements."""
        measured = sorted(self._shortest_s.items())
        return fit_line([buckets[number].nbytes for number, _ in measured], [seconds for _, seconds in measured])


def storages_of(strategy: Strategy) -> int:
    """The number of storages of a model's tensors, 1 or 2.

    Two if gradients are used a step later: one for gradients being produced, one for gradients in flight. Two also if a
    mode exchanges both gradients and weights: scripts may look at gradients, so differences of weights lie elsewhere.
    """
    mode = strategy.sync_mode()
    both = isinstance(mode, Averages) and exchanges_gradients(mode)
    return 2 if both or strategy.schedule_object().apply == "next_step" else 1


class BucketExchange:
    """The exchange of one model's buckets. All processes make it together.

    ``storages_of`` gives the number of ``storages``, and ``key`` is the first of the model's keys. ``rule`` describes
    the optimizer; the text must be equal on all workers that make a step together. ``measuring(steps, forward)`` makes
    the timer of the layers, with or without forward passes.
    """

    def __init__(
        self,
        session: Session,
        key: int,
        layout: Layout,
        storages: Sequence[Blocks],
        staging: Staging,
        *,
        rule: Callable[[], str] | None = None,
        measuring: Callable[[int, bool], MeasuresLayers] | None = None,
    ) -> None:
        self.session, self.key, self.layout, self.storages, self.staging = session, key, layout, storages, staging
        self._rule, self._measuring = rule, measuring
        self.schedule, self.mode = session.strategy.schedule_object(), session.strategy.sync_mode()
        self._averages = self.mode if isinstance(self.mode, Averages) else None
        self._compressions: list[Compression] = []  # of each storage, if there is a codec
        self._reduced: dict[int, Work] = {}  # the last reduction of each bucket, if steps overlap
        self._orders: dict[tuple[int, int, Phase], Order | CodedOrder] = {}  # by storage, bucket and phase
        self._planned, self._chosen = session.strategy, session.choice  # of the orders
        self._checked: Meeting | None = None  # the last meeting at which all ranks had the same rule
        self._pace, self._error_every = Pace(), 0  # of the codec's measured error
        self.compress()
        self._exchanges = 0  # in this layout
        self._shown: Meeting | None = None  # of the last step, if rank 0's announcement in it counts
        self._replaces = False
        self._last: Meeting | None = None  # of the last step, if others may join the run
        self.measured = self.schedule.measures == 0
        """Whether measuring is finished, so that the schedule asks for no other layout."""
        self.times: MeasuresLayers | None = None
        """The timer of the layers, on rank 0 while it measures."""
        self._costs: BucketTimes | None = None
        self._pull_costs: BucketTimes | None = None  # the same for pulls of weights that are exchanges of their own
        self._lanes = _lanes(self.schedule.in_flight)
        if not self.measured:
            self.measure(self.schedule.measures, forward=self.schedule.apply == "layer")  # others do not ask for it

    choosing: Chooser | None = None
    """Chooses the schedule where the strategy leaves it open."""

    mix: Callable[[int], Mix | None] | None = None
    """The plan, by step, that exchanges weights in place of the strategy's architecture, if the sync mode has one."""

    owners: Exchanger | None = None
    """Receives the buckets where owners hold the weights."""

    on_replacing: Callable[[], Callable[[], None]] | None = None
    """Called before another layout replaces this one; the returned function is called afterwards."""

    @property
    def compression(self) -> Compression | None:
        """The codec's memory; None without a codec."""
        return self._compressions[0] if self._compressions else None

    @property
    def of_differences(self) -> Compression | None:
        """The codec's memory of weight differences, if gradients have another one."""
        return self._compressions[1] if self._averages is not None and len(self._compressions) > 1 else None

    def compress(self) -> None:
        """Begin with the codec of the session's strategy and an empty memory, between steps."""
        layers = self.layout.layers
        self._coder = self.staging.coder if self.session.computes_on_device(layers) else None
        arrays = self.in_place(self.storages[0])
        on_device = self.session.strategy.on_device and self.session.world_size > 1
        self._sums = self.staging.sums(self.session, self.storages) if on_device else None
        self._compress(self.session.compression(layers, self.layout.buckets, arrays, self._coder))

    @property
    def coded_on_device(self) -> bool:
        """Whether gradients are encoded in the memory in which the script sees them."""
        return self._coder is not None

    def in_place(self, storage: Blocks) -> Sequence[Array]:
        """The buckets of gradients or weights, where the codec computes."""
        if self._coder is None:
            return storage.arrays
        return [storage.pair(number).device for number in range(len(self.layout.buckets))]

    def _compress(self, compression: Compression | None) -> None:
        others, buckets = self.storages[1:], self.layout.buckets
        if compression is None:
            self._compressions = []
        elif self._averages is not None:  # residuals of gradients must not enter differences of weights
            fresh = [compression.fresh(buckets, self.in_place(other)) for other in others]
            self._compressions = [compression, *fresh]
        else:
            self._compressions = [compression, *(compression.beside(self.in_place(other)) for other in others)]
        self._reduced, self._orders = {}, {}
        self.measure_error(self._pace, self._error_every)

    def measure_error(self, pace: Pace, every: int) -> None:
        """From now on measure the error of the codec of gradients every ``every`` steps, for ``pace``; 0: never."""
        self._pace, self._error_every = pace, every
        for one in self._compressions:
            one.measure_errors(every)
        if self._compressions:
            pace.errors = self._compressions[0].errors

    def bucket(self, operation: BucketPhase) -> tuple[Bucket, Array]:
        """A bucket and its elements where the training thread has put them."""
        storage, number = self.storages[self.place(operation.step)], operation.bucket
        on_device = self.staging.device is not None
        return self.layout.buckets[number], storage.pair(number).device if on_device else storage.arrays[number]

    def close(self) -> None:
        """End all exchanges. Tensors keep their values."""
        self._measure_no_more()
        self._reduced, self._orders = {}, {}
        self.staging.close()

    # Exchange.

    def place(self, step: int) -> int:
        """The number of the storage for the gradients of a step, or for the weight differences after it."""
        if self._averages is not None:
            return len(self.storages) - 1 if self._averages.averages(step) else 0
        return step % len(self.storages)

    def of_weights(self, step: int) -> bool:
        """Whether weights are exchanged after that step, in place of its gradients."""
        return self._averages is not None and self._averages.averages(step)

    def start(self, operation: BucketPhase, meeting: Meeting | None, priority: float, after: Work | None) -> Work:
        """Exchange a complete bucket; on a device it is copied down before and up afterwards, or coded there.

        If there are two phases, the first begins with the copy down and the second ends with the copy up. A push to
        owners of the weights is not copied up. A step that ranks make without agreement has no ``meeting``.
        """
        place, staging = self.place(operation.step), self.staging
        gate = after if after is not None or meeting is None else meeting.work
        if staging.device is None or self._coder is not None or self._sums is not None:
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
        before, number = None, operation.bucket
        if self._coder is not None or self._sums is not None:
            pair, mark = self.storages[place].pair(number), self.staging.mark()
            before = partial(self._check_and_weigh, partial(self.staging.hand_over, pair, mark), meeting)
        elif meeting is not None and operation.phase != "all_gather":
            before = partial(self._check_and_weigh, partial(cpu.weigh, self.storages[place].arrays[number]), meeting)
        when = When(gate, before, self._lanes[operation.phase], priority)
        if self._costs is not None and operation.phase != "all_gather":
            return self._timed(self._costs, operation, place, when)
        return self._begin(operation, place, when)

    def _check_and_weigh(self, weigh: Callable[[float], None], meeting: Meeting | None) -> None:
        """Scale a bucket by this rank's share, in the driving thread, when the tickets have arrived."""
        if meeting is None:
            weigh(1.0)
            return
        if self._rule is not None and meeting is not self._checked:
            self._check_rule(meeting)
        weigh(meeting.share())

    def _timed(self, costs: BucketTimes, operation: BucketPhase, place: int, when: When) -> Work:
        """Measure the exchange without the waits before it."""

        def begin() -> None:
            if when.before is not None:
                when.before()
            costs.begin(operation.bucket)

        work = self._begin(operation, place, when._replace(before=begin))
        return self.session.engine.then(work.label, [work], partial(costs.end, operation.bucket))

    def pull(self, number: int, start: Callable[[int, When], Work], priority: float) -> Work:
        """Pull a bucket's new weights by ``start``. In measured steps one exchange follows the other."""
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
        if before is not None and not before.done:  # this step needs the residual of the step before
            gate = before if when.gate is None else self.session.engine.then(order.label, [when.gate, before])
            when = when._replace(gate=gate)
        work = self.session.engine.start(order, when)
        if len(self._compressions) > 1:
            self._reduced[number] = work
        return work

    def plan(self) -> None:
        """Prepare all orders for the present strategy, so that impossible ones are refused here and not in a step."""
        self._orders, self._planned, self._chosen = {}, self.session.strategy, self.session.choice
        phases: tuple[Phase, ...] = ("allreduce",)
        if self.schedule.phases == "split":
            phases = ("reduce_scatter", "all_gather")
        if self.owners is None:
            places, numbers = range(len(self.storages)), range(len(self.layout.buckets))
            self._orders = {what: self._prepared(*what) for what in product(places, numbers, phases)}

    def _order(self, operation: BucketPhase, place: int) -> Order | CodedOrder:
        """The order of a bucket. It is made once per strategy, unless weights use another plan in each step."""
        step, number, phase = operation
        session = self.session
        if self.mix is not None and not self._compressions and self.of_weights(step) and (mix := self.mix(step)):
            return self._plain(place, number, phase, mix.program)
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
        if self._sums is not None:
            key, label = self._key(place, number, phase), self.layout.labels[number]
            return session.reducers_order(self._sums.reducers(place, number), key, label)
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
        """Two phases of a bucket, and two steps, may be in flight at once: each has its own key."""
        turn = place if self._averages is None else 0  # an exchange of weights is awaited at once
        return self.key + number + BUCKETS * (2 * turn + (phase == "all_gather"))

    # The optimizer's rule, which must be the same on all workers.

    def _check_rule(self, meeting: Meeting) -> None:
        """Raise MismatchError if another worker makes this step with another rule of the optimizer."""
        tickets = meeting.tickets()
        mine = tickets[self.session.rank]
        for rank, ticket in enumerate(tickets):  # the flags of a rank without batches left mean something else
            if JOINED not in (mine.kind, ticket.kind) and ticket.flags >> _RULE_AT != mine.flags >> _RULE_AT:
                raise self._parted(rank, step_of(ticket))
        self._checked = meeting

    def _parted(self, rank: int, step: int) -> MismatchError:
        assert self._rule is not None
        other, me = self.session.name(rank), self.session.name(self.session.rank)
        text = f"{other} has other optimizer values in step {step} than {me}, which has {self._rule()}"
        return MismatchError(self.session.titled(f"{text}: set the same optimizer attributes on all workers"))

    # Another layout.

    @property
    def flags(self) -> int:
        """The flags of this rank's ticket: the layout, and the digest of the optimizer's rule."""
        found = REPLACES if self.times is not None and self.times.last else 0
        if self.choosing is not None:
            found |= self.choosing.flags()
        found |= self.renews
        if self._rule is not None:
            found |= zlib.crc32(self._rule().encode()) << _RULE_AT
        return found

    @property
    def renews(self) -> int:
        """The flag by which rank 0 announces the end of the session after this exchange; 0 if it goes on."""
        session = self.session
        return _RENEWS if session.renewed is not None and session.rank == 0 and session.renewed() else 0

    def exchanged(self, meeting: Meeting | None) -> None:
        """Note a finished step. Rank 0's ticket in it may announce another layout."""
        self._exchanges += 1
        watches = self.choosing is not None and not self.choosing.over
        if watches or not self.measured:
            self._shown = meeting
        if self.session.renewed is not None:
            self._last = meeting

    @property
    def replaces(self) -> bool:
        """Whether another layout must replace this one before the next exchange; asked between steps."""
        if self._shown is not None:
            meeting, self._shown = self._shown, None
            self.session.engine.wait(*([] if meeting.work is None else [meeting.work]))
            tickets = meeting.tickets()
            self._replaces = tickets[0].kind == STEP and bool(tickets[0].flags & REPLACES)
            if self.choosing is not None:
                self.choosing.saw(tickets)
        return self._replaces

    def check_view(self) -> None:
        """Raise ViewEnds before a step if rank 0's ticket in the step before has announced the end of the session."""
        meeting, self._last = self._last, None
        if meeting is not None:
            self.session.engine.wait(*([] if meeting.work is None else [meeting.work]))
            if meeting.tickets()[0].flags & _RENEWS:
                ended = self.session.ended = ViewEnds()
                raise ended

    def replace_layout(self) -> None:
        """Replace the buckets by those for the measured times, or by another schedule's.

        All workers call it together, between steps; rank 0's times decide.
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
        """Continue with the buckets of a resumed run, and measure if it was still measuring. All workers call it.

        Raises UsageError for buckets that do not fit the model.
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
        """The codec states of all workers for a checkpoint, in rank order: of gradients and of weight differences.

        All workers call it together. A codec without memory has no entry.
        """
        return {
            what: gather_saved(self.session, one.saved())
            for what, one in self._memories.items()
            if one is not None and one.keeps
        }

    def resume(self, step: int, saved: Mapping[str, Sequence[Saved] | None]) -> None:
        """Continue at that step, counted from 0, with the states from ``saved``. All workers call it together."""
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
        """Set the codec's step. Servers have posted receives for step 0: if its payloads differ, all begin anew."""
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
        if cost is not None and pull is not None:  # predictions assume one direction after the other
            both, cost = PushAndPull(cost, pull), cost + pull
        choose = None if choosing is None else partial(choosing.choose, layers, cost, chosen)
        kept = before if choosing is None else replace(before, cost=cost)  # kept if no layout can be chosen
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
        self._compress(compression.on(self.layout.buckets, self.in_place(self.storages[0]), passed))
        self._exchanges = 0
        if lay_out is not None:
            lay_out()

    def _fits(self, buckets: Sequence[Bucket]) -> None:
        """Raise UsageError for buckets that cannot replace these."""
        if place_tensors([layer.spec.elements for layer in self.layout.layers], buckets) != self.storages[0].placed:
            raise UsageError(
                "these buckets list tensors in another order than the present ones, but tensors must stay in place"
            )
        if self.compression is not None:
            self.compression.check_cuts(buckets)

    def measure(self, steps: int, *, forward: bool) -> None:
        """Time the layers from now on. Exchanges run one after the other, so that each is timed alone."""
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
    """The lane of each phase. An all-gather has its own, or it would delay the reductions of the next buckets."""
    reducing = Lane(in_flight)
    return {"allreduce": reducing, "reduce_scatter": reducing, "all_gather": Lane(in_flight)}
