"""What an exchange of a bucket takes on a cluster: chains of stages, from the plans and messages that a run would make.

Owns the way from a strategy's parts to seconds on resources. Knows no schedule, no worker and no clock: ``iterations``
puts the chains on one.

All workers are alike here, so that one stands for all: a stage lasts as long as it does for whoever is busiest. The
resources are

    port     the busiest host's port, while gradients go to where they are summed, and results that go the same way
    back     its other direction, in which servers of their own answer: pulls pass pushes
    inside   what connects the ranks of a host
    cores    a rank's share of its host's cores, with a lane for the thread that moves messages and one for training
    serving  a server's cores, where servers are processes of their own

Of an exchange the port is busy with its messages; adding follows, and what is left is latency, which passes beside
other exchanges: flights, and what steps whose busiest ports are not the same take one after the other. What messages
and bytes cost a processor goes on beside the port. Compressed buckets go in pieces, as ``compression.reducers`` cuts
them: one is encoded while another travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Literal

from syncline.codecs import Codec
from syncline.compression.reducers import Flows, Summed, levels, ways
from syncline.compression.reducers.owners import pull_traffic, push_traffic
from syncline.compression.traffic import parts_of
from syncline.costs.virtual import Chain, Stage
from syncline.engine.step import BucketPhase, Phase
from syncline.errors import UsageError
from syncline.nouns import Bucket, Group, Layer
from syncline.plans.plan import COPY, REDUCE, Plan
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import NONE
from syncline.sync import Averages, Mixes, SyncMode, mixes_of

from .cluster import Cluster, CodecCosts
from .loads import Load, Outline, Placement, Shape, flows_outline, plan_load

ENGINE, TRAINING = "engine", "training"

Half = Literal["both", "push", "pull"]
_HALVES: tuple[Half, Half] = ("push", "pull")

Sketch = tuple[Outline | Summed, ...]
"""What travels for a piece, step by step."""


@dataclass(frozen=True, eq=False)
class Exchanges:
    """The exchanges of a model's buckets under a resolved strategy, on a cluster.

    ``codec_costs`` is what the codec takes per byte of gradient.
    """

    strategy: Strategy
    layers: Sequence[Layer]
    buckets: Sequence[Bucket]
    placement: Placement
    cluster: Cluster
    codec_costs: CodecCosts

    def chains(self, operation: BucketPhase) -> Sequence[Chain]:
        """The chains of one operation of one bucket, that of all workers together."""
        key = operation.bucket, operation.phase, operation.step % self._period
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._chains(operation)
        return found

    @cached_property
    def _found(self) -> dict[tuple[int, Phase, int], Sequence[Chain]]:
        return {}

    @cached_property
    def _mode(self) -> SyncMode:
        return self.strategy.sync_mode()

    @cached_property
    def _period(self) -> int:
        """After how many steps who exchanges with whom is as before."""
        return period_of(self._mode, self.group.workers)

    def _chains(self, operation: BucketPhase) -> Sequence[Chain]:
        bucket = self.buckets[operation.bucket]
        if self.strategy.server_holds_weights:
            return self._pushed_and_pulled(bucket)
        if isinstance(self._mode, Mixes):
            return self._summed(self._mode.mix(self.group.workers, operation.step), bucket.nbytes)
        if self.strategy.codec != NONE:
            return self._compressed(bucket)
        return self._summed(self.plan(operation.phase), bucket.nbytes)

    def sent_bytes(self, bucket: Bucket) -> float:
        """What a worker sends for a bucket, in the mean over workers."""
        if self.strategy.server_holds_weights:
            return sum(half.sent_bytes for half in self._halves(bucket))
        if isinstance(self._mode, Mixes):
            plans = mixes_of(self._mode, self.group.workers)
            return sum(self._plan_load(plan, bucket.nbytes).sent_bytes for plan in plans) / len(plans)
        if self.strategy.codec != NONE:
            return sum(self._piece_load(piece).sent_bytes for piece in self._pieces("both", bucket))
        return self._plan_load(self.plan("allreduce"), bucket.nbytes).sent_bytes

    @property
    def group(self) -> Group:
        """The processes."""
        return self.placement.group

    # Gradients as they are.

    def _summed(self, plan: Plan, nbytes: float) -> list[Chain]:
        load = self._plan_load(plan, nbytes)
        return [
            [*self._moved(load), Stage("cores", load.added_bytes * self.cluster.gamma_s_per_byte, ENGINE)],
            [self._processor(load)],
        ]

    def _moved(self, load: Load, resource: str = "port") -> list[Stage]:
        """What has to pass before the bytes have come."""
        return [
            Stage(None, load.flight_s + load.turns_s),
            Stage("inside", load.inside_s),
            Stage(resource, load.port_s),
        ]

    def _processor(self, load: Load, resource: str = "cores") -> Stage:
        """What moving costs the thread that moves, of who is busiest."""
        cluster = self.cluster
        seconds = cluster.bucket_s + load.messages * cluster.message_s + load.moved_bytes * cluster.byte_cpu_s
        return Stage(resource, seconds, ENGINE)

    def _plan_load(self, plan: Plan, nbytes: float) -> Load:
        return plan_load(self.cluster, self.placement, plan, nbytes)

    def plan(self, phase: Phase) -> Plan:
        """What sums gradients, or does one half of it."""
        return self._plans[phase]

    @cached_property
    def _plans(self) -> dict[Phase, Plan]:
        """The plan of the architecture and its halves; which strategies may halve theirs their rules have checked."""
        plan = self.strategy.plan(self.group)
        reduce_scatter, all_gather = _halved(plan)
        return {"allreduce": plan, "reduce_scatter": reduce_scatter, "all_gather": all_gather}

    # Payloads.

    def _compressed(self, bucket: Bucket) -> list[Chain]:
        hosts, pieces = self.strategy.hosts(self.group), self._pieces("both", bucket)
        encoders, share = (len(hosts), 1 / min(map(len, hosts))) if hosts else (self.group.workers, 1.0)
        computing = ways.way_of(self._codec).computing(encoders)
        gradient = bucket.nbytes * share / max(1, len(pieces))
        first_s = gradient * self.codec_costs.encode_s_per_byte
        rest_s = gradient * (
            (computing.encodes - 1) * self.codec_costs.encode_s_per_byte
            + computing.decodes * self.codec_costs.decode_s_per_byte
        )
        return [chain for piece in pieces for chain in self._piece(piece, first_s, rest_s)]

    def _piece(self, piece: Sketch, first_s: float, rest_s: float) -> list[Chain]:
        """One piece: what is computed before its messages, these, and what is computed after the first of them."""
        load = self._piece_load(piece)
        adding_s = load.added_bytes * self.cluster.gamma_s_per_byte
        return [
            [Stage("cores", first_s, ENGINE), *self._moved(load), Stage("cores", rest_s + adding_s, ENGINE)],
            [self._processor(load)],
        ]

    def _pieces(self, half: Half, bucket: Bucket) -> Sequence[Sketch]:
        return _sketches(half, self.strategy, tuple(self.layers), bucket, self.placement, Shape.of(self.cluster))

    def _piece_load(self, piece: Sketch) -> Load:
        total = Load()
        for step in piece:
            if isinstance(step, Summed):
                total = total.then(self._plan_load(self.plan("allreduce"), step.nbytes))
            else:
                total = total.then(step.load(self.cluster))
        return total

    @cached_property
    def _codec(self) -> Codec:
        return self.strategy.codec_object()

    # Weights that others hold, where all pushes are one update.

    def _pushed_and_pulled(self, bucket: Bucket) -> list[Chain]:
        """A push, the owners' update, and the pull behind it."""
        push, pull = self._halves(bucket)
        updating = Stage("serving", self._owned(bucket.nbytes) * self.cluster.update_s_per_byte, TRAINING)
        encoded_s = self.codec_costs.encode_s_per_byte * bucket.nbytes
        decoded_s = self.codec_costs.decode_s_per_byte * bucket.nbytes
        if self.strategy.codec == NONE:
            encoded_s = decoded_s = 0.0
        adding = Stage("serving", push.added_bytes * self.cluster.gamma_s_per_byte, ENGINE)
        taken = Stage("serving", self._owned(self.group.workers * decoded_s), ENGINE)
        answered = Stage("serving", self._owned(encoded_s), ENGINE)
        to, back = self._moved(push), self._moved(pull, "back" if self._apart else "port")
        wire = [Stage("cores", encoded_s, ENGINE), *to, adding, taken, updating, answered, *back]
        wire.append(Stage("cores", decoded_s, ENGINE))
        chains: list[Chain] = [wire, [self._processor(push.then(pull), "serving")]]
        if self._apart:  # who is busiest is then a server, and workers have their own part to move
            pulled = pull.moved_bytes / max(1, self.group.workers) * max(1, len(self._owners))
            mine = Load(moved_bytes=push.sent_bytes + pulled, messages=2 * len(self._owners))
            chains.append([self._processor(mine)])
        return chains

    def _halves(self, bucket: Bucket) -> tuple[Load, Load]:
        if self.strategy.codec == NONE:
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

    def _owned(self, amount: float) -> float:
        """The share of one owner."""
        return amount / max(1, len(self._owners))


_LONGEST = 1000
"""No longer period of a sync mode is simulated."""


def period_of(mode: SyncMode, workers: int) -> int:
    """After how many steps a mode that averages does as before, 1 for others; UsageError where that is too long."""
    if not isinstance(mode, Averages):
        return 1
    steps = list(islice(filter(mode.averages, range(_LONGEST, 3 * _LONGEST + 2)), 2))
    period = steps[1] - steps[0] if len(steps) == 2 else _LONGEST + 1
    mixes: object = mode
    if isinstance(mixes, Mixes):
        period *= mixes.period(workers)
    if period > _LONGEST:
        raise UsageError(f"periods of {period} steps and more are not simulated: predict one of up to {_LONGEST} steps")
    return period


@lru_cache(maxsize=64)
def _halved(plan: Plan) -> tuple[Plan, Plan]:
    reduces, copies = (
        Plan.of(plan.name, plan.world, plan.chunks, plan.rows[plan.op == op], members=plan.members)
        for op in (REDUCE, COPY)
    )
    return reduces, copies


@lru_cache(maxsize=1024)
def _sketches(
    half: Half, strategy: Strategy, layers: tuple[Layer, ...], bucket: Bucket, placement: Placement, shape: Shape
) -> tuple[Sketch, ...]:
    """What travels for the pieces of a bucket, whatever the constants are."""
    group, parts = placement.group, parts_of(strategy.codec_object(), layers, bucket)
    hosts, owners = strategy.hosts(group), _owners_of(strategy, group)
    if half != "both":
        pieces = (push_traffic if half == "push" else pull_traffic)(parts, group.workers, owners)
    elif hosts:
        pieces = levels.traffic(parts, hosts)
    else:
        served = strategy.roles is not None
        pieces = ways.traffic(parts, group.workers, owners if served else range(group.workers), served=served)
    return tuple(
        tuple(flows_outline(shape, placement, step) if isinstance(step, Flows) else step for step in piece)
        for piece in pieces
    )


def _owners_of(strategy: Strategy, group: Group) -> tuple[int, ...]:
    return () if strategy.roles is None else strategy.roles.places(group)
