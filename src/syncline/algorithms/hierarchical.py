"""Hierarchical: reduce-scatter inside every node, allreduce of every part across nodes, all-gather inside.

Both levels are rings (``ring``). With ``inside=native`` the transport's message library (Gloo, NCCL or MPI) carries out
the reduce-scatter and the all-gather inside a node. The plan then has one step for each of the two, with the result
that the library must reach.

Theory. Links inside a node are faster than the network. Reducing inside first lets every part cross the network once
per node instead of once per rank, and all ranks of a node work on parts of their own. Cho et al., "BlueConnect", MLSys
2019; Jia et al., "Highly scalable deep learning training system with mixed-precision", 2018.

Nodes of unequal size. A node of p workers cuts the array into p equal parts, so the cuts of different nodes differ. All
cuts together make pieces, each of which has exactly one owner per node; a ring across nodes sums every piece. The
number of chunks is a multiple of all node sizes, so that every cut is between chunks. If that would be too many, the
array has as many shares as the largest node has workers, and parts are whole shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import lcm
from typing import Literal

import numpy as np

from ..nouns import Group
from ..plans.plan import COPY, REDUCE, Column, Plan
from ..registry import register
from .ring import Parts, all_gather_rows, reduce_scatter_rows

_MOST_CHUNKS = 1024
"""With more chunks the bookkeeping costs more than exactly equal parts gain."""


@register("algorithms", "hierarchical", goal="allreduce", two_levels="ring")
def hierarchical(group: Group, *, inside: Literal["ring", "native"] = "ring") -> Plan:
    """Allreduce over two levels, inside nodes and across them; a ring when there is only one node or one rank in each.

    With inside=native the message library's own collectives sum inside nodes.

    Cost with m nodes of p ranks, links a1, b1 inside and a2, b2 across: 2(p-1)a1 + 2(p-1)/p nb1 + 2(m-1)a2 + 2(m-1)/m
    (n/p) b2 when every rank has a NIC; the last term times p when the node has a single NIC (Cho et al. 2019).
    """
    nodes = group.members_by_node()
    sizes = [len(ranks) for ranks in nodes]
    shares = lcm(*sizes)
    if shares * len(nodes) > _MOST_CHUNKS:
        shares = max(sizes)
    chunks = shares * len(nodes)
    cuts = [[shares * i // size * len(nodes) for i in range(size + 1)] for size in sizes]
    native = inside == "native"
    across = min(max(sizes) - 1, 1) if native else max(sizes) - 1
    inside_again = across + 2 * (len(nodes) - 1)
    rows = []
    for ranks, edges in zip(nodes, cuts, strict=True):
        parts = [(low, high - low) for low, high in pairwise(edges)]
        if native:
            rows += [_owners_rows(ranks, parts, 0, REDUCE), _owners_rows(ranks, parts, inside_again, COPY)]
        else:
            rows += [reduce_scatter_rows(ranks, parts, 0), all_gather_rows(ranks, parts, inside_again)]
    for low, high in pairwise(sorted({edge for edges in cuts for edge in edges})):
        owners = [ranks[_part_of(low, edges)] for ranks, edges in zip(nodes, cuts, strict=True)]
        share = (high - low) // len(nodes)
        parts = [(low + share * i, share) for i in range(len(nodes))]
        rows += [
            reduce_scatter_rows(owners, parts, across),
            all_gather_rows(owners, parts, across + len(nodes) - 1),
        ]
    groups = [ranks for ranks in nodes if len(ranks) > 1] if native else []
    return Plan.of("hierarchical", group, chunks, np.concatenate(rows), native=groups)


def _owners_rows(ranks: Sequence[int], parts: Parts, step: int, op: int) -> Column:
    """Rows of one step in which every rank sends its part i to ``ranks[i]`` (reduce), or gets it from there (copy)."""
    rows = [
        (step, *((other, owner) if op == REDUCE else (owner, other)), *part, op)
        for owner, part in zip(ranks, parts, strict=True)
        for other in ranks
        if other != owner
    ]
    return np.array(rows, np.int32).reshape(-1, 6)


def _part_of(chunk: int, edges: Sequence[int]) -> int:
    """The number of the part that contains the chunk."""
    return next(i for i, (low, high) in enumerate(pairwise(edges)) if low <= chunk < high)
