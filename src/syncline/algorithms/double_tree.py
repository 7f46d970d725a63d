"""Double binary tree: two trees, each for one half of the array, in which an inner rank of one is a leaf of the other.

Theory. In a binary tree a leaf sends half as much as an inner rank. With two complementary trees, each for one half of
the array, every rank is an inner rank of one tree, where it receives two halves and sends one up, and a leaf of the
other, where it sends one half; and the same downwards. The busiest rank thus sends 2n and receives 2n, at a depth of lg
instead of the ring's N. Cut into pieces, the array is pipelined through both trees. Sanders, Speck, Traeff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 2009. NCCL has used such trees since
2.4 (Jeaugey, "Massively scale your deep learning training with NCCL 2.4", 2019).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import UsageError
from ..nouns import Group
from ..plans.plan import COPY, REDUCE, Column, Plan
from ..registry import register


@register("algorithms", "double_tree", goal="allreduce")
def double_tree(group: Group, *, pieces: int = 1) -> Plan:
    """Allreduce over two complementary binary trees: nearly the bytes of a ring with the latency of a tree.

    Cost: approaches 2nb for many ``pieces``, with a latency of about 2 lg a for one. Piece by piece a plan takes 2 lg +
    pieces - 1 steps, in which a port carries up to four messages of n / (2 pieces) bytes (Sanders, Speck, Traeff 2009).
    Large arrays are cut into segments when they are sent, and are pipelined even with one piece.
    """
    if pieces < 1:
        raise UsageError(f"double_tree needs at least one piece, got pieces={pieces}")
    workers = group.workers
    first = [_parent(rank, workers) for rank in range(workers)]
    if workers % 2:
        # Shifting by one turns the odd ranks, the leaves of the first tree, into inner ranks of the second.
        second = [(first[(rank - 1) % workers] + 1) % workers for rank in range(workers)]
        second[1 % workers] = -1
    else:
        second = [workers - 1 - parent if parent >= 0 else -1 for parent in reversed(first)]
    rows = np.concatenate([_through(first, pieces, 0), _through(second, pieces, pieces)])
    return Plan.of("double_tree", group, 2 * pieces, rows)


def _parent(rank: int, workers: int) -> int:
    """The parent in a binary tree whose leaves are the odd ranks; -1 for the root 0.

    A rank whose lowest set bit is 2^k is the middle of 2^(k+1) ranks and a child of the middle of the next larger
    range. At the right edge, where that middle may not exist, its parent is the nearest inner rank to the left.
    """
    if rank == 0:
        return -1
    bit = rank & -rank
    above = rank ^ bit | bit << 1
    return above if above < workers else rank ^ bit


def _through(parents: Sequence[int], pieces: int, first_chunk: int) -> Column:
    """Rows that reduce ``pieces`` chunks to the tree's root and copy them back, one piece after the other.

    A rank sends piece q up in step height + q, after its children, and gets it back in step deepest + depth - 1 + q.
    """
    depth = [_depth(rank, parents) for rank in range(len(parents))]
    height = [0] * len(parents)
    for rank in sorted(range(len(parents)), key=depth.__getitem__, reverse=True):
        if parents[rank] >= 0:
            height[parents[rank]] = max(height[parents[rank]], height[rank] + 1)
    deepest = max(depth)
    edges = [
        row
        for child, parent in enumerate(parents)
        if parent >= 0
        for row in (
            (height[child], child, parent, first_chunk, 1, REDUCE),
            (deepest + depth[child] - 1, parent, child, first_chunk, 1, COPY),
        )
    ]
    rows = np.array(edges, dtype=np.int32).reshape(-1, 6)
    later = np.arange(pieces, dtype=np.int32)[:, None, None] * np.array([1, 0, 0, 1, 0, 0], dtype=np.int32)
    return (rows + later).reshape(-1, 6)


def _depth(rank: int, parents: Sequence[int]) -> int:
    depth = 0
    while parents[rank] >= 0:
        rank = parents[rank]
        depth += 1
    return depth
