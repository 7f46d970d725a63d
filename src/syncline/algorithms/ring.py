"""Ring: every rank sends only to its right neighbour, and every link always carries the same load.

This file has the ring allreduce, its two halves, and the rows of a ring among any ranks for ``hierarchical``.

Theory. The array is cut into N parts. In N-1 steps each part travels once around the ring and collects a contribution
at every rank; the part of rank r arrives there last. In N-1 more steps the finished parts travel around once more. This
attains the lower bound for the bytes that a rank sends in an allreduce, 2(N-1)/N n. The price is latency, which grows
with N. Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..nouns import Group
from ..plans.plan import COPY, REDUCE, Column, Plan
from ..registry import register

Parts = Sequence[tuple[int, int]]
"""The first chunk and the number of chunks of every part; part i belongs to the i-th rank of the ring."""


@register("algorithms", "ring", goal="allreduce")
def ring(group: Group) -> Plan:
    """Allreduce around a ring: reduce-scatter, then all-gather; least bytes, latency that grows with N.

    Cost: 2(N-1)a + 2(N-1)/N nb + (N-1)/N ng (Patarasuk and Yuan 2009).
    """
    ranks, parts = _whole_ring(group)
    rows = np.concatenate(
        [reduce_scatter_rows(ranks, parts, 0), all_gather_rows(ranks, parts, len(ranks) - 1)],
    )
    return Plan.of("ring", group, group.workers, rows)


@register("algorithms", "reduce_scatter", goal="reduce_scatter")
def reduce_scatter(group: Group) -> Plan:
    """Reduce-scatter around a ring: rank r ends with the sum of part r.

    Cost: (N-1)a + (N-1)/N nb + (N-1)/N ng (Patarasuk and Yuan 2009).
    """
    ranks, parts = _whole_ring(group)
    rows = reduce_scatter_rows(ranks, parts, 0)
    return Plan.of("reduce_scatter", group, group.workers, rows, goal="reduce_scatter", owners=ranks)


@register("algorithms", "all_gather", goal="all_gather")
def all_gather(group: Group) -> Plan:
    """All-gather around a ring: part r starts at rank r and ends everywhere, for (N-1)a + (N-1)/N nb."""
    ranks, parts = _whole_ring(group)
    rows = all_gather_rows(ranks, parts, 0)
    return Plan.of("all_gather", group, group.workers, rows, goal="all_gather", owners=ranks)


def reduce_scatter_rows(ranks: Sequence[int], parts: Parts, first_step: int) -> Column:
    """Rows after which ``ranks[i]`` holds part i summed over ``ranks``; p-1 steps from ``first_step`` on."""
    return _rows(ranks, parts, first_step, REDUCE, behind=1)


def all_gather_rows(ranks: Sequence[int], parts: Parts, first_step: int) -> Column:
    """Rows after which all ``ranks`` hold all parts, part i from ``ranks[i]``; p-1 steps from ``first_step`` on."""
    return _rows(ranks, parts, first_step, COPY, behind=0)


def _rows(ranks: Sequence[int], parts: Parts, first_step: int, op: int, behind: int) -> Column:
    """In step s the i-th rank sends part i - s - ``behind`` to the next rank."""
    size = len(ranks)
    place = np.asarray(ranks, np.int32)
    step, i = np.arange(size - 1)[:, None], np.arange(size)
    rows = np.empty((size - 1, size, 6), np.int32)
    rows[..., 0] = first_step + step
    rows[..., 1], rows[..., 2] = place, np.roll(place, -1)
    rows[..., 3:5] = np.asarray(parts, np.int32)[(i - step - behind) % size]
    rows[..., 5] = op
    return rows.reshape(-1, 6)


def _whole_ring(group: Group) -> tuple[range, Parts]:
    return range(group.workers), [(chunk, 1) for chunk in range(group.workers)]
