"""A plan: who sends which chunk to whom in which step, as data; its steps and bytes, its proof and its halves.

Owns the ``Plan``, what its transfers mean, and the check that they reach their goal. Does not know algorithms (they
make plans), bytes in memory, transports or clocks (``exchange`` runs plans, the simulator times them).

Theory. An array is cut into ``chunks`` equal parts. A transfer carries consecutive chunks from one rank to another,
which adds them to its own (reduce) or takes them over (copy). All transfers of one step read the values from before
that step. Whether a plan is right does not depend on numbers: it is enough to follow, for every rank and chunk, the set
of ranks whose contributions are in it. ``check`` runs the plan on such sets, as MSCCLang does for its programs (Cowan
et al., ASPLOS 2023), and faults every plan that could give a wrong sum or that moves something in vain.

Ranks that are no members (parameter servers) contribute nothing: their chunks are empty at the start, and what is
reduced into an empty chunk is copied. Several reduces into one chunk in one step are applied in plan order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import PlanError
from .types import Group

Goal = Literal["allreduce", "reduce_scatter", "all_gather", "broadcast"]
Column = NDArray[np.int32]

REDUCE: Final = 0
COPY: Final = 1

_GOALS: Final[tuple[Goal, ...]] = ("allreduce", "reduce_scatter", "all_gather", "broadcast")
_COLUMNS: Final = ("step", "src", "dst", "chunk", "count", "op")
_OP_NAMES: Final[tuple[Literal["reduce", "copy"], ...]] = ("reduce", "copy")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One row of a plan: in ``step``, ``src`` sends ``count`` chunks from ``chunk`` on to ``dst``."""

    step: int
    src: int
    dst: int
    chunk: int
    count: int
    op: Literal["reduce", "copy"]

    def __str__(self) -> str:
        return f"{self.src} -> {self.dst} {self.op} {chunk_range(self.chunk, self.count)}"


@dataclass(frozen=True, eq=False)
class Plan:
    """Transfers in the order of their steps, what they are for, and between whom. Compared by identity.

    ``world`` counts all processes, workers first and servers of their own after them. ``members`` contribute and must
    hold the result. ``owners`` gives for every chunk the rank that must hold it (reduce_scatter) or has it at the start
    (all_gather) and is empty otherwise; ``root`` is the rank that a broadcast starts from. The columns are int32 arrays
    of equal length and read-only. Raises PlanError for rows that make no sense; whether they reach the goal is
    ``check``'s question.
    """

    name: str
    world: int
    chunks: int
    members: tuple[int, ...]
    goal: Goal
    step: Column
    src: Column
    dst: Column
    chunk: Column
    count: Column
    op: Column
    owners: tuple[int, ...] = ()
    root: int | None = None

    def __post_init__(self) -> None:
        _validate_head(self)
        for title in _COLUMNS:
            column = np.array(getattr(self, title), dtype=np.int32)
            column.setflags(write=False)
            object.__setattr__(self, title, column)
        _validate_rows(self)

    @classmethod
    def of(
        cls,
        name: str,
        group: Group | int,
        chunks: int,
        transfers: Iterable[Sequence[int]] | NDArray[Any],
        *,
        goal: Goal = "allreduce",
        members: Sequence[int] | None = None,
        owners: Sequence[int] = (),
        root: int | None = None,
    ) -> Plan:
        """A plan from rows (step, src, dst, chunk, count, op), which are sorted by step and otherwise keep their order.

        ``group`` is a Group or a number of workers; ``members`` defaults to the workers.
        """
        group = Group(group) if isinstance(group, int) else group
        rows = transfers if isinstance(transfers, np.ndarray) else np.array([tuple(row) for row in transfers])
        rows = rows if rows.size else np.empty((0, len(_COLUMNS)), np.int32)
        if rows.ndim != 2 or rows.shape[1] != len(_COLUMNS) or rows.dtype.kind not in "iu":
            raise PlanError(f"{name}: a transfer is six whole numbers ({', '.join(_COLUMNS)})")
        if np.any(rows[1:, 0] < rows[:-1, 0]):
            rows = rows[np.argsort(rows[:, 0], kind="stable")]
        columns = dict(zip(_COLUMNS, rows.T, strict=True))
        everyone = tuple(range(group.workers)) if members is None else tuple(members)
        return cls(name, group.processes, chunks, everyone, goal, **columns, owners=tuple(owners), root=root)

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, index: int) -> Transfer:
        step, src, dst, chunk, count, op = (int(getattr(self, title)[index]) for title in _COLUMNS)
        return Transfer(step, src, dst, chunk, count, _OP_NAMES[op])

    def __iter__(self) -> Iterator[Transfer]:
        columns = (getattr(self, title).tolist() for title in _COLUMNS)
        for step, src, dst, chunk, count, op in zip(*columns, strict=True):
            yield Transfer(step, src, dst, chunk, count, _OP_NAMES[op])

    @property
    def rows(self) -> Column:
        """All columns side by side, shape (transfers, 6): what ``Plan.of`` takes."""
        return np.stack([getattr(self, title) for title in _COLUMNS], axis=1)

    @property
    def digest(self) -> str:
        """Equal for the same transfers in the same order: ranks that run plans of two digests mistake messages.

        Messages are counted between two ranks, and sums are added up, in the order in which transfers are listed.
        """
        return hashlib.sha256(np.array([self.chunks]).tobytes() + self.rows.tobytes()).hexdigest()[:16]

    @property
    def steps(self) -> int:
        """The number of distinct steps."""
        return len(np.unique(self.step))

    def bytes_sent(self, nbytes: float) -> NDArray[np.float64]:
        """The bytes that each rank sends when the array has ``nbytes``: float64, shape (world,), exact chunk shares."""
        return self._moved(self.src, nbytes)

    def bytes_received(self, nbytes: float) -> NDArray[np.float64]:
        """The bytes that each rank receives when the array has ``nbytes``: float64, shape (world,)."""
        return self._moved(self.dst, nbytes)

    def _moved(self, ranks: Column, nbytes: float) -> NDArray[np.float64]:
        counts = np.bincount(ranks, weights=self.count, minlength=self.world).astype(np.float64)
        return counts * nbytes / self.chunks


def check(plan: Plan) -> None:
    """Prove that the plan does what it claims; raises PlanError that names step, transfer and ranks of the first fault.

    Faults: a contribution added twice; a transfer that brings nothing new; a copy that destroys contributions which
    are not in what it copies; a copy and another transfer into one chunk in one step; an empty chunk that is sent; a
    result that is missing at the end. Cost: linear in the chunks moved.
    """
    if plan.goal in ("all_gather", "broadcast") and np.any(plan.op == REDUCE):
        fault = plan[int(np.flatnonzero(plan.op == REDUCE)[0])]
        raise PlanError(f"{plan.name}: step {fault.step}, {fault}: a plan for {plan.goal} adds nothing, it only copies")
    held = _start(plan)
    _run(plan, held)
    whole = _whole(plan)
    for chunk in range(plan.chunks):
        for rank in (plan.owners[chunk],) if plan.goal == "reduce_scatter" else plan.members:
            found = held[rank * plan.chunks + chunk]
            if found != whole[chunk]:
                raise PlanError(
                    f"{plan.name}: at the end rank {rank} does not hold the result of chunk {chunk}: "
                    f"{_contributions(whole[chunk] & ~found)} missing"
                )


def depends(plan: Plan, i: int, j: int) -> bool:
    """True when transfer j must not run before transfer i < j.

    That is so when, in a later step and on a common chunk, j sends what i wrote, j overwrites what i reads, or j
    overwrites what i wrote and one of the two is a copy. Reduces into one chunk commute; running them in plan order
    all the same is what makes results repeatable bit for bit. Transfers of one step never depend on each other.
    """
    if not 0 <= i < j < len(plan):
        raise PlanError(f"{plan.name}: transfers {i} and {j} are no pair in order out of {len(plan)}")
    first, second = plan[i], plan[j]
    if first.step == second.step:
        return False
    if first.chunk >= second.chunk + second.count or second.chunk >= first.chunk + first.count:
        return False
    commute = first.op == second.op == "reduce"
    return first.dst == second.src or first.src == second.dst or (first.dst == second.dst and not commute)


def phases(plan: Plan) -> tuple[Plan, Plan]:
    """The reduce-scatter and the all-gather that an allreduce consists of, both checked.

    Possible when every chunk is first reduced until exactly one rank, its owner, holds the whole sum, and copied
    afterwards. Raises PlanError otherwise, as for recursive doubling, where all ranks complete a chunk together.
    """
    if plan.goal != "allreduce":
        raise PlanError(f"{plan.name}: only an allreduce has two phases, this plan is for {plan.goal}")
    reduces, copies = plan.op == REDUCE, plan.op == COPY
    _require_reduces_first(plan, reduces, copies)
    state = _start(plan)
    _run(_half(plan, reduces, "reduce_scatter", tuple(plan.members[:1]) * plan.chunks), state)
    owners = []
    for chunk, whole in enumerate(_whole(plan)):
        found = [rank for rank in range(plan.world) if state[rank * plan.chunks + chunk] == whole]
        if len(found) != 1:
            who = f"complete at {_ranks(found)} together" if found else "complete at no rank"
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


def chunk_range(chunk: int, count: int) -> str:
    """``chunk 2`` or ``chunks 2-3``, for messages and drawings."""
    return f"chunk {chunk}" if count == 1 else f"chunks {chunk}-{chunk + count - 1}"


# Rows that make sense ------------------------------------------------------------------------------------------------


def _validate_head(plan: Plan) -> None:
    def require(fine: bool, fault: str) -> None:
        if not fine:
            raise PlanError(f"{plan.name}: {fault}")

    require(plan.goal in _GOALS, f"unknown goal {plan.goal!r}: choose one of {', '.join(_GOALS)}")
    require(plan.world >= 1 and plan.chunks >= 1, f"needs a rank and a chunk, got {plan.world} and {plan.chunks}")
    require(bool(plan.members), "needs at least one member")
    require(len(set(plan.members)) == len(plan.members), f"a rank is twice in members {plan.members}")
    ranks = (*plan.members, *plan.owners, *(() if plan.root is None else (plan.root,)))
    strangers = sorted({rank for rank in ranks if not 0 <= rank < plan.world})
    require(not strangers, f"members, owners or root name {_ranks(strangers)}, ranks are 0 to {plan.world - 1}")
    owned = plan.goal in ("reduce_scatter", "all_gather")
    wanted = plan.chunks if owned else 0
    require(len(plan.owners) == wanted, f"{plan.goal} takes {wanted} owners, one per chunk or none, not {plan.owners}")
    require((plan.root is not None) == (plan.goal == "broadcast"), "a broadcast, and nothing else, has a root")


def _validate_rows(plan: Plan) -> None:
    columns = [getattr(plan, title) for title in _COLUMNS]
    if any(column.ndim != 1 or column.shape != plan.step.shape for column in columns):
        raise PlanError(f"{plan.name}: the columns {', '.join(_COLUMNS)} must be one-dimensional and equally long")
    wrong = {
        f"ranks are 0 to {plan.world - 1}": np.minimum(plan.src, plan.dst) < 0,
        f"ranks are below {plan.world}": np.maximum(plan.src, plan.dst) >= plan.world,
        "a rank does not send to itself": plan.src == plan.dst,
        f"chunks are 0 to {plan.chunks - 1}": (plan.chunk < 0)
        | (plan.chunk.astype(np.int64) + plan.count > plan.chunks),
        "at least one chunk travels": plan.count < 1,
        "steps are not negative": plan.step < 0,
        f"an op is REDUCE ({REDUCE}) or COPY ({COPY})": (plan.op != REDUCE) & (plan.op != COPY),
        "rows lie in the order of their steps (Plan.of sorts them)": np.diff(plan.step, prepend=plan.step[:1]) < 0,
    }
    for rule, faulty in wrong.items():
        if faulty.any():
            row = int(np.flatnonzero(faulty)[0])
            values = ", ".join(f"{title} {column[row]}" for title, column in zip(_COLUMNS, columns, strict=True))
            raise PlanError(f"{plan.name}: transfer {row} ({values}): {rule}")


# Running on sets of ranks: held[rank * chunks + chunk] has bit r set when the contribution of rank r is in it --------


def _start(plan: Plan) -> list[int]:
    held = [0] * (plan.world * plan.chunks)
    for chunk in range(plan.chunks):
        if plan.goal in ("allreduce", "reduce_scatter"):
            at_start: Sequence[int] = plan.members
        else:
            at_start = (plan.owners[chunk],) if plan.root is None else (plan.root,)
        for rank in at_start:
            held[rank * plan.chunks + chunk] = 1 << rank
    return held


def _whole(plan: Plan) -> list[int]:
    """What each chunk's result contains."""
    if plan.goal in ("allreduce", "reduce_scatter"):
        return [sum(1 << rank for rank in plan.members)] * plan.chunks
    return [1 << rank for rank in (plan.owners if plan.root is None else (plan.root,) * plan.chunks)]


def _run(plan: Plan, held: list[int]) -> None:
    """Apply all transfers to ``held``, or raise at the first that must not be; written for speed."""
    chunks = plan.chunks
    src, dst, chunk, count, op = (getattr(plan, title).tolist() for title in _COLUMNS[1:])
    edges = [0, *(np.flatnonzero(np.diff(plan.step)) + 1).tolist(), len(plan)]
    for start, stop in pairwise(edges):
        after: dict[int, int] = {}  # what this step has written so far, by cell
        copied: set[int] = set()
        for i in range(start, stop):
            source, target, reduces, fresh = src[i] * chunks, dst[i] * chunks, op[i] == REDUCE, 0
            for part in range(chunk[i], chunk[i] + count[i]):
                come, cell = held[source + part], target + part
                now = after.get(cell, -1)
                touched = now >= 0
                if not touched:
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
            if fresh and fresh != count[i]:
                raise PlanError(
                    f"{plan.name}: step {plan.step[i]}, {plan[i]}: some of these chunks are empty at rank {dst[i]} and "
                    "some are not, so that this is neither a reduce nor a copy; send them apart"
                )
        for cell, value in after.items():
            held[cell] = value


def _fault(plan: Plan, i: int, part: int, come: int, now: int, *, clash: bool) -> PlanError:
    transfer = plan[i]
    at = f"{plan.name}: step {transfer.step}, {transfer}: "
    where = f"chunk {part} of rank {transfer.dst}"
    if not come:
        return PlanError(f"{at}chunk {part} of rank {transfer.src} is empty, there is nothing to send")
    if clash:
        return PlanError(f"{at}{where} is written by a copy and by another transfer in the same step")
    if transfer.op == "reduce":
        return PlanError(f"{at}{_contributions(come & now)} added twice to {where}")
    if now == come:
        return PlanError(f"{at}brings nothing new, {where} holds {_contributions(now)} already")
    return PlanError(f"{at}destroys {_contributions(now & ~come)} in {where}, not contained in what is copied")


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


def _half(plan: Plan, chosen: NDArray[np.bool_], goal: Goal, owners: tuple[int, ...]) -> Plan:
    rows = plan.rows[chosen]
    rows[:, 0] = np.unique(rows[:, 0], return_inverse=True)[1]
    name = f"{plan.name} {goal}"
    return Plan.of(name, plan.world, plan.chunks, rows, goal=goal, members=plan.members, owners=owners)


# Words of messages ---------------------------------------------------------------------------------------------------


def _contributions(mask: int) -> str:
    found = [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"the contribution{'s' if len(found) > 1 else ''} of {_ranks(found)}"


def _ranks(found: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-5, 9``; ``found`` is ascending."""
    spans: list[tuple[int, int]] = []
    for rank in found:
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank{'s' if len(found) != 1 else ''} {text}"
