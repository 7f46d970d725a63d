"""In which order a plan adds: what decides the last bits of a sum of floating-point numbers.

Pure: follows, for every rank and chunk, the expression that its value is, as ``check`` follows the contributions in it.
Addition of two numbers commutes to the bit and does not associate: an expression is a tree whose pairs have no order.

Two plans give the same bits wherever an element lies in an array when all chunks of both have one expression. A ring
has another one for each chunk, so that other buckets, in which an element lies elsewhere, round otherwise; a tree and
halving-doubling have the same one for all. Between two ranks every plan has one: a + b.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from .plan import REDUCE, Plan


@lru_cache(maxsize=256)
def order_of_additions(plan: Plan) -> str | None:
    """What names the one expression that each chunk is at each member's; None where chunks or ranks differ in it.

    None too where several values are added to one chunk in one step: in which order is the engine's affair. Cost:
    linear in the chunks moved, seconds for a ring of hundreds of ranks, so that a plan is followed once.
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
