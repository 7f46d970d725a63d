"""A training's iterations under a strategy on a cluster, simulated: what a run would do, on a virtual clock.

Owns how workers, exchanges and resources come together where all workers come to each exchange; ``apart`` has pushes
that are updates by themselves. The schedule, the sync mode, the buckets and the state machine of a step are those of a
run, and so is the order in which operations go; ``exchanges`` says what each takes.

Where all workers are alike one of them is simulated, which says what all do. Where they are not (one is slow, or all
are held up at random) all are, and an operation of all begins when the last of them has handed it over. So it is where
workers gossip, too: a run's workers show tickets to all before weights go to neighbours.

Workers that begin every step at the same time and wait for all in it differ in nothing but how long layers take: of a
step whoever computes longest hands everything over last. So one is simulated that in every step takes as long as the
slowest of all.

Not simulated: what the interpreter takes between layers, and a port that a more urgent exchange leaves idle because
another rank is behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from syncline.costs.virtual import Begin, Chain, Chains, Clock, Operations, Resource, Stage, Used
from syncline.costs.worker import Handed, VirtualWorker, run
from syncline.engine.step import BucketPhase, Steps, Submit
from syncline.errors import UsageError
from syncline.strategy.words import NONE
from syncline.sync import Averages, Mixes, backup_of

from .apart import Apart
from .exchanges import Exchanges, period_of
from .messages import PlanRuns
from .models import Model
from .settings import OURS, Habits, Iteration, Laid, Machines, Setting, codec_costs, duties_of, lay_out, stretch_of

_BEFORE, _COUNTED = 3, 4
"""Iterations until one is like the one before, and those of which the mean counts, of which a period may need more."""

_DRAWN = 40
"""Those that count where workers are held up at random."""

_TICKET_BYTES = 32
"""What a worker shows the others before anything of a step goes."""

_STAGES = ("loading_s", "h2d_s", "forward_s", "backward_s", "update_s", "other_s")


def simulate(setting: Setting, model: Model, habits: Habits = OURS, *, exact: bool = False) -> Iteration:
    """The iterations of a training, in the mean of some after the first ones.

    ``exact`` has an event for every message of every rank, of exchanges that are not compressed. It takes long, and
    processors' time for messages and bytes is left out.
    """
    if setting.alone:
        return Apart(setting, model, habits).run()
    return Together(setting, model, habits, exact=exact).run()


class Together:
    """Workers that come together in each of their exchanges."""

    def __init__(self, setting: Setting, model: Model, habits: Habits, *, exact: bool = False) -> None:
        self._setting, self._model, self._habits = setting, model, habits
        self._laid = lay_out(setting, model)
        self._schedule = setting.strategy.schedule_object()
        self._clock = Clock()
        self._machines = Machines(setting, self._clock)
        self._resources = resources_of(setting, self._clock, self._machines)
        exchanges = Exchanges(
            setting.strategy,
            model.layers,
            self._laid.buckets,
            setting.placement,
            setting.cluster,
            codec_costs(setting),
        )
        in_flight = habits.in_flight or self._schedule.in_flight
        chains = exchanges.chains if setting.measured is None else partial(measured_chains, setting, self._laid)
        begin: Begin = Chains(self._clock, self._resources, chains)
        if exact:
            begin = self._messages(exchanges)
        self._operations = Operations(self._clock, begin, in_flight)
        self._met: dict[object, int] = {}
        self._slowest = Slowest(model, setting.workers) if not model.alike and self._begin_together else None
        alone = model.alike or self._slowest is not None
        self._workers = [self._worker(rank) for rank in range(1 if alone else setting.workers)]

    def run(self) -> Iteration:
        """Simulate; raises UsageError where the training gets stuck."""
        least = _DRAWN if self._model.speed.jitter else _COUNTED
        period = period_of(self._setting.strategy.sync_mode(), self._setting.workers)
        before, counted = (1, 1) if self._repeats else (_BEFORE, -(-least // period) * period)
        for rank, worker in enumerate(self._workers):
            own = self._resources if len(self._workers) == 1 else {"cores": self._machines.worker(rank)}
            run(self._clock, worker.iterations(), own, self._operations)
        (begun_s, begun_busy_s), (ended_s, busy_s) = (self._look(before), self._look(before + counted))
        means = {name: (ended_s[name] - seconds) / counted for name, seconds in begun_s.items()}
        busy = {name: (busy_s[name] - seconds) / counted for name, seconds in begun_busy_s.items()}
        if self._slowest is not None:
            waits = self._slowest.waits(before, before + counted)
            for name, part_s in (("forward_s", self._model.forward_s), ("backward_s", self._model.backward_s)):
                means[name] -= waits * part_s
                means["exposed_s"] += waits * part_s
        return Iteration(busy_s=busy, staleness={}, **means)

    def _messages(self, exchanges: Exchanges) -> PlanRuns:
        """Every exchange by its plan, message by message."""
        strategy = self._setting.strategy
        if strategy.codec != NONE or strategy.server_holds_weights:
            raise UsageError(f"exchanges of {strategy} are not simulated message by message: gradients alone are")
        sizes = [bucket.nbytes for bucket in self._laid.buckets]
        return PlanRuns(
            self._clock,
            self._setting.cluster,
            self._setting.placement,
            lambda operation: exchanges.plan(operation.phase),
            lambda operation: sizes[operation.bucket],
        )

    @property
    def _all_in_all(self) -> bool:
        """Whether all workers wait for all in every step."""
        mode = self._setting.strategy.sync_mode()
        return mode.merges and not isinstance(mode, Averages | Mixes) and not backup_of(mode)

    @property
    def _repeats(self) -> bool:
        """Whether nothing of an iteration reaches into the next, so that each is like the first."""
        alike = self._model.alike and not self._model.batches.prefetch
        return self._schedule.apply == "step" and self._all_in_all and alike

    @property
    def _begin_together(self) -> bool:
        """Whether all workers begin every step at the same time, and compute beside nobody who is done already."""
        return self._schedule.apply != "next_step" and self._all_in_all and self._setting.cluster.cores is None

    def _look(self, iterations: int) -> tuple[dict[str, float], dict[str, float]]:
        """Where time has gone when all have made so many iterations: the slowest worker's, and that of resources."""
        self._clock.run(over=lambda: all(len(worker.spent.ends_s) >= iterations for worker in self._workers))
        last = max((worker.spent for worker in self._workers), key=lambda spent: spent.forward_s + spent.backward_s)
        if len(last.ends_s) < iterations:
            raise UsageError(f"under {self._setting.strategy} the simulated training waits for what nothing leads to")
        stages = {name: getattr(last, name) for name in _STAGES}
        busy_s = {name: resource.busy_s for name, resource in self._resources.items()}
        return {"iteration_s": last.ends_s[iterations - 1], "exposed_s": last.waited_s, **stages}, busy_s

    def _worker(self, rank: int) -> VirtualWorker:
        strategy = self._setting.strategy
        held, mode = strategy.server_holds_weights, strategy.sync_mode()
        steps = Steps(len(self._model.layers), self._laid, self._schedule, mode, held=held)
        duties = duties_of(self._setting, self._model, self._laid)
        stretch = self._slowest or stretch_of(self._model, rank)
        return VirtualWorker(self._clock, duties, steps, Handed(self._submit, self._agree), stretch)

    def _submit(self, submit: Submit) -> None:
        if self._all_have_come(submit.operation):
            self._operations.submit(submit)

    def _agree(self, step: int) -> None:
        if self._habits.tickets and self._all_have_come(step):
            self._operations.opens_s = self._clock.now_s + agreeing_s(self._setting)

    def _all_have_come(self, what: object) -> bool:
        """Whether the last of the simulated workers has come to something, which it then sets going."""
        came = self._met.pop(what, 0) + 1
        if came < len(self._workers):
            self._met[what] = came
        return came == len(self._workers)


class Slowest:
    """What the times of a step's layers are multiplied by on whoever is the slowest of so many workers in it."""

    def __init__(self, model: Model, workers: int) -> None:
        self._stretches = [stretch_of(model, rank) for rank in range(workers)]
        self._steps: list[list[float]] = []

    def __call__(self, step: int) -> float:
        """That of the next step."""
        self._steps.append([stretch(step) for stretch in self._stretches])
        return max(self._steps[-1])

    def waits(self, begin: int, end: int) -> float:
        """How much more that is, in the mean of some steps, than for the worker that computes longest in them."""
        steps = self._steps[begin:end]
        return (sum(map(max, steps)) - max(map(sum, zip(*steps, strict=True)))) / len(steps)


def measured_chains(setting: Setting, laid: Laid, operation: BucketPhase) -> Sequence[Chain]:
    """An exchange that lasts as long as somebody has measured; raises UsageError for all but plain allreduces."""
    strategy = setting.strategy
    if setting.measured is None or strategy.server_holds_weights or strategy.codec != NONE:
        raise UsageError(f"what was measured is a plain allreduce, and {strategy} is none: take ring, say")
    if operation.phase != "allreduce":
        raise UsageError(f"what was measured is a whole allreduce, which {strategy} halves: take wait_free, say")
    return [[Stage("port", setting.measured(laid.buckets[operation.bucket].nbytes))]]


def resources_of(setting: Setting, clock: Clock, machines: Machines) -> dict[str, Used]:
    """What the exchanges of a setting use."""
    found: dict[str, Used] = {name: Resource(clock, ranked=True) for name in ("port", "back", "inside")}
    found["cores"] = machines.all_workers()
    found["serving"] = machines.serving(0) if setting.placement.group.servers else found["cores"]
    return found


def agreeing_s(setting: Setting) -> float:
    """Until each worker has what all others show it at the beginning of a step: a small message to everyone."""
    cluster, per_host, others = setting.cluster, setting.placement.per_host, setting.workers - 1
    far = others - (per_host - 1 if cluster.inside is not None else 0)
    sent_s = per_host * far * cluster.between.busy_s(_TICKET_BYTES) / cluster.ports_per_host
    if cluster.inside is not None:
        sent_s = max(sent_s, (per_host - 1) * cluster.inside.busy_s(_TICKET_BYTES))
    return sent_s + (cluster.between.flight_s if far else 0.0) + 2 * others * cluster.message_s
