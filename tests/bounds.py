"""Lower bounds of collectives, which plans and formulas are held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from syncline.costs.cluster import Cluster

LEAST: Mapping[str, Callable[[int], float]] = {
    "allreduce": lambda workers: 2 * (workers - 1) / workers,
    "reduce_scatter": lambda workers: (workers - 1) / workers,
    "all_gather": lambda workers: (workers - 1) / workers,
    "broadcast": lambda workers: float(workers > 1),
}
"""The share of the array that a port carries at least, by goal."""


def lower_bound_s(goal: str, nbytes: float, workers: int, cluster: Cluster) -> float:
    """What no exchange among ranks with a port each is faster than: that of latencies, or that of bytes."""
    if workers == 1:
        return 0.0
    (piece,) = cluster.between.pieces
    # Those who know something at most double with every message; the last one flies.
    doublings_s = (workers - 1).bit_length() * piece.busy_s
    return cluster.between.flight_s + max(doublings_s, LEAST[goal](workers) * nbytes * piece.per_byte_s)
