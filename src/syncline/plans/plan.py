"""Defines ``Plan``: which rank sends which chunk to which rank in which step.

This module does not know algorithms (they make plans), proofs (``check``), memory, transports or clocks.

An array is cut into ``chunks`` equal parts. A transfer carries consecutive chunks from one rank to another, which adds
them to its own chunks (reduce) or replaces them (copy). All transfers of one step read the values from before that
step. Several reduces into one chunk in one step are applied in plan order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError
from ..nouns import Group

Goal = Literal["allreduce", "reduce_scatter", "all_gather", "broadcast", "mix"]
Column = NDArray[np.int32]

REDUCE: Final = 0
COPY: Final = 1

_GOALS: Final[tuple[Goal, ...]] = ("allreduce", "reduce_scatter", "all_gather", "broadcast", "mix")
COLUMNS: Final = ("step", "src", "dst", "chunk", "count", "op")
_OP_NAMES: Final[tuple[Literal["reduce", "copy"], ...]] = ("reduce", "copy")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One row of a plan: in ``step``, ``src`` sends ``count`` chunks, starting at ``chunk``, to ``dst``."""

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
    """The transfers of a collective in step order, with its goal and its ranks. Plans compare by identity.

    ``world`` counts all processes: workers first, then dedicated servers. ``members`` contribute and must hold the
    result. ``owners`` names, for every chunk, the rank that must hold it (reduce_scatter) or holds it at the start
    (all_gather); it is empty for other goals. ``root`` is the source of a broadcast. ``sums`` lists, for every member,
    the ranks whose contributions it must hold after a mix, itself included. ``native`` are groups of ranks: a message
    library carries out the transfers between ranks of one group, by its own reduce-scatter and all-gather. The columns
    are read-only int32 arrays of equal length. Raises PlanError for malformed rows; ``check`` decides whether they
    reach the goal.
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
    sums: tuple[tuple[int, ...], ...] = ()
    native: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        _validate_head(self)
        for title in COLUMNS:
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
        sums: Sequence[Sequence[int]] = (),
        native: Sequence[Sequence[int]] = (),
    ) -> Plan:
        """Make a plan from rows (step, src, dst, chunk, count, op). Rows are sorted by step and else keep their order.

        ``group`` is a Group or a number of workers; ``members`` defaults to all workers.
        """
        group = Group(group) if isinstance(group, int) else group
        rows = transfers if isinstance(transfers, np.ndarray) else np.array([tuple(row) for row in transfers])
        rows = rows if rows.size else np.empty((0, len(COLUMNS)), np.int32)
        if rows.ndim != 2 or rows.shape[1] != len(COLUMNS) or rows.dtype.kind not in "iu":
            raise PlanError(f"{name}: a transfer is six whole numbers ({', '.join(COLUMNS)})")
        if np.any(rows[1:, 0] < rows[:-1, 0]):
            rows = rows[np.argsort(rows[:, 0], kind="stable")]
        columns = dict(zip(COLUMNS, rows.T, strict=True))
        everyone = tuple(range(group.workers)) if members is None else tuple(members)
        of, groups = tuple(tuple(sorted(ranks)) for ranks in sums), tuple(tuple(ranks) for ranks in native)
        head = name, group.processes, chunks, everyone, goal
        return cls(*head, **columns, owners=tuple(owners), root=root, sums=of, native=groups)

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, index: int) -> Transfer:
        step, src, dst, chunk, count, op = (int(getattr(self, title)[index]) for title in COLUMNS)
        return Transfer(step, src, dst, chunk, count, _OP_NAMES[op])

    def __iter__(self) -> Iterator[Transfer]:
        columns = (getattr(self, title).tolist() for title in COLUMNS)
        for step, src, dst, chunk, count, op in zip(*columns, strict=True):
            yield Transfer(step, src, dst, chunk, count, _OP_NAMES[op])

    @property
    def rows(self) -> Column:
        """All columns side by side, shape (transfers, 6), as ``Plan.of`` takes them."""
        return np.stack([getattr(self, title) for title in COLUMNS], axis=1)

    @property
    def digest(self) -> str:
        """A hash of the transfers and their order. Ranks whose digests differ would mismatch their messages.

        The order counts because messages between two ranks are numbered, and sums are computed, in plan order.
        """
        head = np.array([self.chunks]).tobytes() + b"".join(np.array(ranks).tobytes() for ranks in self.native)
        return hashlib.sha256(head + self.rows.tobytes()).hexdigest()[:16]

    @property
    def steps(self) -> int:
        """The number of distinct steps."""
        return len(np.unique(self.step))

    @cached_property
    def additions(self) -> NDArray[np.bool_]:
        """For every transfer, whether it adds. The first reduce into a chunk of a non-member only copies."""
        found: NDArray[np.bool_] = self.op == REDUCE
        outside = np.flatnonzero(found & ~np.isin(self.dst, self.members))
        _, first = np.unique(self.dst[outside] * self.chunks + self.chunk[outside], return_index=True)
        found[outside[first]] = False
        return found

    @cached_property
    def natively(self) -> NDArray[np.bool_]:
        """For every transfer, whether a message library carries it out."""
        place = np.arange(-self.world, 0)  # ranks of no group are alone
        for number, ranks in enumerate(self.native):
            place[list(ranks)] = number
        found: NDArray[np.bool_] = place[self.src] == place[self.dst]
        return found

    @cached_property
    def across(self) -> Plan:
        """The transfers that no message library carries out. They alone are not a collective."""
        columns = {title: getattr(self, title)[~self.natively] for title in COLUMNS}
        return replace(self, native=(), **columns)

    def bytes_sent(self, nbytes: float) -> NDArray[np.float64]:
        """The bytes that each rank sends when the array has ``nbytes``: float64, shape (world,), exact chunk shares."""
        return self._moved(self.src, nbytes)

    def bytes_received(self, nbytes: float) -> NDArray[np.float64]:
        """The bytes that each rank receives when the array has ``nbytes``: float64, shape (world,)."""
        return self._moved(self.dst, nbytes)

    def among(self, ranks: Sequence[int]) -> Plan:
        """The same transfers with other rank numbers: rank i becomes ``ranks[i]``.

        This embeds a group's plan in a larger world; the other ranks take no part in it. All transfers are messages,
        because a message library has its own groups of ranks.
        """
        if len(ranks) != self.world or len(set(ranks)) < self.world:
            raise PlanError(f"{self.name}: {self.world} ranks need {self.world} different numbers, not {tuple(ranks)}")
        numbers = np.array(ranks)
        return replace(
            self,
            world=int(numbers.max()) + 1,
            members=tuple(ranks[rank] for rank in self.members),
            src=numbers[self.src],
            dst=numbers[self.dst],
            owners=tuple(ranks[rank] for rank in self.owners),
            root=None if self.root is None else ranks[self.root],
            sums=tuple(tuple(ranks[rank] for rank in of) for of in self.sums),
            native=(),
        )

    def empty_chunks(self, rank: int) -> set[int]:
        """The chunks of a rank that start without a value: none of a member, and none if data are gathered."""
        return set() if rank in self.members or self.goal == "all_gather" else set(range(self.chunks))

    def _moved(self, ranks: Column, nbytes: float) -> NDArray[np.float64]:
        counts = np.bincount(ranks, weights=self.count, minlength=self.world).astype(np.float64)
        return counts * nbytes / self.chunks


def chunk_range(chunk: int, count: int) -> str:
    """``chunk 2`` or ``chunks 2-3``, for messages and drawings."""
    return f"chunk {chunk}" if count == 1 else f"chunks {chunk}-{chunk + count - 1}"


# Validation ---------------------------------------------------------------------------------------------------------


def _validate_head(plan: Plan) -> None:
    def require(fine: bool, fault: str) -> None:
        if not fine:
            raise PlanError(f"{plan.name}: {fault}")

    require(plan.goal in _GOALS, f"unknown goal {plan.goal!r}: choose one of {', '.join(_GOALS)}")
    require(
        plan.world >= 1 and plan.chunks >= 1,
        f"needs at least one rank and one chunk, got {plan.world} and {plan.chunks}",
    )
    require(bool(plan.members), "needs at least one member")
    require(len(set(plan.members)) == len(plan.members), f"members {plan.members} list a rank twice")
    mixed = tuple(rank for of in plan.sums for rank in of)
    ranks = (*plan.members, *plan.owners, *mixed, *(() if plan.root is None else (plan.root,)))
    strangers = sorted({rank for rank in ranks if not 0 <= rank < plan.world})
    require(not strangers, f"members, owners or root name {ranks_text(strangers)}, but ranks are 0 to {plan.world - 1}")
    owned = plan.goal in ("reduce_scatter", "all_gather")
    wanted = plan.chunks if owned else 0
    require(len(plan.owners) == wanted, f"{plan.goal} takes {wanted} owners, one per chunk or none, not {plan.owners}")
    sums = len(plan.members) if plan.goal == "mix" else 0
    require(len(plan.sums) == sums, f"{plan.goal} takes {sums} sums, one per member or none, not {len(plan.sums)}")
    for rank, of in zip(plan.members, plan.sums, strict=False):
        require(
            rank in of and len(set(of)) == len(of),
            f"the sum of rank {rank} must contain its own contribution, and each rank once; it is {of}",
        )
    require((plan.root is not None) == (plan.goal == "broadcast"), "only a broadcast has a root, and it needs one")
    grouped = [rank for ranks in plan.native for rank in ranks]
    require(
        len(set(grouped)) == len(grouped) and set(grouped).issubset(plan.members),
        f"groups of a message library must be of different members, not {plan.native}",
    )


def _validate_rows(plan: Plan) -> None:
    columns = [getattr(plan, title) for title in COLUMNS]
    if any(column.ndim != 1 or column.shape != plan.step.shape for column in columns):
        raise PlanError(f"{plan.name}: the columns {', '.join(COLUMNS)} must be one-dimensional and equally long")
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
            values = ", ".join(f"{title} {column[row]}" for title, column in zip(COLUMNS, columns, strict=True))
            raise PlanError(f"{plan.name}: transfer {row} ({values}): {rule}")


def ranks_text(found: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-5, 9``; ``found`` is ascending."""
    spans: list[tuple[int, int]] = []
    for rank in found:
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank{'s' if len(found) != 1 else ''} {text}"
