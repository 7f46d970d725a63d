"""Sensitivity of a prediction to its constants: the interval, the bottleneck, and the link speed where a codec pays.

Owns the simulations with other constants.

Theory. The errors of constants are assumed to be independent, each within the constant's range. An iteration is
simulated with each constant at both ends of its range and all others unchanged. The effects add up in quadrature, as
independent errors do, separately for slower and for faster iterations (the delta method with differences instead of
derivatives: Oehlert, The American Statistician 46, 1992; asymmetric errors: Barlow, 2003). The model's own error, if
measured, is one more effect. This takes two simulations for each constant with a range, without random numbers.

A resource is a group of constants. Its potential saving is the time by which the iteration becomes shorter if these
constants are zero. The bottleneck is the resource with the largest saving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from syncline.costs.cluster import SLOWDOWN, Cluster, Switch
from syncline.costs.iteration import Batches
from syncline.strategy.words import NONE, write

from ..report import units
from .asked import Asked, Question, settled
from .iterations import simulate
from .settings import OURS, Habits, Iteration, Model, Setting

TIE = 0.05
"""A resource whose saving is within this share of the largest is a bottleneck too."""

LEAST = 0.005
"""A resource that saves less than this share of an iteration is not a bottleneck."""

TENFOLD = 0.1

COMPUTING, LOADING, CORES, SHARED = "compute", "loading", "processor cores", "links inside the network"
BANDWIDTH, LATENCY, SERVERS = "bandwidth", "latency", "servers' ports"
INSIDE, ADDING, CODEC, SOFTWARE, UPDATE = "links inside hosts", "adding", "codec", "software", "update"
COPYING, BESIDE = "copying at owners", "slower computing beside messages"

_RESOURCES: Mapping[str, Callable[[str], bool]] = {
    BANDWIDTH: lambda key: key.startswith("between.") and key.endswith(".beta"),
    LATENCY: lambda key: key.startswith("between.") and not key.endswith(".beta"),
    INSIDE: lambda key: key.startswith(("inside.", "native.")),
    ADDING: lambda key: key == "gamma",
    CODEC: lambda key: key.startswith("codecs."),
    SOFTWARE: lambda key: key in ("message", "byte_cpu", "bucket", "tensor", "iteration"),
    UPDATE: lambda key: key == "update",
    COPYING: lambda key: key == "copy",
    BESIDE: lambda key: key.startswith(SLOWDOWN),
}


@dataclass(frozen=True)
class Varied:
    """A simulated iteration, and its simulations with other constants."""

    setting: Setting
    model: Model
    nominal: Iteration
    habits: Habits = OURS

    def seconds(self, cluster: Cluster | None = None, model: Model | None = None) -> float:
        """The iteration time on another cluster of the same shape, or of another model."""
        setting = self.setting if cluster is None else replace(self.setting, cluster=cluster)
        return simulate(setting, model or self.model, self.habits).iteration_s

    def interval(self, model_error: float = 0.0) -> tuple[float, float]:
        """The lower and upper end of the interval in seconds. ``model_error`` is relative to the iteration.

        Several constants may each shorten the same wait, and such effects do not add up. The lower end is therefore at
        least the time with all constants at their low ends.
        """
        nominal_s = self.nominal.iteration_s
        down, up = [model_error * nominal_s], [model_error * nominal_s]
        for effects in self.effects.values():
            down.append(max(0.0, *(-effect for effect in effects)))
            up.append(max(0.0, *effects))
        fastest_s = min(nominal_s, self.seconds(self.setting.cluster.at("low"))) * (1 - model_error)
        return max(0.0, fastest_s, nominal_s - math.hypot(*down)), nominal_s + math.hypot(*up)

    @cached_property
    def effects(self) -> Mapping[str, tuple[float, ...]]:
        """For each constant with a range, the change of the iteration in seconds at both ends of the range."""
        cluster, nominal_s = self.setting.cluster, self.nominal.iteration_s
        found: dict[str, tuple[float, ...]] = {}
        for name, constant in cluster.constants.items():
            if constant.range[0] == constant.range[1] or not self.uses(name):
                continue
            found[name] = tuple(
                0.0 if end_s == constant.value else self.seconds(cluster.replaced({name: end_s})) - nominal_s
                for end_s in constant.range
            )
        return found

    def uses(self, name: str) -> bool:
        """Whether a constant can have an effect: ``copy`` only under asynchronous pushes, a codec's only under it, a
        device's only if the layers compute on it.
        """
        if name == "copy":
            return self.setting.alone
        if name.startswith(SLOWDOWN):
            return name == SLOWDOWN + self.model.device
        return not name.startswith("codecs.") or name in self._own_codec

    @cached_property
    def _own_codec(self) -> frozenset[str]:
        text = write("codecs", self.setting.strategy.codec)
        return frozenset(f"codecs.{text}.{what}" for what in ("encode", "decode"))

    @cached_property
    def would_save_s(self) -> Mapping[str, float]:
        """The potential saving of each resource in seconds, for resources with a cost.

        With fewer servers than workers, the servers' ports carry the most, so the bandwidth counts as theirs.
        """
        cluster, nominal_s = self.setting.cluster, self.nominal.iteration_s
        found: dict[str, float] = {}
        at_once = tuple(part._replace(forward_s=0.0, backward_s=0.0) for part in self.model.parts)
        found[COMPUTING] = nominal_s - self.seconds(model=replace(self.model, parts=at_once))
        if self.model.batches.loading_s or self.model.batches.h2d_s:
            found[LOADING] = nominal_s - self.seconds(model=replace(self.model, batches=Batches()))
        if cluster.cores is not None:
            found[CORES] = nominal_s - self.seconds(replace(cluster, cores=None))
        if not isinstance(cluster.topology, Switch):
            found[SHARED] = nominal_s - self.seconds(replace(cluster, topology=Switch()))
        for resource, belongs in _RESOURCES.items():
            names = self._names(belongs)
            if names:
                called = SERVERS if resource == BANDWIDTH and self._served else resource
                found[called] = nominal_s - self.seconds(cluster.replaced(dict.fromkeys(names, 0.0)))
        return {name: max(0.0, seconds) for name, seconds in found.items()}

    def tenfold_saves_s(self, resource: str) -> float:
        """The seconds that a ten times faster resource saves; the resource has to be a group of constants."""
        belongs = _RESOURCES[BANDWIDTH if resource == SERVERS else resource]
        constants = self.setting.cluster.constants
        there = {name: TENFOLD * constants[name].value for name in self._names(belongs)}
        return max(0.0, self.nominal.iteration_s - self.seconds(self.setting.cluster.replaced(there)))

    def bottleneck(self) -> tuple[str, str]:
        """The names of the bottlenecks, and a text on their remedies."""
        saved, nominal_s = self.would_save_s, self.nominal.iteration_s
        best_s = max(saved.values(), default=0.0)
        if best_s <= LEAST * nominal_s:
            return "none", "no single resource: an iteration gets no shorter without any one of them"
        names = [name for name, seconds in saved.items() if seconds >= (1 - TIE) * best_s]
        hidden = self.nominal.exposed_s <= LEAST * nominal_s
        remedies = [self._remedy(name, hidden) for name in names]
        return " and ".join(names), "; ".join(remedies)

    def _remedy(self, name: str, hidden: bool) -> str:
        saved_s = self.would_save_s[name]
        if name == COMPUTING and hidden:
            return "faster computing, which hides all communication"
        words = _REMEDIES[name]
        if name == SERVERS or name in _RESOURCES:
            saved_s = self.tenfold_saves_s(name)
        return f"{words} saves {units.seconds(saved_s)} of {units.seconds(self.nominal.iteration_s)}"

    def _names(self, belongs: Callable[[str], bool]) -> list[str]:
        constants = self.setting.cluster.constants
        return [name for name, one in constants.items() if belongs(name) and one.value > 0 and self.uses(name)]

    @property
    def _served(self) -> bool:
        group = self.setting.placement.group
        return 0 < group.servers < group.workers


_REMEDIES = {
    COMPUTING: "computing in no time",
    LOADING: "loading in no time",
    CORES: "a core for every thread",
    SHARED: "a switch at the full rate of all ports",
    BANDWIDTH: "10 times the bandwidth",
    SERVERS: "10 times the bandwidth of servers, or 10 times as many,",
    LATENCY: "a tenth of the latency",
    INSIDE: "10 times faster links inside hosts",
    ADDING: "10 times faster adding",
    CODEC: "a 10 times faster codec",
    SOFTWARE: "a tenth of the processor time of messages",
    UPDATE: "a 10 times faster update",
    COPYING: "10 times faster copying",
    BESIDE: "a tenth of the slowdown of computing beside messages",
}


def unranged(cluster: Cluster) -> list[str]:
    """The assumed constants that are not 0 and have no range, so that the intervals exclude their uncertainty."""
    return [
        name
        for name, one in cluster.constants.items()
        if not one.measured and one.source != "given" and one.value > 0 and one.range[0] == one.range[1]
    ]


_SLOWEST, _FASTEST = 1e6, 1e13
"""The range of link speeds in bit/s that is searched. A codec pays nowhere or everywhere if no change lies in it."""

_STEPS = 14

Found = tuple[Mapping[str, Any], ...]


def break_even(asked: Question) -> Found:
    """For each strategy with a codec, the link speed in bit/s below which it beats the same strategy without a codec.

    The search bisects ``between.beta`` for the largest number of workers. ``below_bit_per_s`` is None if ``where`` is
    "everywhere" or "nowhere".
    """
    found = []
    for cluster in asked.clusters:
        for one in asked.asked:
            if one.strategy.codec == NONE or max(asked.workers) < 2:
                continue
            dense = replace(one, strategy=replace(one.strategy, codec=NONE))
            below = _equal_at(asked, one, dense, cluster)
            where = {0.0: "nowhere", math.inf: "everywhere"}.get(below, "below")
            speed = below if where == "below" else None
            found.append(
                {"network": cluster.name, "strategy": one.name, "where": where, "below_bit_per_s": speed,
                 "workers": max(asked.workers)}
            )  # fmt: skip
    return tuple(found)


def _equal_at(asked: Question, coded: Asked, dense: Asked, cluster: Cluster) -> float:
    """The link speed in bit/s at which both are equally fast; 0 if the codec is never faster, infinity if always.

    Both keep the schedule and algorithm that were chosen for the unchanged network.
    """
    workers = max(asked.workers)
    runs = [settled(one, cluster, workers, asked.per_node, asked.model).setting for one in (coded, dense)]

    def pays(bit_per_s: float) -> bool:
        at = with_links_of(cluster, bit_per_s)
        with_codec, without = (
            simulate(replace(run, cluster=at), asked.model, coded.habits).iteration_s for run in runs
        )
        return with_codec < without * (1 - 1e-9)

    if not pays(_SLOWEST):
        return 0.0
    if pays(_FASTEST):
        return math.inf
    low, high = _SLOWEST, _FASTEST
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return math.sqrt(low * high)


def with_links_of(cluster: Cluster, bit_per_s: float) -> Cluster:
    """The cluster with this link speed for small messages; the speeds for larger messages change by the same factor."""
    names = [name for name in cluster.constants if name.startswith("between.") and name.endswith(".beta")]
    base_s = cluster.constants["between.beta"].value
    if base_s == 0:
        return cluster.replaced(dict.fromkeys(names, 8 / bit_per_s))
    return cluster.replaced({name: cluster.constants[name].value / base_s * 8 / bit_per_s for name in names})
