"""Halving-doubling: recursive halving of the array to reduce, recursive doubling to gather.

For powers of two; other sizes are folded as in ``recursive_doubling``.

Theory. With a partner at distance 1 a rank exchanges one half of the array and keeps adding to the other, then a
quarter at distance 2, and so on: after lg steps it owns one part of N. The same exchanges in reverse gather the parts.
This moves the bytes of a ring at the latency of a tree. The largest messages go to the nearest partners, which are
likeliest to share a node; rank i therefore ends with the part whose number is i with its bits reversed. Rabenseifner,
"Optimization of collective reduction operations", ICCS 2004.
"""

from __future__ import annotations

from ..nouns import Group
from ..plans.plan import COPY, REDUCE, Plan
from ..registry import register
from .recursive_doubling import Row, fold


@register("algorithms", "halving_doubling", goal="allreduce")
def halving_doubling(group: Group) -> Plan:
    """Allreduce with the bytes of a ring and the latency of a tree, when N is a power of two.

    Cost: 2 lg a + 2(N-1)/N nb + (N-1)/N ng. Otherwise the steps of the next lower power of two, plus one step before
    and one after, which move the whole array: 2nb more (Rabenseifner 2004).
    """
    chunks = 1 << (group.workers.bit_length() - 1)
    core, before, after = fold(group.workers, chunks)
    lg = chunks.bit_length() - 1
    rows = list(before)
    start = 1 if before else 0
    for bit in range(lg):
        rows += _exchange(core, start + bit, bit, REDUCE)
    for back, bit in enumerate(reversed(range(lg))):
        rows += _exchange(core, start + lg + back, bit, COPY)
    rows += [(start + 2 * lg, *row[1:]) for row in after]
    return Plan.of("halving_doubling", group, chunks, rows)


def _exchange(core: list[int], step: int, bit: int, op: int) -> list[Row]:
    """An exchange with the partners that differ in ``bit``; each half goes to, or comes from, the partner that keeps
    it."""
    rows = []
    for i, rank in enumerate(core):
        partner = i ^ (1 << bit)
        first, count = _kept(len(core), partner if op == REDUCE else i, bit)
        rows.append((step, rank, core[partner], first, count, op))
    return rows


def _kept(size: int, i: int, bit: int) -> tuple[int, int]:
    """The first chunk and the number of chunks that the i-th rank keeps adding to after the exchange over ``bit``."""
    first, count = 0, size
    for level in range(bit + 1):
        count //= 2
        first += count * (i >> level & 1)
    return first, count
