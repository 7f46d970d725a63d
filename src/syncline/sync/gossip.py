"""Gossip: after its update each worker averages its weights with a few others' (Lian et al., NeurIPS 2017).

    x_i <- sum_j W_ij x_j        W_ij = 1 / (neighbours + 1) for i itself and its neighbours, else 0

W is symmetric, or the mean of the identity and a rotation, so its rows and columns sum to 1. Mixing therefore preserves
the mean of all weights, and workers approach it over the steps, though no two of them need to be equal.

    ring           two neighbours, one on each side, in every step
    exponential    one in every step, at the distances 1, 2, 4, ... in turn (Assran et al., "Stochastic gradient push",
                   ICML 2019); with 2^k workers k steps without an update make all equal

A worker sends its weights to one or two others, whatever the number of workers. ``exponential`` is the default: on
digits both graphs reach the same accuracy (docs/concepts/coordination.md), and a ring sends twice as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ..plans.plan import REDUCE, Plan
from ..registry import register
from ._periodic import Period, check_steps

Graph = Literal["ring", "exponential"]


@register("sync", "gossip", examples=("gossip", "gossip(graph=ring)", "gossip(steps=3)"))
@dataclass(frozen=True)
class Gossip(Period):
    """After every ``steps`` updates workers average their weights with those of their neighbours in a ``graph``."""

    graph: Graph = "exponential"
    steps: int = 1

    def __post_init__(self) -> None:
        check_steps("gossip", self.steps)

    def period(self, workers: int) -> int:
        """One exchange per distance of the exponential graph."""
        return 1 if self.graph == "ring" else max(1, (workers - 1).bit_length())

    def mix(self, workers: int, step: int) -> Plan:
        """One step in which every worker sends all its weights."""
        if self.graph == "ring":
            return _mixing("gossip(graph=ring)", workers, (1, workers - 1))
        distance = 1 << step // self.steps % self.period(workers)
        return _mixing(f"gossip(graph=exponential), distance {distance}", workers, (distance,))


@lru_cache(maxsize=256)
def _mixing(name: str, workers: int, distances: tuple[int, ...]) -> Plan:
    """Every worker adds the weights of those at the given distances before it, each once."""
    away = sorted({distance % workers for distance in distances} - {0})
    rows = [(0, (rank - distance) % workers, rank, 0, 1, REDUCE) for rank in range(workers) for distance in away]
    sums = [[rank, *((rank - distance) % workers for distance in away)] for rank in range(workers)]
    return Plan.of(name, workers, 1, rows, goal="mix", sums=sums)
