"""Finds the order in which a plan adds, which decides the last bits of a floating-point sum.

For every rank and chunk it tracks the expression that produced the value, as ``check`` tracks the set of contributions.
Floating-point addition commutes but is not associative, so an expression is a tree whose pairs are unordered.

Two plans give the same bits, wherever an element lies in an array, if one expression describes all chunks of both. In a
ring every chunk has its own expression, so moving an element to another bucket changes its rounding. In a tree and in
halving-doubling all chunks share one. Between two ranks every plan computes a + b.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from .plan import REDUCE, Plan


@lru_cache(maxsize=256)
def order_of_additions(plan: Plan) -> str | None:
    """A hash of the expression that all chunks share at all members; None if chunks or ranks differ.

    Also None if one step adds several values to one chunk, because the engine then chooses the order. Cost: linear in
    the number of chunks moved. That is seconds for a ring of hundreds of ranks, so results are cached per plan.
    """
    held = {(rank, chunk): _leaf(rank) for rank in plan.members for chunk in range(plan.chunks)}
    for step in np.unique(plan.step):
        before, added = dict(held), set[tuple[int, int]]()
        for place in np.flatnonzero(plan.step == step):
            move = plan[int(place)]
            for chunk in range(move.chunk, move.chunk + move.count):
                sent, there = before.get((move.src, chunk)), (move.dst, chunk)
                if sent is None:
                    return None
                if plan.op[place] != REDUCE or there not in held:
                    held[there] = sent
                    continue
                if there in added:
                    return None
                added.add(there)
                held[there] = _sum(held[there], sent)
    found = {held[rank, chunk] for rank in plan.members for chunk in range(plan.chunks)}
    return found.pop() if len(found) == 1 else None


def _leaf(rank: int) -> str:
    return str(rank)


def _sum(one: str, other: str) -> str:
    return hashlib.sha256(" ".join(sorted((one, other))).encode()).hexdigest()
