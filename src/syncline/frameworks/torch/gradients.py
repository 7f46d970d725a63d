"""The gradients of one model in buckets, and the exchange of these.

How tensors travel is a layout: buckets, the storage that is cut into them, and the codec's memory of them. Another one
may take its place between two steps (``session.replacing``): the storage stays, with tensors where they are in it, and
is cut into other buckets. That happens after steps in which rank 0 has timed the layers, or when it chooses another
schedule (``choosing``), which its ticket says, or as a checkpoint has it.

Where the model lives on a GPU, buckets are staged through pinned memory of the transport on their way (``staging``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...collectives import Collective
from ...compression.compression import Compression
from ...costs.network import LinearCost
from ...engine.order import CodedOrder, Exchanger, Lane, Order, When, Work
from ...engine.step import BucketPhase, Phase
from ...errors import UsageError
from ...kernels import cpu
from ...nouns import Bucket, Layer
from ...plans.messages import Program
from ...schedules import Cost, PushAndPull, Schedule
from ...session.layout import BUCKETS, Layout, Passed, decide_layout, place_tensors
from ...session.replacing import Recompressing, agree_on_layout, push_nothing
from ...session.session import Session
from ...session.tickets import STEP, Meeting
from ...sync import Averages, exchanges_gradients
from .options import Named
from .staging import Copier, device_of, staging_for
from .storage import Storage, layers_of
from .timing import BucketTimes, LayerTimes, clock_of

if TYPE_CHECKING:
    from .choosing import Choosing

REPLACES = 1
"""Flag of rank 0's ticket: another layout takes the place of this one after the step."""


class Gradients:
    """The buckets of ``named``, the trained parameters of a model; ``first_key`` begins the range of their keys.

    All processes make it together.
    """

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        named: Named,
        schedule: Schedule,
        *,
        first_key: int = 0,
        copier: Copier | None = None,
    ) -> None:
        self.session, self.named, self.first_key = session, named, first_key
        self.layout = decide_layout(session, layers_of(named))
        device = device_of(named)
        self.staging = staging_for(device, session.engine, session.fail, copier)
        mode = session.strategy.sync_mode()
        self._averages = mode if isinstance(mode, Averages) else None
        # One for gradients that are made, one for those that are under way; or one for how weights differ, where
        # gradients, which scripts may look at, are in another one.
        two = schedule.apply == "next_step" or (self._averages is not None and exchanges_gradients(mode))
        self.storages = [
            Storage(named, self.layout.buckets, self.staging.allocate, self.staging.device) for _ in range(1 + two)
        ]
        self.storage = self.storages[0]
        """Where the gradients of the present step are made."""
        self._compressions: list[Compression] = []  # of each storage, where there is a codec
        self._reduced: dict[int, Work] = {}  # the last reduction of each bucket, where steps overlap
        self._orders: dict[tuple[int, int, Phase], Order | CodedOrder] = {}  # by storage, bucket and phase
        self._planned, self._chosen = session.strategy, session.choice  # what they run
        self.compress()
        self._exchanges = 0  # in this layout
        self._shown: Meeting | None = None  # of the last step, where what rank 0 tells in it counts
        self._replaces = False
        self.measured = schedule.measures == 0
        """Whether the schedule asks for no other layout any more."""
        self._model, self.schedule = model, schedule
        self.times: LayerTimes | None = None
        """What measures the layers, on rank 0 while it does."""
        self._costs: BucketTimes | None = None
        self._pull_costs: BucketTimes | None = None  # the same where weights are pulled, and have not come with that
        self._lanes = _lanes(schedule.in_flight)
        if not self.measured:
            self.measure(schedule.measures, forward=schedule.apply == "layer")  # others do not ask for it

    choosing: Choosing | None = None
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
        """Gradients keep their values."""
        self._measure_no_more()
        self.staging.close()

    # Exchange.

    def storage_of(self, step: int) -> Storage:
        """Where the gradients of a step are, or how weights differ after it."""
        return self.storages[self._place(step)]

    def _place(self, step: int) -> int:
        if self._averages is not None:
            return len(self.storages) - 1 if self._averages.averages(step) else 0
        return step % len(self.storages)

    def turn(self, step: int) -> None:
        """The gradients of this step are made from now on."""
        self.storage = self.storage_of(step)

    def zero(self) -> None:
        """Let the gradients of the present step be zeros."""
        self.staging.synchronize()  # the last step's copies may still read what is now overwritten
        with torch.no_grad():
            for flat in self.storage.resident.values():
                flat.zero_()

    def start(self, operation: BucketPhase, meeting: Meeting | None, priority: float, after: Work | None) -> Work:
        """A bucket is complete: copy it down where it lives elsewhere, exchange it, copy it up.

        In two phases the first begins with the copy down, and the second, which goes behind it, ends with the copy up.
        What is pushed to those who hold the weights does not come back.
        Without a meeting there is nothing to agree on in the step.
        """
        storage, label = self.storage_of(operation.step), f"bucket {operation.bucket}"
        pair = storage.pair(operation.bucket)
        if after is None:
            after = self.staging.down(pair, None if meeting is None else meeting.work, label)
        work = self._exchange(operation, storage, meeting, after, priority)
        stays = operation.phase == "reduce_scatter" or self.owners is not None
        return work if stays else self.staging.up(pair, work, label)

    def _exchange(
        self, operation: BucketPhase, storage: Storage, meeting: Meeting | None, gate: Work | None, priority: float
    ) -> Work:
        before = None
        if meeting is not None and operation.phase != "all_gather":
            before = partial(self._correct, storage.arrays[operation.bucket], meeting)
        when = When(gate, before, self._lanes[operation.phase], priority)
        if self._costs is not None and operation.phase != "all_gather":
            return self._timed(self._costs, operation, when)
        return self._begin(operation, when)

    def _timed(self, costs: BucketTimes, operation: BucketPhase, when: When) -> Work:
        """Measure the exchange, without what comes before."""

        def begin() -> None:
            if when.before is not None:
                when.before()
            costs.begin(operation.bucket)

        work = self._begin(operation, when._replace(before=begin))
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

    def _begin(self, operation: BucketPhase, when: When) -> Work:
        number = operation.bucket
        if self.owners is not None:
            return self.owners.start(number, when)
        order, before = self._order(operation), self._reduced.get(number)
        if before is not None and not before.done:  # what a codec has left of the step before goes into this one
            gate = before if when.gate is None else self.session.engine.then(order.label, [when.gate, before])
            when = when._replace(gate=gate)
        work = self.session.engine.start(order, when)
        if len(self._compressions) > 1:
            self._reduced[number] = work
        return work

    def _order(self, operation: BucketPhase) -> Order | CodedOrder:
        """What exchanges a bucket, made once for what runs; but where weights go another way after every step."""
        averages, step, session = self._averages, operation.step, self.session
        if self.program is not None and not self._compressions and averages is not None and averages.averages(step):
            return self._plain(operation, self.program(step))
        if self._planned is not session.strategy or self._chosen is not session.choice:
            self._orders, self._planned, self._chosen = {}, session.strategy, session.choice
        what = self._place(step), operation.bucket, operation.phase
        order = self._orders.get(what)
        if order is None:
            order = self._orders[what] = self._order_anew(operation)
        return order

    def _order_anew(self, operation: BucketPhase) -> Order | CodedOrder:
        session, number = self.session, operation.bucket
        if self._compressions:
            compression, label = self._compressions[self._place(operation.step)], self.layout.labels[number]
            return session.coded_order(compression, number, self._key(operation), label)
        nbytes = self.storage_of(operation.step).arrays[number].nbytes
        if operation.phase == "allreduce":
            return self._plain(operation, session.bucket_program(nbytes))
        return self._plain(operation, session.bucket_phase_program(operation.phase, nbytes))

    def _plain(self, operation: BucketPhase, program: Program | Collective) -> Order:
        label, phase = self.layout.labels[operation.bucket], operation.phase
        if phase != "allreduce":
            label = f"{label}, {phase.replace('_', '-')}"
        array = self.storage_of(operation.step).arrays[operation.bucket]
        return Order(program, array, self._key(operation), label)

    def _key(self, operation: BucketPhase) -> int:
        """Of two phases of a bucket, and of two steps, both may be under way."""
        turn = operation.step % len(self.storages) if self._averages is None else 0  # weights are waited for at once
        return self.first_key + operation.bucket + BUCKETS * (2 * turn + (operation.phase == "all_gather"))

    @staticmethod
    def _correct(array: np.ndarray, meeting: Meeting) -> None:
        """In the progress thread: weigh this rank's gradient by its share of the samples."""
        if (share := meeting.share()) != 1.0:
            cpu.weigh(array, share)

    # Another layout.

    @property
    def flags(self) -> int:
        """What this rank's ticket says of the layout."""
        last = REPLACES if self.times is not None and self.times.last else 0
        return last if self.choosing is None else last | self.choosing.flags()

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

    def begin_at(self, step: int) -> None:
        """A run that is resumed goes on from that step, counted from 0; all workers call it together.

        Servers have posted what the first step of all begins with: where its payloads are others, all begin anew.
        """
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
        choosing: Choosing | None = None,
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
            self.first_key,
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
            session.schedules[self.first_key] = running, self.layout.reason
        if self.layout.travels_like(before) and not passed.anew:
            return
        compression = Recompressing(session, self.compression)
        program = session.bucket_program if self.owners is None else session.push_program
        push_nothing(session, program, before.buckets, self.compression, self.first_key)
        for storage in self.storages:
            storage.cut(self.layout.buckets)
        self._compress(compression.on(self.layout.buckets, self.storages[0].arrays, passed))
        self._exchanges = 0
        if lay_out is not None:
            lay_out()

    def _fits(self, buckets: Sequence[Bucket]) -> None:
        """Raise UsageError for buckets that cannot take the place of these."""
        if place_tensors([layer.spec.elements for layer in self.layout.layers], buckets) != self.storage.placed:
            raise UsageError("other buckets list tensors in another order than the first ones, which memory has")
        if self.compression is not None:
            self.compression.check_cuts(buckets)

    def measure(self, steps: int, *, forward: bool) -> None:
        """From now on time the layers, and one exchange after the other, so that each shows what it takes by itself."""
        self.measured, self._lanes = False, _lanes(1)
        if self.session.rank == 0:
            clock = clock_of(device_of(self.named))
            self.times = LayerTimes(self._model, self.named, steps, clock, forward=forward)
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
