"""A strategy on a number of workers of a cluster: its layers and buckets, and the times of their exchanges.

Owns the conversion of a workload to a model, of a strategy to processes on hosts, and of the strategy's parts to
seconds on resources. Has no clock: ``iterations`` runs these stages on one.

If all workers are alike, one is simulated: a stage of an exchange takes as long as on the busiest rank. Resources:

    port     the busiest host's port in the direction of gradients, and of results without separate servers
    back     the port's other direction, in which separate servers answer while pushes continue
    inside   the links between the ranks of a host, or a message library's collectives there
    layers   the device of the layers, which are slower while the engine's thread is at work
    cores    a rank's share of its host's cores, with a lane for the engine's thread and one for training
    serving  a server's cores, if servers are separate processes

The messages of an exchange occupy the port; the additions follow. The rest is latency, during which other exchanges
proceed: flights, and the extra time if the busiest port differs from step to step. The processor time of messages and
bytes runs in parallel to the port. Compressed buckets travel in the pieces of ``compression.reducers``: one piece is
encoded while another is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np

from syncline.compression.compression import join_cuts
from syncline.compression.reducers import Flows, Summed, levels, ways
from syncline.compression.reducers.owners import pull_traffic, push_traffic
from syncline.compression.reducers.ways import parts_of
from syncline.costs.clock import Chain, Clock, Hindered, Resource, Share, Stage, Used
from syncline.costs.cluster import Cluster, CodecCosts
from syncline.costs.iteration import Batches, Duties, Stretch
from syncline.costs.plans import (
    ClusterShape,
    Load,
    Outline,
    ProcessPlacement,
    flows_outline,
    native_s,
    plan_load,
    plan_s,
)
from syncline.engine.step import BucketPhase, Phase
from syncline.errors import UsageError
from syncline.nouns import Bucket, Group, Layer, numpy_dtype
from syncline.plans.plan import COPY, REDUCE, Plan
from syncline.schedules import Cost
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import NONE, write
from syncline.sync import Averages, Mixes, SyncMode, mixes_of

from ..workloads import EVEN, Speed, Trace, Workload
from .formulas import MOST, MOST_WORKERS, Formula, Size, formula_of, has_formula, is_too_large, name_of, too_many

_AT_ONCE = Batches()


@dataclass(frozen=True)
class Model:
    """The computation of a worker's iteration: its stretches in forward order, tensors, and samples per batch."""

    name: str
    parts: tuple[Stretch, ...]
    layers: tuple[Layer, ...]
    batch: int
    batches: Batches = _AT_ONCE
    speed: Speed = EVEN
    device: str = ""
    """The device on which the layers compute; empty if unknown."""

    @property
    def forward_s(self) -> float:
        """Seconds of the forward pass."""
        return sum(part.forward_s for part in self.parts)

    @property
    def backward_s(self) -> float:
        """Seconds of the backward pass."""
        return sum(part.backward_s for part in self.parts)

    @property
    def computing_s(self) -> float:
        """Seconds of both passes."""
        return self.forward_s + self.backward_s

    @property
    def alike(self) -> bool:
        """Whether all workers take the same time."""
        return self.speed.slow_rank is None and not self.speed.jitter

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(layer.spec.nbytes for layer in self.layers)


def model_of(workload: Workload) -> Model:
    """The model of a workload with a trace. Raises UsageError, with the remedy, for a workload without one."""
    if workload.trace is None:
        raise UsageError(
            f"the times of the layers of the workload {workload.name} are unknown, because it is not a replay: record"
            " a trace of it with `syncline record -o FILE.csv SCRIPT` and predict trace:FILE.csv"
        )
    pipeline = workload.pipeline
    batches = Batches(pipeline.loading, pipeline.h2d or 0.0, pipeline.prefetch)
    return traced(workload.name, workload.trace, workload.batch, batches, workload.speed)


def traced(name: str, trace: Trace, batch: int, batches: Batches = _AT_ONCE, speed: Speed = EVEN) -> Model:
    """The model of a trace, stretched to the workload's least step time."""
    parts: list[Stretch] = []
    layers: list[Layer] = []
    stretch = speed.least_s(trace.total_s) / trace.total_s if trace.total_s > 0 else 1.0
    for one in trace.layers:
        tensors = tuple(range(len(layers), len(layers) + len(one.tensors)))
        parts.append(Stretch(one.forward_s * stretch, one.backward_s * stretch, tensors))
        for number, spec in enumerate(one.tensors):
            # Schedules read times per tensor: the forward time goes to a layer's first tensor, the backward time to
            # the last one, whose gradient is ready first.
            last = number == len(one.tensors) - 1
            named = replace(spec, name=f"{one.name}.{spec.name}")
            layers.append(Layer(named, parts[-1].forward_s * (number == 0), parts[-1].backward_s * last))
    return Model(name, tuple(parts), tuple(layers), batch, batches, speed, trace.device)


ENGINE, TRAINING = "engine", "training"

Half = Literal["both", "push", "pull"]
_HALVES: tuple[Half, Half] = ("push", "pull")

Sketch = tuple[Outline | Summed, ...]
"""The traffic of a piece, step by step."""


class Exchanges:
    """The stages and the traffic of the exchanges of a model's buckets in a setting."""

    def __init__(self, setting: Setting, layers: Sequence[Layer], buckets: Sequence[Bucket]) -> None:
        self.strategy, self.cluster, self.placement = setting.strategy, setting.cluster, setting.placement
        self.group, self.layers, self.buckets = setting.placement.group, layers, buckets
        self._codec_costs, self._mode = codec_costs(setting), setting.strategy.sync_mode()
        self._formula = setting.formula
        self._found: dict[tuple[int, Phase, int], Sequence[Chain]] = {}

    def chains(self, operation: BucketPhase) -> Sequence[Chain]:
        """The chains of stages of one operation on one bucket, in which all workers take part."""
        key = operation.bucket, operation.phase, operation.step % self._period
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._chains(operation)
        return found

    @cached_property
    def _period(self) -> int:
        """The number of steps after which the exchanges repeat."""
        return period_of(self._mode, self.group.workers)

    def _chains(self, operation: BucketPhase) -> Sequence[Chain]:
        bucket = self.buckets[operation.bucket]
        if self.strategy.server_holds_weights:
            return self._pushed_and_pulled(bucket)
        if isinstance(self._mode, Mixes):
            return self._summed(self._plan_load(self._mode.mix(self.group.workers, operation.step), bucket.nbytes))
        if self.strategy.codec != NONE:
            return self._compressed(bucket)
        return self._summed(self._load(operation.phase, bucket.nbytes))

    def sent_bytes(self, bucket: Bucket) -> float:
        """The bytes that a worker sends for a bucket, averaged over the workers."""
        if self.strategy.server_holds_weights:
            return sum(half.sent_bytes for half in self._halves(bucket))
        if isinstance(self._mode, Mixes):
            plans = mixes_of(self._mode, self.group.workers)
            return sum(self._plan_load(plan, bucket.nbytes).sent_bytes for plan in plans) / len(plans)
        if self.strategy.codec != NONE:
            return sum(self._piece_load(piece).sent_bytes for piece in self._pieces("both", bucket))
        return self._load("allreduce", bucket.nbytes).sent_bytes

    # Dense gradients.

    def _summed(self, load: Load) -> list[Chain]:
        return [
            [*self._moved(load), Stage("cores", load.added_bytes * self.cluster.gamma_s_per_byte, ENGINE)],
            [self._processor(load)],
        ]

    def _moved(self, load: Load, resource: str = "port") -> list[Stage]:
        """The stages until the bytes have arrived."""
        return [
            Stage(None, load.flight_s + load.turns_s),
            Stage("inside", load.inside_s),
            Stage(resource, load.port_s),
        ]

    def _processor(self, load: Load, resource: str = "cores") -> Stage:
        """The processor time of the engine's thread on the busiest rank."""
        cluster = self.cluster
        seconds = cluster.bucket_s + load.messages * cluster.message_s + load.moved_bytes * cluster.byte_cpu_s
        return Stage(resource, seconds, ENGINE)

    def _plan_load(self, plan: Plan, nbytes: float) -> Load:
        return plan_load(self.cluster, self.placement, plan, nbytes)

    def _load(self, phase: Phase, nbytes: float) -> Load:
        """The load of the allreduce, or of one of its halves."""
        if self._formula is None:
            return self._plan_load(self.plan(phase), nbytes)
        if phase == "allreduce":
            return self._formula.load(nbytes, self.cluster)
        assert self._formula.halves is not None  # as for plans: only what has true halves is used as halves
        return self._formula.halves[phase == "all_gather"].load(nbytes, self.cluster)

    def plan(self, phase: Phase) -> Plan:
        """The plan of the allreduce, or of one of its halves."""
        return self._plans[phase]

    @cached_property
    def _plans(self) -> dict[Phase, Plan]:
        """The plans by phase. The rules of strategies ensure that only plans with true halves are used as halves."""
        plan = self.strategy.plan(self.group)
        reduce_scatter, all_gather = _halved(plan)
        return {"allreduce": plan, "reduce_scatter": reduce_scatter, "all_gather": all_gather}

    # Compressed gradients.

    def _compressed(self, bucket: Bucket) -> list[Chain]:
        way = ways.way_of(self.strategy.codec_object()) if self.strategy.roles is None else ways.OWNERS
        pieces, computing = self._pieces("both", bucket), way.computing(self._encoders)
        gradient = bucket.nbytes * self._encoded / max(1, len(pieces))
        first_s = gradient * self._codec_costs.encode_s_per_byte
        rest_s = gradient * (
            (computing.encodes - 1) * self._codec_costs.encode_s_per_byte
            + computing.decodes * self._codec_costs.decode_s_per_byte
        )
        library_s = 0.0
        if self.strategy.native_inside and self.strategy.hosts(self.group):
            library_s = native_s(self.cluster, 4 * bucket.elements / max(1, len(pieces)))  # float32 sums
        return [chain for piece in pieces for chain in self._piece(piece, first_s, rest_s, library_s)]

    def _piece(self, piece: Sketch, first_s: float, rest_s: float, library_s: float) -> list[Chain]:
        """The chains of one piece: the first encoding, the messages, and the remaining computation after them."""
        load = self._piece_load(piece)
        load = load._replace(inside_s=load.inside_s + library_s)
        adding_s = load.added_bytes * self.cluster.gamma_s_per_byte
        return [
            [Stage("cores", first_s, ENGINE), *self._moved(load), Stage("cores", rest_s + adding_s, ENGINE)],
            [self._processor(load)],
        ]

    def _pieces(self, half: Half, bucket: Bucket) -> Sequence[Sketch]:
        return _sketches(half, self.strategy, tuple(self.layers), bucket, self.placement, ClusterShape.of(self.cluster))

    def _piece_load(self, piece: Sketch) -> Load:
        total = Load()
        for step in piece:
            if isinstance(step, Summed):
                total = total.then(self._load("allreduce", step.nbytes))
            else:
                total = total.then(step.load(self.cluster))
        return total

    # Weights on servers, with all pushes in one update.

    def _pushed_and_pulled(self, bucket: Bucket) -> list[Chain]:
        """The chains of a push, the owners' update and the pull."""
        push, pull = self._halves(bucket)
        updating = Stage("serving", self._owned(bucket.nbytes) * self.cluster.update_s_per_byte, TRAINING)
        encoded_s = self._codec_costs.encode_s_per_byte * bucket.nbytes
        decoded_s = self._codec_costs.decode_s_per_byte * bucket.nbytes
        if self.strategy.codec == NONE:
            encoded_s = decoded_s = 0.0
        adding = Stage("serving", push.added_bytes * self.cluster.gamma_s_per_byte, ENGINE)
        taken = Stage("serving", self._owned(self._encoders * decoded_s), ENGINE)
        answered = Stage("serving", self._owned(encoded_s), ENGINE)
        to, back = self._moved(push), self._moved(pull, "back" if self._apart else "port")
        wire = [Stage("cores", self._encoded * encoded_s, ENGINE), *to, adding, taken, updating, answered, *back]
        wire.append(Stage("cores", self._encoded * decoded_s, ENGINE))
        chains: list[Chain] = [wire, [self._processor(push.then(pull), "serving")]]
        if self._apart:  # the chains above are of the busiest rank, a server: add the workers' own processor time
            pulled = pull.moved_bytes / max(1, self.group.workers) * max(1, len(self._owners))
            mine = Load(moved_bytes=push.sent_bytes + pulled, messages=2 * len(self._owners))
            chains.append([self._processor(mine)])
        return chains

    def _halves(self, bucket: Bucket) -> tuple[Load, Load]:
        if self.strategy.codec == NONE:
            if self._formula is not None:
                return self._load("reduce_scatter", bucket.nbytes), self._load("all_gather", bucket.nbytes)
            push, pull = (self._plan_load(half, bucket.nbytes) for half in self._half_plans)
            return push, pull
        sides = []
        for half in _HALVES:
            total = Load()
            for piece in self._pieces(half, bucket):
                total = total.then(self._piece_load(piece))
            sides.append(total)
        return sides[0], sides[1]

    @cached_property
    def _half_plans(self) -> tuple[Plan, Plan]:
        return self.strategy.halves(self.group)

    @property
    def _owners(self) -> tuple[int, ...]:
        return _owners_of(self.strategy, self.group)

    @property
    def _apart(self) -> bool:
        return self.group.servers > 0

    @cached_property
    def _hosts(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each host if hosts sum before the codec compresses."""
        return self.strategy.hosts(self.group)

    @property
    def _encoders(self) -> int:
        return len(self._hosts) or self.group.workers

    @cached_property
    def _encoded(self) -> float:
        """The part of a bucket that the busiest worker encodes. A worker that serves encodes its part for its host."""
        if not self._hosts:
            return 1.0
        fewest, owned = min(map(len, self._hosts)), self._owned(1.0)
        serving = [sum(rank in self._owners for rank in ranks) for ranks in self._hosts]
        return max((1 - count * owned) / fewest + (owned if count else 0.0) for count in serving)

    def _owned(self, amount: float) -> float:
        """One owner's share of an amount."""
        return amount / max(1, len(self._owners))


_LONGEST = 1000
"""The longest period of a sync mode that is simulated."""


def period_of(mode: SyncMode, workers: int) -> int:
    """The number of steps after which a mode that averages weights repeats, else 1. UsageError if it is too long."""
    if not isinstance(mode, Averages):
        return 1
    steps = list(islice(filter(mode.averages, range(_LONGEST, 3 * _LONGEST + 2)), 2))
    period = steps[1] - steps[0] if len(steps) == 2 else _LONGEST + 1
    mixes: object = mode
    if isinstance(mixes, Mixes):
        period *= mixes.period(workers)
    if period > _LONGEST:
        raise UsageError(f"a period of {period} steps is too long to simulate: predict one of up to {_LONGEST} steps")
    return period


@lru_cache(maxsize=64)
def _halved(plan: Plan) -> tuple[Plan, Plan]:
    reduces, copies = (
        Plan.of(plan.name, plan.world, plan.chunks, plan.rows[plan.op == op], members=plan.members, native=plan.native)
        for op in (REDUCE, COPY)
    )
    return reduces, copies


@lru_cache(maxsize=1024)
def _sketches(
    half: Half,
    strategy: Strategy,
    layers: tuple[Layer, ...],
    bucket: Bucket,
    placement: ProcessPlacement,
    shape: ClusterShape,
) -> tuple[Sketch, ...]:
    """The traffic of a bucket's pieces, which does not depend on the constants."""
    group, parts = placement.group, parts_of(strategy.codec_object(), layers, bucket)
    hosts, owners = strategy.hosts(group), _owners_of(strategy, group)
    between: levels.Foreseen = partial(ways.traffic, served=bool(owners))
    if half != "both":
        between = push_traffic if half == "push" else pull_traffic
    if hosts:
        library = strategy.native_inside and shape.has_native
        up, down = half != "pull" and not library, half != "push" and not library
        element_bytes = numpy_dtype(bucket.dtype).itemsize if half == "pull" else 4
        pieces = levels.traffic(parts, hosts, between, servers=owners, up=up, down=down, element_bytes=element_bytes)
    else:
        pieces = between(parts, group.workers, owners or range(group.workers))
    return tuple(
        tuple(flows_outline(shape, placement, step) if isinstance(step, Flows) else step for step in piece)
        for piece in pieces
    )


def _owners_of(strategy: Strategy, group: Group) -> tuple[int, ...]:
    return () if strategy.roles is None else strategy.roles.places(group)


class Laid(NamedTuple):
    """Buckets in the order of the schedule, with their priorities."""

    buckets: Sequence[Bucket]
    priorities: Sequence[float]


@dataclass(frozen=True)
class Setting:
    """A resolved strategy on a number of workers of a cluster."""

    strategy: Strategy
    cluster: Cluster
    placement: ProcessPlacement
    measured: Cost | None = None
    """Measured seconds of an allreduce among all workers by its bytes, in place of the plan's time."""

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.placement.group.workers

    @property
    def alone(self) -> bool:
        """Whether workers push and pull independently of each other."""
        return self.strategy.server_holds_weights and not self.strategy.sync_mode().merges

    @cached_property
    def formula(self) -> Formula | None:
        """The closed form of an exchange whose plan is too large to simulate, else None.

        Raises UsageError, with the remedy, if the plan is too large and there is no closed form.
        """
        part, group, per_host = self.strategy.architecture, self.placement.group, self.placement.per_host
        roles = self.strategy.roles
        size = Size(group.workers, per_host, 1 if roles is None else roles.owners)
        if not is_too_large(part, size):
            return None
        name = name_of(part, size)
        codec = self.strategy.codec
        known = codec == NONE or ways.way_of(self.strategy.codec_object()).carrier is None
        if known and has_formula(name, size, self.cluster):
            return formula_of(name, size, self.cluster)
        where = f"on {self.cluster.topology} with {per_host} workers on a host"
        without = (
            f"{where} it has no closed form"
            if known
            else f"payloads of codec={write('codecs', codec)} have no closed form"
        )
        raise UsageError(
            f"the plan of {write('algorithms', part)} has {too_many(part, size)}, at most {MOST:,} messages or"
            f" {MOST_WORKERS:,} workers are simulated, and {without}: predict fewer workers, or another strategy"
        )

    @property
    def is_known(self) -> bool:
        """Whether the exchange has a plan that can be simulated, or a closed form."""
        try:
            return self.formula is not None or bool(self.strategy.plan(self.placement.group))
        except UsageError:
            return False


def setting_of(strategy: Strategy, cluster: Cluster, workers: int, per_host: int | None = None) -> Setting:
    """Resolve a strategy for a cluster. Raises UsageError if it cannot run there."""
    per_host = min(workers, per_host or cluster.per_host)
    nodes = tuple(worker // per_host for worker in range(workers))
    local = strategy.roles is not None and strategy.roles.local  # hosts of one worker push too
    group = Group(workers, strategy.servers, nodes if per_host > 1 or local else ())
    placement = ProcessPlacement(group, per_host)
    setting = Setting(strategy.resolve(group, hosts=placement.count, planned=False), cluster, placement)
    if setting.formula is None:
        setting.strategy.plan(group)  # raises if there is none for so many workers
    return setting


def lay_out(setting: Setting, model: Model) -> Laid:
    """The buckets of a run. A schedule that measures exchanges gets the cluster's times instead."""
    strategy = setting.strategy
    schedule = strategy.schedule_object()
    buckets: Sequence[Bucket] = schedule.buckets(model.layers, exchange_cost(setting) if schedule.measures else None)
    if strategy.codec != NONE:
        buckets = join_cuts(strategy.codec_object(), model.layers, buckets)
    return Laid(buckets, [schedule.priority(bucket) for bucket in buckets])


@dataclass(frozen=True)
class Habits:
    """Properties of a system that a strategy does not determine. The defaults are Syncline's.

    ``in_flight`` replaces the schedule's number of concurrent exchanges; 1 is a system that waits for each exchange.
    ``tickets`` says whether workers agree on each step before its first exchange.
    """

    in_flight: int | None = None
    tickets: bool = True


OURS = Habits()


@dataclass(frozen=True)
class Iteration:
    """The mean iteration: its seconds, the seconds of its stages on the slowest worker, and the busy time of resources.

    ``exposed_s`` is the time that the training thread waits for communication, ``busy_s`` the busy time of each
    resource. If pushes are not merged, ``staleness`` counts steps by the worker's lead over the slowest in clocks.
    """

    iteration_s: float
    loading_s: float
    h2d_s: float
    forward_s: float
    backward_s: float
    update_s: float
    other_s: float
    exposed_s: float
    busy_s: Mapping[str, float]
    staleness: Mapping[int, int] = field(default_factory=dict)


def duties_of(setting: Setting, model: Model, laid: Laid) -> Duties:
    """The work of a worker's training thread."""
    cluster = setting.cluster

    def update(bucket: int) -> Sequence[Stage]:
        seconds = laid.buckets[bucket].nbytes * cluster.update_s_per_byte
        return () if setting.strategy.server_holds_weights else (Stage("cores", seconds, TRAINING),)

    def taking(seconds: float) -> tuple[Stage, ...]:
        return (Stage("cores", seconds, TRAINING),)

    return Duties(
        model.parts,
        "layers" if cluster.slowdown(model.device) else None,
        model.batches,
        update,
        gradient=taking(cluster.tensor_s),
        iteration=taking(cluster.iteration_s),
        averaging=taking(model.nbytes * cluster.update_s_per_byte),
    )


class Machines:
    """The cores of the hosts, shared by the workers of a host, or by all processes if all hosts are one machine.

    A server has a host of its own with one core. If all hosts are one machine, servers and workers compete for its
    cores. Equal processes are simulated as one process that uses the cores of all of them.
    """

    def __init__(self, setting: Setting, clock: Clock) -> None:
        self._clock, self._cluster, placement = clock, setting.cluster, setting.placement
        self._together = placement.group.workers if self._cluster.one_machine else placement.per_host
        self._servers = placement.group.servers
        self._cores = self._new()

    def all_workers(self) -> Share:
        """The cores of one worker that is simulated for all."""
        return Share(self._cores, "workers", self._together)

    def worker(self, rank: int) -> Share:
        """The cores of one of several simulated workers."""
        if self._cluster.one_machine:
            return Share(self._cores, f"worker {rank}")
        return Share(self._new(), "worker", self._together)

    def of(self, model: Model, cores: Share, engine: Share) -> dict[str, Used]:
        """The resources of a worker's training thread: its cores, and its layers' device beside the engine's thread."""
        found: dict[str, Used] = {"cores": cores}
        factor = self._cluster.slowdown(model.device)
        if factor:
            found["layers"] = Hindered(self._clock, engine, ENGINE, factor)
        return found

    def serving(self, owners: int) -> Used:
        """The cores of a server, or the cores that one of ``owners`` workers uses for serving."""
        if self._cluster.one_machine:
            return Share(self._cores, "owners", self._servers or owners)
        return Resource(self._clock)

    def _new(self) -> Resource:
        return Resource(self._clock, math.inf if self._cluster.cores is None else self._cluster.cores)


def stretch_of(model: Model, rank: int) -> Callable[[int], float]:
    """A worker's factor on the times of layers, as a function of the step. Random delays need steps in order."""
    speed = model.speed
    if not speed.jitter:
        return lambda _: speed.slowed(rank)
    random = np.random.default_rng((0, rank))
    return lambda _: speed.slowed(rank) + speed.jitter * float(random.exponential())


def codec_costs(setting: Setting) -> CodecCosts:
    """The codec's times per byte of gradient; zero if the cluster has none for it."""
    strategy = setting.strategy
    if strategy.codec == NONE:
        return CodecCosts(0.0, 0.0)
    return setting.cluster.codecs.get(write("codecs", strategy.codec), CodecCosts(0.0, 0.0))


def exchange_cost(setting: Setting) -> Cost:
    """The seconds of a single exchange by its bytes, for schedules: linear interpolation between some sizes."""
    if setting.measured is not None:
        return setting.measured
    sizes = [0, *(1 << power for power in range(6, 33, 2))]
    if setting.formula is not None:
        seconds = [setting.formula.seconds(nbytes, setting.cluster) for nbytes in sizes]
    else:
        plan = setting.strategy.plan(setting.placement.group)
        seconds = [plan_s(plan, nbytes, setting.cluster, setting.placement) for nbytes in sizes]
    return lambda nbytes: float(np.interp(nbytes, sizes, seconds))
