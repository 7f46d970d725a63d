"""The alpha-beta-gamma cost of a plan: seconds on a network that three numbers describe.

Owns the model of a network, the time of a plan on it, and fits of the numbers to measured times. Pure
arithmetic: knows no transports, and no clock but the one that is handed in as numbers.

Theory. A message of n bytes occupies a port for a + n b seconds, a rank that adds n bytes to its own needs n g more.
Every rank has one full-duplex port: it sends and receives at the same time, but its messages in one direction go one
after the other. A plan runs step by step, and a step lasts as long as its busiest rank. For an algorithm and a group
this makes time(n) = A + B n, where A collects the latencies and B bandwidth and reduction: the closed formulas in the
algorithms' docstrings. Hockney, "The communication challenge for MPP", 1994; Thakur, Rabenseifner, Gropp, IJHPCA 2005.

Not modelled: segments of a large array that flow one behind the other, contention inside the network, one port per
host. The model therefore ranks candidates; what is chosen among them is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..plans.plan import Plan


@dataclass(frozen=True)
class Network:
    """Seconds per message (alpha), per byte on the wire (beta) and per byte reduced (gamma), equal for all ranks."""

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0


_SHORTEST_S = 1e-12
"""What no clock tells from nothing."""


@dataclass(frozen=True)
class LinearCost:
    """Seconds of an exchange by its bytes: A + B n."""

    base_s: float
    per_byte_s: float

    def __call__(self, nbytes: float) -> float:
        """The seconds of an exchange of that size."""
        return self.base_s + self.per_byte_s * nbytes

    def __add__(self, other: LinearCost) -> LinearCost:
        """The cost of one exchange behind another of the same size."""
        return LinearCost(self.base_s + other.base_s, self.per_byte_s + other.per_byte_s)


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> LinearCost | None:
    """The line that is nearest to measured times of sizes in bytes, by relative distance; None where none shows.

    Neither number is negative: where noise would make one so, the other alone says most.
    """
    x, y = np.array(sizes, float), np.array(seconds, float)
    x, y = x[y > _SHORTEST_S], y[y > _SHORTEST_S]
    if not len(y):
        return None
    rows = np.stack([1 / y, x / y], axis=1)
    base, slope = (float(number) for number in np.linalg.lstsq(rows, np.ones(len(y)), rcond=None)[0])
    if base >= 0 and slope >= 0:
        return LinearCost(base, slope)
    column = rows[:, 0] if slope < 0 else rows[:, 1]
    alone = float(column.sum() / (column @ column)) if column.any() else 0.0
    return LinearCost(alone, 0.0) if slope < 0 else LinearCost(0.0, alone)


def plan_s(plan: Plan, nbytes: float, network: Network) -> float:
    """Seconds that ``plan`` takes for an array of ``nbytes``, step by step.

    Cost: linear in the transfers, and memory for steps times ranks.
    """
    if not len(plan):
        return 0.0
    steps, step = np.unique(plan.step, return_inverse=True)
    size = plan.count * (nbytes / plan.chunks)
    busy = network.alpha_s + size * network.beta_s_per_byte
    adds = np.where(plan.additions, size * network.gamma_s_per_byte, 0.0)

    def per_rank(rank: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        cells = step * plan.world + rank
        return np.bincount(cells, seconds, len(steps) * plan.world).reshape(len(steps), plan.world)

    port = np.maximum(per_rank(plan.src, busy), per_rank(plan.dst, busy))
    return float((port + per_rank(plan.dst, adds)).max(axis=1).sum())


def fit_ring(workers: int, small: tuple[int, float], large: tuple[int, float], reduced: tuple[int, float]) -> Network:
    """The network on which a ring's halves took these times, given as (bytes, seconds).

    ``small`` and ``large`` are all-gathers of different sizes, ``reduced`` a reduce-scatter. An all-gather takes
    (N-1) a + (N-1)/N n b; a reduce-scatter (N-1)/N n g more. Noise can make a difference negative: such a number is 0,
    and alpha, below which no time can be told apart, a nanosecond.
    """
    steps, share = workers - 1, (workers - 1) / workers
    beta = max(0.0, (large[1] - small[1]) / (share * (large[0] - small[0])))
    alpha = max(1e-9, (small[1] - share * small[0] * beta) / steps)
    gamma = max(0.0, (reduced[1] - steps * alpha - share * reduced[0] * beta) / (share * reduced[0]))
    return Network(alpha, beta, gamma)
