"""Compiles a plan into one rank's program: its sends and receives and what each waits for.

A program is compiled once per plan and rank; ``engine.exchange`` runs it for every segment of every bucket. All
transfers of a step read the values from before it, so the actions of a rank on one chunk depend on each other as
follows.

* A send waits for the receives of earlier steps into its chunks, because it sends their result.
* A receive waits for the sends of its own and earlier steps that read its chunks, because it would overwrite what they
  send. It also waits for earlier receives into its chunks, which keeps sums in plan order and gives every run the same
  bits.

Only direct dependencies are kept; the others follow from them. If a message library carries out transfers inside groups
(``Plan.native``), the actions are the others. They start after the library's reduce-scatter and end before its
all-gather (``Native``). ``Cut`` has the elements that each action moves in every segment of an array. This module knows
neither bytes nor transports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from ..errors import PlanError
from .plan import COPY, REDUCE, Plan

Kind = Literal["send", "copy", "reduce"]


@dataclass(frozen=True, slots=True)
class Action:
    """One send or receive of chunks ``lo`` to ``hi``. ``index`` counts the messages from its source to its destination.

    ``swaps`` marks a receive into chunks that this rank sends in the same step. Such a receive must be able to buffer
    its message: both ends would deadlock if each took the peer's message only after its own send had finished.
    """

    kind: Kind
    peer: int
    index: int
    step: int
    lo: int
    hi: int
    swaps: bool = False


@dataclass(frozen=True)
class Native:
    """A message library's part in a program, among ``ranks``: ``parts`` are the chunks lo to hi that each rank owns.

    With ``reduces`` a reduce-scatter to the owners precedes all actions; with ``gathers`` an all-gather follows them.
    """

    ranks: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    reduces: bool
    gathers: bool


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's actions in plan order. Programs compare by identity.

    ``waits[i]`` counts the actions that must finish before action i may act, that is, start a send, receive a copy or
    apply a reduction. ``unlocks[i]`` lists the actions that wait for action i. ``follows[i]`` is the next reduction
    into the same chunks in the same step if it waits for reduction i alone, else -1; ``precedes`` is the inverse. Both
    reductions can run in one pass over memory. The peer of the second sent its data before this step, so waiting for
    both delays nothing. ``native`` is the message library's part before and after the actions, if there is one.
    """

    plan: Plan
    rank: int
    actions: tuple[Action, ...]
    waits: tuple[int, ...]
    unlocks: tuple[tuple[int, ...], ...]
    follows: tuple[int, ...]
    precedes: tuple[int, ...]
    native: Native | None = None


def compile_program(plan: Plan, rank: int) -> Program:
    """The program of ``rank``. Cost: linear in the chunks that it moves, plus one scan of the plan's columns."""
    actions = _actions(plan, rank)
    before: list[set[int]] = [set() for _ in actions]
    writer: dict[int, int] = {}  # chunk -> the last receive into it
    readers: dict[int, list[int]] = {}  # chunk -> the sends since that read it
    start = 0
    while start < len(actions):
        stop = start
        while stop < len(actions) and actions[stop].step == actions[start].step:
            stop += 1
        step = range(start, stop)
        # Sends first: a receive of the same step must not change the chunks that they read.
        for i in step:
            if actions[i].kind == "send":
                for chunk in range(actions[i].lo, actions[i].hi):
                    if chunk in writer:
                        before[i].add(writer[chunk])
                    readers.setdefault(chunk, []).append(i)
        for i in step:
            if actions[i].kind != "send":
                for chunk in range(actions[i].lo, actions[i].hi):
                    # ``pop``: later receives wait for this one, which has waited for these sends.
                    before[i].update(readers.pop(chunk, ()))
                    if chunk in writer:
                        before[i].add(writer[chunk])
                    writer[chunk] = i
        sent = {chunk for i in step if actions[i].kind == "send" for chunk in range(actions[i].lo, actions[i].hi)}
        for i in step:
            if actions[i].kind != "send" and not sent.isdisjoint(range(actions[i].lo, actions[i].hi)):
                actions[i] = replace(actions[i], swaps=True)
        start = stop
    unlocks: list[list[int]] = [[] for _ in actions]
    for i, needed in enumerate(before):
        for j in sorted(needed):
            unlocks[j].append(i)
    waits = tuple(len(needed) for needed in before)
    follows = tuple(_follower(actions, before, i, found) for i, found in enumerate(unlocks))
    back = {j: i for i, j in enumerate(follows)}
    precedes = tuple(back.get(i, -1) for i in range(len(actions)))
    after = tuple(tuple(found) for found in unlocks)
    return Program(plan, rank, tuple(actions), waits, after, follows, precedes, _native(plan, rank))


def _native(plan: Plan, rank: int) -> Native | None:
    """The library's part in a plan for the group of ``rank``; None if there is none. ``check`` proves its form."""
    ranks = next((ranks for ranks in plan.native if rank in ranks), ())
    inside = plan.natively & np.isin(plan.src, ranks)
    reduces, copies = inside & (plan.op == REDUCE), inside & (plan.op == COPY)
    if not inside.any():
        return None
    rows, owners = (reduces, plan.dst) if reduces.any() else (copies, plan.src)
    owned = {int(owners[row]): plan[row] for row in np.flatnonzero(rows).tolist()}
    parts = [(owned[one].chunk, owned[one].chunk + owned[one].count) if one in owned else (0, 0) for one in ranks]
    return Native(ranks, tuple(parts), bool(reduces.any()), bool(copies.any()))


def _follower(actions: list[Action], before: list[set[int]], i: int, unlocked: list[int]) -> int:
    first = actions[i]
    for j in unlocked:
        other = actions[j]
        alike = (other.kind, other.step, other.lo, other.hi) == ("reduce", first.step, first.lo, first.hi)
        if first.kind == "reduce" and alike and before[j] == {i}:
            return j
    return -1


def _actions(plan: Plan, rank: int) -> list[Action]:
    """This rank's rows as actions; the first reduction into an empty chunk of a non-member is a copy."""
    empty = plan.empty_chunks(rank)
    found = []
    # Both ends count alike, so the index identifies a message without negotiation.
    among: Counter[tuple[int, int]] = Counter()
    # Select this rank's rows first: a plan over all pairs has N^2 rows, and a rank takes part in 2N of them.
    rows = (plan.src == rank) | (plan.dst == rank)
    for row in np.flatnonzero(rows & ~plan.natively if plan.native else rows).tolist():
        transfer = plan[row]
        index = among[transfer.src, transfer.dst]
        among[transfer.src, transfer.dst] += 1
        lo, hi = transfer.chunk, transfer.chunk + transfer.count
        if transfer.src == rank:
            found.append(Action("send", transfer.dst, index, transfer.step, lo, hi))
        elif transfer.dst == rank:
            kind: Kind = "copy" if transfer.op == "copy" else "reduce"
            fresh = empty.intersection(range(lo, hi))
            if kind == "reduce" and fresh:
                if len(fresh) != hi - lo:
                    raise PlanError(f"{plan.name}: transfer {transfer} reduces into empty and filled chunks at once")
                kind = "copy"
            empty.difference_update(fresh)
            found.append(Action(kind, transfer.src, index, transfer.step, lo, hi))
    return found


class Move(NamedTuple):
    """The elements ``start`` to ``stop`` that an action moves in one segment, in messages whose tag ends in ``tag``.

    ``borrows`` is set if the incoming message cannot go straight to its place. ``adds`` is set if the transport itself
    adds the message while it arrives.
    """

    start: int
    stop: int
    tag: int
    borrows: bool
    adds: bool


class Cut:
    """The ``segments`` of arrays of one size under a program, and the elements that each action moves.

    ``adds`` tells for each action whether the transport adds incoming data itself.

    A plan whose chunks belong to ranks (reduce-scatter, all-gather) is cut inside each chunk, so that a rank's chunk of
    the whole array stays contiguous. Other plans are cut into contiguous segments, which use the cache better.
    """

    def __init__(self, program: Program, size: int, per_segment: int, adds: Sequence[bool]) -> None:
        self._program, self._size, self._per, self._adds = program, size, per_segment, adds
        plan = program.plan
        self._owned = plan.goal in ("reduce_scatter", "all_gather")
        self._parts = program.native.parts if program.native is not None else ()
        if not (size and (program.actions or self._parts)):
            self.segments = 0
        elif not self._owned:
            self.segments = -(-size // per_segment)
        else:
            widest = -(-size // plan.chunks)
            # Chunks of one message must lie side by side, so such a plan cannot be cut inside its chunks.
            together = any(action.hi - action.lo > 1 for action in program.actions) or bool(plan.native)
            self._per = widest if together else max(1, per_segment // plan.chunks)
            self.segments = -(-widest // self._per)
        self.first: Sequence[Move] = self.moves(0) if self.segments else ()
        """What each action moves of the first segment, which most arrays have alone."""

    def parts(self, number: int) -> list[tuple[int, int]]:
        """The elements that each rank of the message library's group owns in segment ``number``."""
        starts, stops = self._bounds(number)
        return [(starts[lo], stops[hi - 1]) if hi > lo else (0, 0) for lo, hi in self._parts]

    def moves(self, number: int) -> Sequence[Move]:
        """The elements that each action moves in segment ``number``."""
        starts, stops = self._bounds(number)
        return tuple(
            Move(
                starts[one.lo],
                stops[one.hi - 1],
                one.index,
                one.kind == "reduce" or (one.kind == "copy" and one.swaps),
                adds,
            )
            for one, adds in zip(self._program.actions, self._adds, strict=True)
        )

    def _bounds(self, number: int) -> tuple[list[int], list[int]]:
        """The first element of every chunk in segment ``number``, and the one after its last."""
        size, per, chunks = self._size, self._per, self._program.plan.chunks
        if self._owned:
            edges = chunk_edges(size, chunks)
            starts = [min(edges[chunk] + number * per, edges[chunk + 1]) for chunk in range(chunks)]
            stops = [min(edges[chunk] + (number + 1) * per, edges[chunk + 1]) for chunk in range(chunks)]
        else:
            first = number * per
            edges = [first + edge for edge in chunk_edges(min(size - first, per), chunks)]
            starts, stops = edges[:-1], edges[1:]
        return starts, stops


def chunk_edges(size: int, chunks: int) -> list[int]:
    """The bounds of the chunks of an array of ``size`` elements: ``chunks + 1`` indices."""
    return [size * chunk // chunks for chunk in range(chunks + 1)]
