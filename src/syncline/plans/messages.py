"""What one rank does of a plan: its sends and receives, and what each has to wait for.

Compiled once per plan and rank, executed by ``engine.exchange`` for every segment of every bucket. All transfers of a
step read the values from before it, so the dependencies of a rank's action on one chunk are

* a send waits for the receives of earlier steps into its chunks (it sends what they made),
* a receive waits for the sends of earlier steps and of its own that read its chunks (it would overwrite what they
  send), and for the receives before it into its chunks (results keep plan order, so every run gives the same bits).

Only the nearest ones are kept; the others follow from them. ``Cut`` says which elements each action moves, segment by
segment of an array. Nothing here knows about bytes or transports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from ..errors import PlanError
from .plan import Plan

Kind = Literal["send", "copy", "reduce"]


@dataclass(frozen=True, slots=True)
class Action:
    """One send or receive of chunks ``lo`` to ``hi``; ``index`` is its number among the messages of its two ends.

    ``swaps`` marks a receive into chunks that this rank sends in the same step: both ends would wait for each other if
    what arrives could only be taken once the own send is done.
    """

    kind: Kind
    peer: int
    index: int
    step: int
    lo: int
    hi: int
    swaps: bool = False


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's actions in plan order; the same only as itself.

    ``waits[i]`` counts the actions that must finish before action i may act (a send starts, a copy is received, a
    reduction is applied); ``unlocks[i]`` lists those that wait for it. ``follows[i]`` is the reduction that comes next
    into the same chunks in the same step and waits for nothing but reduction i, or -1, and ``precedes`` the other way
    round: the two can be applied in one pass over memory. What follows was sent before this step, so waiting for it
    delays nothing that it needs.
    """

    plan: Plan
    rank: int
    actions: tuple[Action, ...]
    waits: tuple[int, ...]
    unlocks: tuple[tuple[int, ...], ...]
    follows: tuple[int, ...]
    precedes: tuple[int, ...]


def compile_program(plan: Plan, rank: int) -> Program:
    """The program of ``rank``. Cost: linear in its chunks moved, and a look at the columns of the plan."""
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
        for i in step:
            if actions[i].kind == "send":
                for chunk in range(actions[i].lo, actions[i].hi):
                    if chunk in writer:
                        before[i].add(writer[chunk])
                    readers.setdefault(chunk, []).append(i)
        for i in step:
            if actions[i].kind != "send":
                for chunk in range(actions[i].lo, actions[i].hi):
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
    return Program(plan, rank, tuple(actions), waits, tuple(tuple(found) for found in unlocks), follows, precedes)


def _follower(actions: list[Action], before: list[set[int]], i: int, unlocked: list[int]) -> int:
    first = actions[i]
    for j in unlocked:
        other = actions[j]
        alike = (other.kind, other.step, other.lo, other.hi) == ("reduce", first.step, first.lo, first.hi)
        if first.kind == "reduce" and alike and before[j] == {i}:
            return j
    return -1


def _actions(plan: Plan, rank: int) -> list[Action]:
    """This rank's rows; the first reduction into an empty chunk of a rank that contributes nothing is a copy."""
    empty = set() if rank in plan.members or plan.goal == "all_gather" else set(range(plan.chunks))
    found = []
    among: Counter[tuple[int, int]] = Counter()  # both ends count the same: messages need no other number
    # A plan of all pairs has N^2 rows, of which a rank has 2N.
    for row in np.flatnonzero((plan.src == rank) | (plan.dst == rank)).tolist():
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
    """What an action moves of a segment: the elements from ``start`` to ``stop``, under a tag that ends in ``tag``.

    What arrives for one that ``borrows`` cannot go straight to its place. One that ``adds`` is left to the transport,
    which adds while a message comes in.
    """

    start: int
    stop: int
    tag: int
    borrows: bool
    adds: bool


class Cut:
    """The ``segments`` of arrays of one size under a program, and what each action moves of them.

    ``adds`` says of each action whether the transport adds what it receives.

    A plan whose chunks belong to ranks (reduce-scatter, all-gather) is cut inside each chunk, so that a rank's chunk of
    the whole array stays in one piece; others are cut into contiguous segments, which are kinder to the cache.
    """

    def __init__(self, program: Program, size: int, per_segment: int, adds: Sequence[bool]) -> None:
        self._program, self._size, self._per, self._adds = program, size, per_segment, adds
        plan = program.plan
        self._owned = plan.goal in ("reduce_scatter", "all_gather")
        if not (size and program.actions):
            self.segments = 0
        elif not self._owned:
            self.segments = -(-size // per_segment)
        else:
            widest = -(-size // plan.chunks)
            together = any(action.hi - action.lo > 1 for action in program.actions)  # have to lie side by side
            self._per = widest if together else max(1, per_segment // plan.chunks)
            self.segments = -(-widest // self._per)
        self.first: Sequence[Move] = self.moves(0) if self.segments else ()
        """What each action moves of the first segment, which most arrays have alone."""

    def moves(self, number: int) -> Sequence[Move]:
        """What each action moves of a segment."""
        size, per, chunks = self._size, self._per, self._program.plan.chunks
        if self._owned:
            edges = chunk_edges(size, chunks)
            starts = [min(edges[chunk] + number * per, edges[chunk + 1]) for chunk in range(chunks)]
            stops = [min(edges[chunk] + (number + 1) * per, edges[chunk + 1]) for chunk in range(chunks)]
        else:
            first = number * per
            edges = [first + edge for edge in chunk_edges(min(size - first, per), chunks)]
            starts, stops = edges[:-1], edges[1:]
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


def chunk_edges(size: int, chunks: int) -> list[int]:
    """Where the chunks of an array of ``size`` elements begin and end: ``chunks + 1`` indices."""
    return [size * chunk // chunks for chunk in range(chunks + 1)]
