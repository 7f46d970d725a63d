"""Recursive doubling: ranks exchange the whole array with partners at distance 1, 2, 4, and so on.

This file also folds a number of ranks that is not a power of two, for ``halving_doubling`` too.

Theory. After k exchanges a rank holds the sum of a block of 2^k ranks. Both partners add the same two numbers, so all
ranks get the same bits. lg steps are the minimum; every step moves the whole array. Each extra rank first adds its
array to a neighbour's and gets the result from it at the end. Thakur, Rabenseifner, Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

from ..nouns import Group
from ..plans.plan import COPY, REDUCE, Plan
from ..registry import register

Row = tuple[int, int, int, int, int, int]


@register("algorithms", "recursive_doubling", goal="allreduce")
def recursive_doubling(group: Group) -> Plan:
    """Allreduce in the fewest steps, each moving the whole array: for small arrays.

    Cost: lg (a + nb + ng) when N is a power of two; otherwise one more step before and one after the steps of the next
    lower power of two (Thakur, Rabenseifner, Gropp 2005).
    """
    core, before, after = fold(group.workers, 1)
    rows = list(before)
    step = 1 if before else 0
    for bit in range(len(core).bit_length() - 1):
        rows += [(step, rank, core[i ^ (1 << bit)], 0, 1, REDUCE) for i, rank in enumerate(core)]
        step += 1
    rows += [(step, *row[1:]) for row in after]
    return Plan.of("recursive_doubling", group, 1, rows)


def fold(workers: int, chunks: int) -> tuple[list[int], list[Row], list[Row]]:
    """The largest power of two of ranks, and the rows that fold others' contributions in and send results back.

    The first pairs of neighbours (0, 1), (2, 3), ... fold, as many as there are extra ranks. All rows have step 0.
    """
    core_size = 1 << (workers.bit_length() - 1)
    pairs = workers - core_size
    core = [*range(0, 2 * pairs, 2), *range(2 * pairs, workers)]
    before = [(0, 2 * i + 1, 2 * i, 0, chunks, REDUCE) for i in range(pairs)]
    after = [(0, 2 * i, 2 * i + 1, 0, chunks, COPY) for i in range(pairs)]
    return core, before, after
