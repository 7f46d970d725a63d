"""Proves that a plan reaches its goal, orders its transfers, and splits an allreduce into its two phases.

Whether a plan is correct does not depend on the numbers in the array. ``check`` tracks, for every rank and chunk, the
set of ranks whose contributions the chunk contains, as MSCCLang does for its programs (Cowan et al., ASPLOS 2023). It
rejects every plan that could give a wrong sum or that moves data in vain.

Ranks that are not members (parameter servers) contribute nothing. Their chunks start empty, and a reduce into an empty
chunk is a copy.

**The order of additions** decides the last bits of a floating-point sum. For every rank and chunk it tracks the
expression that produced the value, as ``check`` tracks the set of contributions. Floating-point addition commutes but
is not associative, so an expression is a tree whose pairs are unordered.

Two plans give the same bits, wherever an element lies in an array, if one expression describes all chunks of both. In a
ring every chunk has its own expression, so moving an element to another bucket changes its rounding. In a tree and in
halving-doubling all chunks share one. Between two ranks every plan computes a + b.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError
from .plan import COLUMNS, COPY, REDUCE, Column, Goal, Plan, ranks_text


def check(plan: Plan) -> None:
    """Prove that the plan reaches its goal; PlanError names the step, the transfer and the ranks of the first fault.

    A plan is faulty if it adds a contribution twice, makes a transfer that brings nothing new, overwrites contributions
    that the copied chunk lacks, mixes a copy and another transfer into one chunk in one step, sends an empty chunk,
    leaves a result incomplete, or leaves transfers to a message library that are not a collective. Cost: linear in the
    number of chunks moved.
    """
    if plan.goal in ("all_gather", "broadcast") and np.any(plan.op == REDUCE):
        fault = plan[int(np.flatnonzero(plan.op == REDUCE)[0])]
        raise PlanError(f"{plan.name}: step {fault.step}, {fault}: a plan for {plan.goal} adds nothing, it only copies")
    held = _start(plan)
    _run(plan, held)
    whole, mixed = _whole(plan), dict(zip(plan.members, map(_mask, plan.sums), strict=False))
    for chunk in range(plan.chunks):
        for rank in (plan.owners[chunk],) if plan.goal == "reduce_scatter" else plan.members:
            found, wanted = held[rank * plan.chunks + chunk], mixed.get(rank, whole[chunk])
            if found != wanted:
                missing, more = wanted & ~found, found & ~wanted
                what = f"{_contributions(missing)} missing" if missing else f"{_contributions(more)} not wanted"
                raise PlanError(
                    f"{plan.name}: at the end rank {rank} does not hold the result of chunk {chunk}: {what}"
                )
    if plan.native:
        _check_native(plan)


def mixing_matrix(plan: Plan) -> NDArray[np.float64]:
    """The matrix W of a mix: array i becomes the mean sum_j W[i, j] array_j. Float64, shape (members, members), rows
    sum to 1."""
    place = {rank: number for number, rank in enumerate(plan.members)}
    found = np.zeros((len(plan.members), len(plan.members)))
    for row, of in zip(found, plan.sums, strict=True):
        row[[place[rank] for rank in of]] = 1 / len(of)
    return found


def check_mixing(plans: Sequence[Plan]) -> None:
    """Prove every plan of a period of mixes; together they must keep the mean and connect all members.

    Raises PlanError for the first fault: a matrix that is not doubly stochastic, or members that no sequence of mixes
    connects. Every matrix has a positive diagonal, so repeating a period that passes brings all arrays to their mean.
    """
    reached = np.eye(len(plans[0].members), dtype=bool)
    for plan in plans:
        check(plan)
        matrix = mixing_matrix(plan)
        columns = matrix.sum(axis=0)
        if not np.allclose(columns, 1):
            rank = plan.members[int(np.argmax(np.abs(columns - 1)))]
            raise PlanError(
                f"{plan.name}: the mix changes the mean: the weights of rank {rank}'s array sum to"
                f" {columns.max():.3g}, not to 1"
            )
        reached |= matrix > 0
    for _ in range(len(reached).bit_length()):  # Each product doubles the length of the paths that are covered.
        reached = reached.astype(np.float32) @ reached > 0
    if not reached.all():
        src, dst = (plans[0].members[int(place)] for place in np.argwhere(~reached.T)[0])
        raise PlanError(
            f"{plans[0].name}: the array of rank {src} never reaches rank {dst}, however often the mixes are repeated"
        )


def phases(plan: Plan) -> tuple[Plan, Plan]:
    """Split an allreduce into its reduce-scatter and its all-gather, both checked.

    Every chunk must first be reduced until exactly one rank, its owner, holds the whole sum, and be copied afterwards.
    Raises PlanError for other plans: in recursive doubling, for example, all ranks complete a chunk together.
    """
    if plan.goal != "allreduce":
        raise PlanError(f"{plan.name}: only an allreduce has two phases, but this plan is for {plan.goal}")
    reduces, copies = plan.op == REDUCE, plan.op == COPY
    _require_reduces_first(plan, reduces, copies)
    state = _start(plan)
    # A reduce-scatter plan must name owners, which only this run finds: any member stands in for them.
    _run(_half(plan, reduces, "reduce_scatter", tuple(plan.members[:1]) * plan.chunks), state)
    owners = []
    for chunk, whole in enumerate(_whole(plan)):
        found = [rank for rank in range(plan.world) if state[rank * plan.chunks + chunk] == whole]
        if len(found) != 1:
            who = f"complete at {ranks_text(found)} together" if found else "complete at no rank"
            raise PlanError(
                f"{plan.name}: cannot be split into reduce-scatter and all-gather, since chunk {chunk} is {who} after "
                "the reduces; use an algorithm with one owner per chunk (ring, direct, tree, halving_doubling)"
            )
        owners.append(found[0])
    halves = (
        _half(plan, reduces, "reduce_scatter", tuple(owners)),
        _half(plan, copies, "all_gather", tuple(owners)),
    )
    for half in halves:
        check(half)
    return halves


# ``held[rank * chunks + chunk]`` is a bit set: bit r is set once the contribution of rank r is in that chunk ---------


def _start(plan: Plan) -> list[int]:
    held = [0] * (plan.world * plan.chunks)
    for chunk in range(plan.chunks):
        if plan.goal in ("allreduce", "reduce_scatter", "mix"):
            at_start: Sequence[int] = plan.members
        else:
            at_start = (plan.owners[chunk],) if plan.root is None else (plan.root,)
        for rank in at_start:
            held[rank * plan.chunks + chunk] = 1 << rank
    return held


def _whole(plan: Plan) -> list[int]:
    """The contributions that each chunk's result must contain, as bit sets."""
    if plan.goal in ("allreduce", "reduce_scatter", "mix"):
        return [sum(1 << rank for rank in plan.members)] * plan.chunks
    return [1 << rank for rank in (plan.owners if plan.root is None else (plan.root,) * plan.chunks)]


def _run(plan: Plan, held: list[int]) -> None:
    """Apply all transfers to ``held`` or raise for the first faulty one. The inner loop is written for speed."""
    chunks = plan.chunks
    src, dst, chunk, count, op = (getattr(plan, title).tolist() for title in COLUMNS[1:])
    edges = [0, *(np.flatnonzero(np.diff(plan.step)) + 1).tolist(), len(plan)]
    for start, stop in pairwise(edges):
        # Writes of a step take effect at its end, because all its transfers read the values from before it.
        after: dict[int, int] = {}  # cell -> what this step has written there so far
        copied: set[int] = set()
        for i in range(start, stop):
            source, target, reduces, fresh = src[i] * chunks, dst[i] * chunks, op[i] == REDUCE, 0
            for part in range(chunk[i], chunk[i] + count[i]):
                come, cell = held[source + part], target + part
                now = after.get(cell, -1)
                touched = now >= 0
                if not touched:
                    # Two copies, or a copy and a reduce, into one cell would depend on the order within the step.
                    now = held[cell]
                if reduces:
                    if not come or come & now or cell in copied:
                        raise _fault(plan, i, part, come, now, clash=cell in copied)
                    fresh += not now
                    after[cell] = now | come
                else:
                    if touched or not come or now & ~come or now == come:
                        raise _fault(plan, i, part, come, now, clash=touched)
                    copied.add(cell)
                    after[cell] = come
            # One message is either added or copied as a whole.
            if fresh and fresh != count[i]:
                raise PlanError(
                    f"{plan.name}: step {plan.step[i]}, {plan[i]}: some of these chunks are empty at rank {dst[i]}"
                    " and others are not, so this is neither a reduce nor a copy; send them in separate transfers"
                )
        for cell, value in after.items():
            held[cell] = value


def _fault(plan: Plan, i: int, part: int, come: int, now: int, *, clash: bool) -> PlanError:
    transfer = plan[i]
    at = f"{plan.name}: step {transfer.step}, {transfer}: "
    where = f"chunk {part} of rank {transfer.dst}"
    if not come:
        return PlanError(f"{at}chunk {part} of rank {transfer.src} is empty: there is nothing to send")
    if clash:
        return PlanError(f"{at}{where} is written by a copy and by another transfer in the same step")
    if transfer.op == "reduce":
        return PlanError(f"{at}{_contributions(come & now)} added twice to {where}")
    if now == come:
        return PlanError(f"{at}brings nothing new: {where} already holds {_contributions(now)}")
    return PlanError(f"{at}destroys {_contributions(now & ~come)} in {where}, which the copy does not contain")


def _require_reduces_first(plan: Plan, reduces: NDArray[np.bool_], copies: NDArray[np.bool_]) -> None:
    last = [-1] * plan.chunks  # the step of the last reduce of each chunk
    for i in np.flatnonzero(reduces).tolist():
        transfer = plan[i]
        for part in range(transfer.chunk, transfer.chunk + transfer.count):
            last[part] = transfer.step
    for i in np.flatnonzero(copies).tolist():
        transfer = plan[i]
        for part in range(transfer.chunk, transfer.chunk + transfer.count):
            if transfer.step <= last[part]:
                raise PlanError(
                    f"{plan.name}: cannot be split into reduce-scatter and all-gather, since step {transfer.step}, "
                    f"{transfer}, copies chunk {part} that is still reduced in step {last[part]}"
                )


def _check_native(plan: Plan) -> None:
    """Prove that a message library can carry out the transfers inside each group of the plan.

    The reduces must be a reduce-scatter before all other transfers: each rank gets its part, consecutive chunks, from
    all others of the group in one transfer each. The copies must be an all-gather of the same parts after all others.
    """
    across = plan.step[~plan.natively]
    for ranks in plan.native:
        inside = plan.natively & np.isin(plan.src, ranks)
        reduces, copies = (np.flatnonzero(inside & (plan.op == op)) for op in (REDUCE, COPY))
        early = len(across) == 0 or bool((plan.step[reduces] < across.min()).all())
        late = len(across) == 0 or bool((plan.step[copies] > across.max()).all())
        parts = [
            _parts_of(plan, rows, owners, others, ranks)
            for rows, owners, others in ((reduces, plan.dst, plan.src), (copies, plan.src, plan.dst))
            if len(rows)
        ]
        if not (early and late and all(parts) and len({tuple(sorted(of)) for of in parts}) <= 1):
            raise PlanError(
                f"{plan.name}: a message library carries out the transfers among {ranks_text(sorted(ranks))}, but they"
                " are not a reduce-scatter before all other transfers and an all-gather of the same parts after them"
            )


def _parts_of(
    plan: Plan, rows: NDArray[np.intp], owners: Column, others: Column, ranks: Sequence[int]
) -> set[tuple[int, int, int]]:
    """The (owner, first chunk, count) of a reduce-scatter or all-gather among ``ranks``; empty if it is neither."""
    parts = {(int(owners[row]), int(plan.chunk[row]), int(plan.count[row])) for row in rows}
    covered = sorted(chunk for _, first, count in parts for chunk in range(first, first + count))
    pairs = sorted((int(owners[row]), int(others[row])) for row in rows)
    wanted = sorted((owner, other) for owner in {owner for owner, *_ in parts} for other in ranks if other != owner)
    return parts if covered == list(range(plan.chunks)) and pairs == wanted else set()


def _half(plan: Plan, chosen: NDArray[np.bool_], goal: Goal, owners: tuple[int, ...]) -> Plan:
    rows = plan.rows[chosen]
    # Each phase counts its own steps from 0 without gaps.
    rows[:, 0] = np.unique(rows[:, 0], return_inverse=True)[1]
    name = f"{plan.name} {goal}"
    return Plan.of(
        name, plan.world, plan.chunks, rows, goal=goal, members=plan.members, owners=owners, native=plan.native
    )


def _mask(ranks: Sequence[int]) -> int:
    return sum(1 << rank for rank in ranks)


def _contributions(mask: int) -> str:
    found = [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"the contribution{'s' if len(found) > 1 else ''} of {ranks_text(found)}"


@lru_cache(maxsize=256)
def order_of_additions(plan: Plan) -> str | None:
    """A hash of the expression that all chunks share at all members; None if chunks or ranks differ.

    Also None if one step adds several values to one chunk, because the engine then chooses the order, or if a message
    library adds. Cost: linear in
    the number of chunks moved. That is seconds for a ring of hundreds of ranks, so results are cached per plan.
    """
    if plan.native:
        return None
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
