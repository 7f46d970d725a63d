"""Where scaling ends, which strategy wins where, and below which speed of links compression pays.

Owns these three questions; rows answer the first two, simulations on other links the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from syncline.strategy.words import NONE

from ..report.forecast_rows import Predicted
from .asked import Asked, Question, settled
from .cluster import Cluster
from .iterations import simulate

KNEE = 1.5
"""Throughput of twice the workers: one more doubling that brings less than this many times brings too little."""

_SLOWEST, _FASTEST = 1e6, 1e13
"""Speeds of links, in bit/s, that stand for everywhere and nowhere."""

_STEPS = 14

Found = tuple[Mapping[str, Any], ...]


def knees(rows: Sequence[Predicted]) -> Found:
    """By network and strategy: the workers from which a doubling brings less than ``KNEE`` times the throughput.

    Between numbers that are no doubling of each other the same exponent counts. ``workers`` is None where there is no
    such number among those asked for.
    """
    found = []
    for (network, requested), its in _by(rows, lambda row: (row.network, row.requested)):
        ordered = sorted(its, key=lambda row: row.workers)
        if len(ordered) < 2:
            continue
        at = None
        for here, there in pairwise(ordered):
            doublings = math.log2(there.workers / here.workers)
            if there.images_per_s < here.images_per_s * KNEE**doublings:
                at = here.workers
                break
        found.append({"network": network, "strategy": requested, "workers": at})
    return tuple(found)


def winners(rows: Sequence[Predicted]) -> Found:
    """By network and number of workers: the fastest strategy, and whether its interval ends before all others begin."""
    found = []
    for (network, workers), its in _by(rows, lambda row: (row.network, row.workers)):
        best, *others = sorted(its, key=lambda row: row.iteration_s)
        if others:
            clear = all(best.high_s < other.low_s for other in others)
            found.append({"network": network, "workers": workers, "strategy": best.requested, "clear": clear})
    return tuple(found)


def break_even(asked: Question) -> Found:
    """For each strategy with a codec: below which speed of links it beats the same strategy without, in bit/s.

    On the most workers, by bisection over ``between.beta``. ``below_bit_per_s`` is None where ``where`` says
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
    """The speed in bit/s at which both are as fast; 0 where the codec never is faster, infinity where always.

    Each keeps what a run would choose for it on the network as it is.
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
    """The cluster with links of that speed; those of larger messages are as much faster or slower."""
    names = [name for name in cluster.constants if name.startswith("between.") and name.endswith(".beta")]
    base_s = cluster.constants["between.beta"].value
    if base_s == 0:
        return cluster.replaced(dict.fromkeys(names, 8 / bit_per_s))
    return cluster.replaced({name: cluster.constants[name].value / base_s * 8 / bit_per_s for name in names})


def _by(
    rows: Sequence[Predicted], key: Callable[[Predicted], tuple[str, object]]
) -> list[tuple[tuple[str, object], list[Predicted]]]:
    order = list(dict.fromkeys(key(row) for row in rows))
    return [(one, [row for row in rows if key(row) == one]) for one in order]
