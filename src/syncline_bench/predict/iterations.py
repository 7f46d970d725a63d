"""Simulates training iterations under a strategy on a cluster, on a virtual clock.

The schedule, the sync mode, the buckets, the state machine of a step and the order of operations are the code of a real
run. ``settings`` gives the times of each exchange.

**Together.** If all workers are alike, one of them is simulated. If they differ (a slow worker, or random delays), all
are simulated, and a collective operation starts when the last worker has submitted it. This holds for gossip too,
because workers of a run exchange tickets with all before they send weights to neighbours. If all workers start each
step at the same time and wait for each other within it, they differ only in the time of their layers. In this case one
worker is simulated that is in each step as slow as the slowest of all.

**Apart.** Under asynchronous and stale training, and with backup workers, every push is an update of its own. The
``Ledger`` of a run decides when a worker is released; its messages come from simulated workers that push and pull
independently. All S owners have equal parts of every bucket, so one owner is simulated: each worker pushes it the S-th
part of a bucket, and the worker's port counts S such messages. The owner handles pushes in the order of their arrival.
Workers that serve count as owners with ports of their own.

Not simulated: the interpreter's time between layers, and ports that idle during an urgent exchange because another
rank is late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from syncline.compression.reducers.ways import parts_of
from syncline.costs.clock import Begin, Call, Chain, Chains, Clock, Operations, Resource, Share, Stage, Used
from syncline.costs.iteration import Handed, VirtualWorker, run
from syncline.costs.plans import ProcessPlacement
from syncline.engine.step import BucketPhase, Steps, Submit
from syncline.errors import UsageError
from syncline.nouns import Group
from syncline.serving import protocol
from syncline.serving.protocol import ALL, Ledger, Request
from syncline.strategy.words import NONE
from syncline.sync import Averages, Mixes, backup_of

from .fabric import Fabric
from .settings import (
    OURS,
    Exchanges,
    Habits,
    Iteration,
    Laid,
    Machines,
    Model,
    Setting,
    codec_costs,
    duties_of,
    lay_out,
    period_of,
    stretch_of,
)

_APART_BEFORE, _APART_COUNTED, _APART_DRAWN = 5, 12, 60
"""Steps of the slowest worker that are skipped, and those that count: without and with random delays."""


_MOST_WORKERS = 128


class Apart:
    """The simulation of workers that push and pull independently. Raises UsageError for too many workers."""

    def __init__(self, setting: Setting, model: Model, habits: Habits) -> None:
        if setting.workers > _MOST_WORKERS:
            raise UsageError(
                f"{setting.strategy}: asynchronous workers are simulated one by one, which takes too long for"
                f" {setting.workers}: predict up to {_MOST_WORKERS}"
            )
        self._setting, self._model = setting, model
        self._cluster, self._workers = setting.cluster, range(setting.workers)
        self._laid = lay_out(setting, model)
        self._schedule = setting.strategy.schedule_object()
        # In a run a pull is an operation of its own, so a push that waits for its pull blocks no other push.
        self._in_flight = habits.in_flight or len(self._laid.buckets) * setting.workers
        self._clock = Clock()
        roles = setting.strategy.roles
        assert roles is not None
        self._owners = roles.owners
        self._codec = codec_costs(setting)
        self._payload = [self._payload_bytes(bucket) for bucket in range(len(self._laid.buckets))]
        placement = ProcessPlacement(Group(setting.workers, 1), setting.placement.per_host)
        self._fabric = Fabric(self._clock, self._cluster, placement)
        self._owner, self._owners_host = setting.workers, placement.count - 1
        self._fabric.narrow(range(self._owners_host), self._owners)
        self._machines = Machines(setting, self._clock)
        self._serving = self._machines.serving(self._owners)
        by_bucket = self._schedule.apply == "layer"
        self._parts = range(len(self._laid.buckets)) if by_bucket else (ALL,)
        self._ledger = Ledger(setting.workers, setting.strategy.sync_mode(), tuple(self._parts))
        self._left = [[len(self._laid.buckets)] for _ in self._workers]
        self._pulls: dict[tuple[int, int], Call] = {}  # by worker and bucket: the call at the end of its pull
        self._version = [0] * len(self._laid.buckets)
        self._sent = [[0] * len(self._laid.buckets) for _ in self._workers]
        self._staleness: Counter[int] = Counter()
        self._made = [self._worker(worker) for worker in self._workers]

    def run(self) -> Iteration:
        """Simulate. The time of an iteration is the time in which all workers together make one step per worker."""
        counted = _APART_DRAWN if self._model.speed.jitter else _APART_COUNTED
        begun_s, begun = self._look(_APART_BEFORE)
        ended_s, ended = self._look(_APART_BEFORE + counted)
        steps = sum(after - before for before, after in zip(begun, ended, strict=True))
        iteration_s = (ended_s - begun_s) * len(self._workers) / steps
        mean = dict.fromkeys(("loading_s", "h2d_s", "forward_s", "backward_s", "update_s", "other_s"), 0.0)
        for worker in self._made:
            for name in mean:
                mean[name] += getattr(worker.spent, name) / len(worker.spent.ends_s) / len(self._made)
        exposed_s = sum(one.spent.waited_s / len(one.spent.ends_s) for one in self._made) / len(self._made)
        total = sum(len(one.spent.ends_s) for one in self._made)
        busy_s = dict.fromkeys(("back", "inside", "cores"), 0.0) | {
            "port": self._fabric.sent_s[self._owners_host] / total * len(self._workers),
            "serving": self._serving.busy_s / total * len(self._workers),
        }
        return Iteration(
            iteration_s=iteration_s, exposed_s=exposed_s, busy_s=busy_s, staleness=dict(self._staleness), **mean
        )

    def _look(self, steps: int) -> tuple[float, list[int]]:
        """Run until the slowest worker has made ``steps``. Returns the time, and the steps of each worker."""
        self._clock.run(over=lambda: all(len(worker.spent.ends_s) >= steps for worker in self._made))
        made = [len(worker.spent.ends_s) for worker in self._made]
        if min(made) < steps:
            raise UsageError(f"under {self._setting.strategy} the simulated training deadlocks: please report this")
        return self._clock.now_s, made

    def _worker(self, worker: int) -> VirtualWorker:
        steps = Steps(
            len(self._model.layers), self._laid, self._schedule, self._setting.strategy.sync_mode(), held=True
        )
        cores = self._machines.worker(worker)
        operations = Operations(self._clock, partial(self._push, worker), self._in_flight)
        duties = duties_of(self._setting, self._model, self._laid)
        handed = Handed(operations.submit, lambda _: None)
        found = VirtualWorker(self._clock, duties, steps, handed, stretch_of(self._model, worker))
        # Equal workers that start together would stay in step and always compete for the ports. Stagger their starts.
        begin_s = worker / len(self._workers) * self._model.computing_s
        own = self._machines.of(self._model, cores, cores)
        self._clock.at(begin_s, partial(run, self._clock, found.iterations(), own, operations))
        return found

    def _payload_bytes(self, number: int) -> float:
        """The size of a push of this bucket."""
        bucket = self._laid.buckets[number]
        if self._setting.strategy.codec == NONE:
            return float(bucket.nbytes)
        parts = parts_of(self._setting.strategy.codec_object(), self._model.layers, bucket)
        return float(sum(part.codec.wire_bytes(part.state.spec)[0] for part in parts))

    # The path of one worker's bucket: to the owner, through the update, and back.

    def _push(self, worker: int, submit: Submit, serial: int, ended: Call) -> None:
        bucket = submit.operation.bucket
        self._pulls[worker, bucket] = ended
        encode_s = self._laid.buckets[bucket].nbytes * self._codec.encode_s_per_byte
        urgency = submit.priority, serial, 0
        come = partial(self._pushed, worker, bucket, submit.operation.step + 1)
        nbytes = self._payload[bucket] / self._owners
        self._clock.after(encode_s, partial(self._fabric.send, worker, self._owner, nbytes, urgency, come))

    def _pushed(self, worker: int, bucket: int, clock: int) -> None:
        """Charge the owner for a bucket that has arrived, and tell its ledger, per bucket or once per step."""
        taken_s = self._laid.buckets[bucket].nbytes / self._owners * self._codec.decode_s_per_byte
        taken_s += self._moving_s(self._payload[bucket] / self._owners)
        told = bucket
        if len(self._parts) == 1 and self._parts[0] == ALL:
            self._left[worker][0] -= 1
            told = ALL
            if self._left[worker][0]:
                self._serving.use(taken_s, lambda: None)
                return
            self._left[worker][0] = len(self._laid.buckets)
        self._serving.use(taken_s, partial(self._handle, Request("push", worker, clock, {}, told)))

    def _handle(self, request: Request) -> None:
        for action in self._ledger.handle(request):
            self._act(action)

    def _act(self, action: protocol.Action) -> None:
        if isinstance(action, protocol.Measure):
            return
        buckets = range(len(self._laid.buckets)) if action.bucket == ALL else (action.bucket,)
        owned = sum(self._laid.buckets[bucket].nbytes for bucket in buckets) / self._owners
        if isinstance(action, protocol.Apply):
            for bucket in buckets:
                self._version[bucket] += 1
            copied_s = 0.0 if action.worker == ALL else owned * self._cluster.copy_s_per_byte
            self._serving.use(copied_s + owned * self._cluster.update_s_per_byte, lambda: None)
        elif isinstance(action, protocol.Add):
            self._serving.use(owned * self._cluster.gamma_s_per_byte, lambda: None)
        else:
            for worker, ahead in zip(action.workers, action.ahead, strict=True):
                if action.bucket in (ALL, 0):
                    self._staleness[ahead] += 1
                for bucket in buckets:
                    self._release(worker, bucket)

    def _release(self, worker: int, bucket: int) -> None:
        """Copy and send weights to a worker: the updates that it lacks, or the whole bucket if that is smaller."""
        nbytes = self._laid.buckets[bucket].nbytes
        lag = self._version[bucket] - self._sent[worker][bucket]
        self._sent[worker][bucket] = self._version[bucket]
        sent = min(float(nbytes), lag * self._payload[bucket]) / self._owners
        urgency = self._laid.priorities[bucket], 0, 0
        ended = self._pulls.pop((worker, bucket))
        decode_s = 0.0 if self._setting.strategy.codec == NONE else nbytes * self._codec.decode_s_per_byte
        back = partial(self._clock.after, decode_s, ended)
        copied_s = nbytes / self._owners * self._cluster.copy_s_per_byte + self._moving_s(sent)
        send = partial(self._fabric.send, self._owner, worker, sent, urgency, back)
        self._serving.use(copied_s, send)

    def _moving_s(self, nbytes: float) -> float:
        """The processor time of an owner for a message."""
        return self._cluster.message_s + nbytes * self._cluster.byte_cpu_s


_BEFORE, _COUNTED = 3, 4
"""Iterations that are skipped until they repeat, and the number whose mean counts, rounded up to whole periods."""

_DRAWN = 40
"""The number of iterations whose mean counts with random delays."""

_TICKET_BYTES = 32
"""The size of the ticket that a worker sends to the others before the operations of a step."""

_STAGES = ("loading_s", "h2d_s", "forward_s", "backward_s", "update_s", "other_s")


def simulate(setting: Setting, model: Model, habits: Habits = OURS) -> Iteration:
    """Simulate a training. Returns the mean of some iterations after the first ones."""
    if setting.alone:
        return Apart(setting, model, habits).run()
    return Together(setting, model, habits).run()


class Together:
    """The simulation of workers that all take part in each exchange."""

    def __init__(self, setting: Setting, model: Model, habits: Habits) -> None:
        self._setting, self._model, self._habits = setting, model, habits
        self._laid = lay_out(setting, model)
        self._schedule = setting.strategy.schedule_object()
        self._clock = Clock()
        self._machines = Machines(setting, self._clock)
        self._engine = self._machines.all_workers()
        self._resources = resources_of(setting, self._clock, self._machines, self._engine)
        exchanges = Exchanges(setting, model.layers, self._laid.buckets)
        in_flight = habits.in_flight or self._schedule.in_flight
        self._operations = Operations(self._clock, self._begin(exchanges), in_flight)
        self._met: dict[object, int] = {}
        self._slowest = Slowest(model, setting.workers) if not model.alike and self._begin_together else None
        alone = model.alike or self._slowest is not None
        self._workers = [self._worker(rank) for rank in range(1 if alone else setting.workers)]

    def run(self) -> Iteration:
        """Simulate. Raises UsageError if the training deadlocks."""
        least = _DRAWN if self._model.speed.jitter else _COUNTED
        period = period_of(self._setting.strategy.sync_mode(), self._setting.workers)
        before, counted = (1, 1) if self._repeats else (_BEFORE, -(-least // period) * period)
        for rank, worker in enumerate(self._workers):
            cores = self._engine if len(self._workers) == 1 else self._machines.worker(rank)
            own = self._machines.of(self._model, cores, self._engine)
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

    def _begin(self, exchanges: Exchanges) -> Begin:
        """The function that starts an operation on the resources."""
        measured = self._setting.measured is not None
        chains = partial(measured_chains, self._setting, self._laid) if measured else exchanges.chains
        return Chains(self._clock, self._resources, chains)

    @property
    def _all_in_all(self) -> bool:
        """Whether all workers wait for each other in every step."""
        mode = self._setting.strategy.sync_mode()
        return mode.merges and not isinstance(mode, Averages | Mixes) and not backup_of(mode)

    @property
    def _repeats(self) -> bool:
        """Whether no iteration overlaps the next, so that all are equal."""
        alike = self._model.alike and not self._model.batches.prefetch
        return self._schedule.apply == "step" and self._all_in_all and alike

    @property
    def _begin_together(self) -> bool:
        """Whether all workers start each step at the same time and never compete for cores."""
        return self._schedule.apply != "next_step" and self._all_in_all and self._setting.cluster.cores is None

    def _look(self, iterations: int) -> tuple[dict[str, float], dict[str, float]]:
        """Run until all have made ``iterations``. Returns the times of the slowest worker and of the resources."""
        self._clock.run(over=lambda: all(len(worker.spent.ends_s) >= iterations for worker in self._workers))
        last = max((worker.spent for worker in self._workers), key=lambda spent: spent.forward_s + spent.backward_s)
        if len(last.ends_s) < iterations:
            raise UsageError(f"under {self._setting.strategy} the simulated training deadlocks: please report this")
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
        """Count the arrival of a simulated worker. True for the last one, which then starts the operation."""
        came = self._met.pop(what, 0) + 1
        if came < len(self._workers):
            self._met[what] = came
        return came == len(self._workers)


class Slowest:
    """The factor on the times of a step's layers, on the slowest of all workers in that step."""

    def __init__(self, model: Model, workers: int) -> None:
        self._stretches = [stretch_of(model, rank) for rank in range(workers)]
        self._steps: list[list[float]] = []

    def __call__(self, step: int) -> float:
        """The factor of the next step; steps follow each other."""
        self._steps.append([stretch(step) for stretch in self._stretches])
        return max(self._steps[-1])

    def waits(self, begin: int, end: int) -> float:
        """The mean excess of the slowest worker per step over the one worker that is slowest over all these steps."""
        steps = self._steps[begin:end]
        return (sum(map(max, steps)) - max(map(sum, zip(*steps, strict=True)))) / len(steps)


def measured_chains(setting: Setting, laid: Laid, operation: BucketPhase) -> Sequence[Chain]:
    """An exchange that takes its measured time. Raises UsageError if it is not a plain allreduce."""
    strategy = setting.strategy
    if setting.measured is None or strategy.server_holds_weights or strategy.codec != NONE:
        raise UsageError(f"the measured times are of a plain allreduce, unlike {strategy}: use ring, for example")
    if operation.phase != "allreduce":
        raise UsageError(f"the measured times are of a whole allreduce, which {strategy} halves: use wait_free")
    return [[Stage("port", setting.measured(laid.buckets[operation.bucket].nbytes))]]


def resources_of(setting: Setting, clock: Clock, machines: Machines, cores: Share) -> dict[str, Used]:
    """The resources that the exchanges of a setting use, by name (see ``settings``)."""
    found: dict[str, Used] = {name: Resource(clock, ranked=True) for name in ("port", "back", "inside")}
    found["cores"] = cores
    found["serving"] = machines.serving(0) if setting.placement.group.servers else found["cores"]
    return found


def agreeing_s(setting: Setting) -> float:
    """The seconds of the exchange of tickets at the start of a step: a small message from each worker to all others."""
    cluster, per_host, others = setting.cluster, setting.placement.per_host, setting.workers - 1
    far = others - (per_host - 1 if cluster.inside is not None else 0)
    sent_s = per_host * far * cluster.between.busy_s(_TICKET_BYTES) / cluster.ports_per_host
    if cluster.inside is not None:
        sent_s = max(sent_s, (per_host - 1) * cluster.inside.busy_s(_TICKET_BYTES))
    return sent_s + (cluster.between.flight_s if far else 0.0) + 2 * others * cluster.message_s
