"""Direct: every rank owns a part and exchanges it with all other ranks without intermediaries.

This file has the direct allreduce and its two halves, of one step each.

Theory. Reduce to the owner, then read from the owner: the bytes of a ring in two rounds instead of 2(N-1). A port still
pays one latency per message; the gain is that no message waits for another. Every rank talks to every other, which
loads the core of a network. The order is rotated: the k-th message of rank r goes to rank r + k, so that no owner is
first for all ranks. On shared memory the N-1 reductions into one chunk become one pass over N inputs. Message-passing
libraries call the halves pairwise or "scattered" exchange (Thakur, Rabenseifner, Gropp, IJHPCA 2005).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ..nouns import Group
from ..plans.plan import COPY, REDUCE, Column, Plan
from ..registry import register


@register("algorithms", "direct", goal="allreduce")
def direct(group: Group, *, on: Literal["host", "device"] = "host") -> Plan:  # noqa: ARG001 - the plan is the same
    """Allreduce in which each rank owns a part: all contributions go to its owner, and the owner sends the sum to all.

    With on=device the ranks of one host add the gradients of models on GPUs in the memory of these.

    Cost: 2(N-1)a + 2(N-1)/N nb + (N-1)/N ng, in two steps (Thakur, Rabenseifner, Gropp 2005).
    """
    rows = np.concatenate([_to_owners(group.workers), _from_owners(group.workers, 1)])
    return Plan.of("direct", group, group.workers, rows)


@register("algorithms", "direct_reduce_scatter", goal="reduce_scatter")
def direct_reduce_scatter(group: Group) -> Plan:
    """Reduce-scatter in one step: every rank sends every other rank the part that the latter owns.

    Cost: (N-1)a + (N-1)/N nb + (N-1)/N ng (Thakur, Rabenseifner, Gropp 2005).
    """
    rows, owners = _to_owners(group.workers), range(group.workers)
    return Plan.of("direct_reduce_scatter", group, group.workers, rows, goal="reduce_scatter", owners=owners)


@register("algorithms", "direct_all_gather", goal="all_gather")
def direct_all_gather(group: Group) -> Plan:
    """All-gather in one step: every rank sends its part to every other rank.

    Cost: (N-1)a + (N-1)/N nb (Thakur, Rabenseifner, Gropp 2005).
    """
    rows, owners = _from_owners(group.workers, 0), range(group.workers)
    return Plan.of("direct_all_gather", group, group.workers, rows, goal="all_gather", owners=owners)


def _to_owners(workers: int) -> Column:
    rank, owner = _pairs(workers)
    return _rows(0, rank, owner, owner, REDUCE)


def _from_owners(workers: int, step: int) -> Column:
    owner, reader = _pairs(workers)
    return _rows(step, owner, reader, owner, COPY)


def _pairs(workers: int) -> tuple[Column, Column]:
    """All pairs of different ranks; the k-th pair of rank r is (r, r + k)."""
    offset, rank = np.arange(1, workers, dtype=np.int32)[:, None], np.arange(workers, dtype=np.int32)
    return np.broadcast_to(rank, (workers - 1, workers)), (rank + offset) % np.int32(workers)


def _rows(step: int, src: Column, dst: Column, chunk: Column, op: int) -> Column:
    rows = np.empty((*src.shape, 6), np.int32)  # filled in place: a thousand ranks have a million pairs
    for column, values in enumerate((step, src, dst, chunk, 1, op)):
        rows[..., column] = values
    return rows.reshape(-1, 6)
