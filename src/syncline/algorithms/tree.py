"""Binomial tree: reduce to a root along a tree, broadcast back along the same tree.

Theory. In step k of the reduce, the ranks whose lowest set bit is 2^k send to the rank without that bit and are done;
after lg steps rank 0 has the sum. The broadcast is the reverse: in every step each rank that has the array sends it to
one more. Each message is the whole array, so a tree suits small arrays and few ranks. Thakur, Rabenseifner, Gropp,
"Optimization of collective communication operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

from ..errors import UsageError
from ..nouns import Group
from ..plans.plan import COPY, REDUCE, Plan
from ..registry import register

Edge = tuple[int, int, int]
"""(bit, child, parent)"""


@register("algorithms", "tree", goal="allreduce")
def tree(group: Group) -> Plan:
    """Allreduce as a binomial reduce to rank 0 and a binomial broadcast from it.

    Cost: 2 lg (a + nb) + lg ng (Thakur, Rabenseifner, Gropp 2005).
    """
    edges, lg = _edges(group.workers), _lg(group.workers)
    up = [(bit, child, parent, 0, 1, REDUCE) for bit, child, parent in edges]
    down = [(2 * lg - 1 - bit, parent, child, 0, 1, COPY) for bit, child, parent in edges]
    return Plan.of("tree", group, 1, up + down)


@register("algorithms", "broadcast", goal="broadcast")
def broadcast(group: Group, *, root: int = 0) -> Plan:
    """Broadcast of the root's array along a binomial tree.

    Cost: lg (a + nb) (Thakur, Rabenseifner, Gropp 2005). Raises UsageError when ``root`` is not a worker.
    """
    workers = group.workers
    if not 0 <= root < workers:
        raise UsageError(f"broadcast: root {root} is not a worker: choose one from 0 to {workers - 1}")
    lg = _lg(workers)
    rows = [
        (lg - 1 - bit, (parent + root) % workers, (child + root) % workers, 0, 1, COPY)
        for bit, child, parent in _edges(workers)
    ]
    return Plan.of("broadcast", group, 1, rows, goal="broadcast", root=root)


def _lg(workers: int) -> int:
    return (workers - 1).bit_length()


def _edges(workers: int) -> list[Edge]:
    """The edges of the binomial tree with root 0: a child's parent lacks its lowest set bit."""
    lowest = [(child, child & -child) for child in range(1, workers)]
    return [(bit.bit_length() - 1, child, child - bit) for child, bit in lowest]
