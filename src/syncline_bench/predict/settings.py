"""A strategy as it runs on so many workers of a cluster: processes on hosts, buckets, what workers do beside waiting.

Owns what all simulations of iterations share, and what they find out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from syncline.compression.cuts import join_cuts
from syncline.costs.virtual import Clock, Resource, Share, Stage, Used
from syncline.costs.worker import Duties
from syncline.nouns import Bucket, Group
from syncline.schedules import Cost
from syncline.strategy.parts import write
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import NONE

from .cluster import Cluster, CodecCosts
from .exchanges import TRAINING
from .loads import Placement, plan_load
from .models import Model


class Laid(NamedTuple):
    """Buckets in the order in which they go, with their priorities."""

    buckets: Sequence[Bucket]
    priorities: Sequence[float]


@dataclass(frozen=True)
class Setting:
    """A strategy as it runs on so many workers of a cluster."""

    strategy: Strategy
    cluster: Cluster
    placement: Placement
    measured: Cost | None = None
    """Seconds of one allreduce among all by its bytes, as somebody has measured it, in place of what the plan takes."""

    @property
    def workers(self) -> int:
        """How many there are."""
        return self.placement.group.workers

    @property
    def alone(self) -> bool:
        """Whether workers push and pull by themselves."""
        return self.strategy.server_holds_weights and not self.strategy.sync_mode().merges


def setting_of(strategy: Strategy, cluster: Cluster, workers: int, per_host: int | None = None) -> Setting:
    """What a strategy becomes there; raises UsageError where it cannot run so."""
    per_host = min(workers, per_host or cluster.per_host)
    nodes = tuple(worker // per_host for worker in range(workers))
    group = Group(workers, strategy.servers, nodes if per_host > 1 else ())
    placement = Placement(group, per_host)
    return Setting(strategy.resolve(group, hosts=placement.count), cluster, placement)


def lay_out(setting: Setting, model: Model) -> Laid:
    """The buckets that a run would have: those of the schedule, where it costs what the cluster says."""
    strategy = setting.strategy
    schedule = strategy.schedule_object()
    buckets: Sequence[Bucket] = schedule.buckets(model.layers, exchange_cost(setting) if schedule.measures else None)
    if strategy.codec != NONE:
        buckets = join_cuts(strategy.codec_object(), model.layers, buckets)
    return Laid(buckets, [schedule.priority(bucket) for bucket in buckets])


@dataclass(frozen=True)
class Habits:
    """What a system does that no strategy says; those of a run here are the defaults.

    ``in_flight`` replaces the schedule's, 1 for a system that waits for each exchange. ``tickets``: workers agree on a
    step before anything of it goes.
    """

    in_flight: int | None = None
    tickets: bool = True


OURS = Habits()


@dataclass(frozen=True)
class Iteration:
    """One iteration in the mean: seconds of it, of its stages on the slowest worker, and of resources in use.

    ``exposed_s`` is what the training thread waits for communication, ``busy_s`` for how long each resource was used.
    ``staleness`` counts steps by how many clocks the worker was ahead of the slowest, where pushes are not merged.
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
    """What the training thread of a worker does beside waiting."""
    cluster = setting.cluster

    def update(bucket: int) -> Sequence[Stage]:
        seconds = laid.buckets[bucket].nbytes * cluster.update_s_per_byte
        return () if setting.strategy.server_holds_weights else (Stage("cores", seconds, TRAINING),)

    def taking(seconds: float) -> tuple[Stage, ...]:
        return (Stage("cores", seconds, TRAINING),)

    return Duties(
        model.parts,
        model.batches,
        update,
        gradient=taking(cluster.tensor_s),
        iteration=taking(cluster.iteration_s),
        averaging=taking(model.nbytes * cluster.update_s_per_byte),
    )


class Machines:
    """The cores of hosts, and who shares them: workers of one host, or all processes where hosts are one machine.

    Servers have hosts of their own, and one core each, unless all hosts are one machine: what they compute is then held
    up by workers, and holds them up. Those that are alike are simulated as one, which uses the cores of as many.
    """

    def __init__(self, setting: Setting, clock: Clock) -> None:
        self._clock, self._cluster, placement = clock, setting.cluster, setting.placement
        self._together = placement.group.workers if self._cluster.one_machine else placement.per_host
        self._servers = placement.group.servers
        self._cores = self._new()

    def all_workers(self) -> Used:
        """What every worker has, as one of them has it."""
        return Share(self._cores, "workers", self._together)

    def worker(self, rank: int) -> Used:
        """What one worker has that is not like the others."""
        if self._cluster.one_machine:
            return Share(self._cores, f"worker {rank}")
        return Share(self._new(), "worker", self._together)

    def serving(self, owners: int) -> Used:
        """What every server has; of so many ``owners`` that are workers, what they have for it."""
        if self._cluster.one_machine:
            return Share(self._cores, "owners", self._servers or owners)
        return Resource(self._clock)

    def _new(self) -> Resource:
        return Resource(self._clock, math.inf if self._cluster.cores is None else self._cluster.cores)


def stretch_of(model: Model, rank: int) -> Callable[[int], float]:
    """What the times of a step's layers are multiplied by, on a worker."""
    speed = model.speed
    if not speed.jitter:
        return lambda _: speed.slowed(rank)
    random = np.random.default_rng((0, rank))
    return lambda _: speed.slowed(rank) + speed.jitter * float(random.exponential())


def codec_costs(setting: Setting) -> CodecCosts:
    """What the codec of a setting takes per byte of gradient, as far as the cluster says."""
    strategy = setting.strategy
    if strategy.codec == NONE:
        return CodecCosts(0.0, 0.0)
    return setting.cluster.codecs.get(write("codecs", strategy.codec), CodecCosts(0.0, 0.0))


def exchange_cost(setting: Setting) -> Cost:
    """The seconds of an exchange by itself, as schedules ask for them: along straight lines between some sizes."""
    if setting.measured is not None:
        return setting.measured
    cluster, plan = setting.cluster, setting.strategy.plan(setting.placement.group)
    sizes = [0, *(1 << power for power in range(6, 33, 2))]
    loads = [plan_load(cluster, setting.placement, plan, nbytes) for nbytes in sizes]
    seconds = [one.passing_s + one.added_bytes * cluster.gamma_s_per_byte for one in loads]
    return lambda nbytes: float(np.interp(nbytes, sizes, seconds))
