"""Scripts of plans: proved free of races and deadlocks by vector clocks, and carried out in random orders on symbols.

What one rank does to a chunk and what another does to it have to be ordered by the waits of the two, or be both reads.
Where that holds for all pairs, every order of events that the waits allow gives the same values.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import registry
from syncline.nouns import Group
from syncline.plans.memory import SCRATCH, Script, compile_scripts
from syncline.plans.plan import COPY, REDUCE, Plan

NAMES = [entry.name for entry in registry.entries("algorithms")]
WORLDS = [*range(1, 10), 12, 16]


def plans(name: str, workers: int) -> Iterator[Plan]:
    make = registry.get("algorithms", name).target
    if name == "ps":
        for servers in (1, 2, 3):
            yield make(Group(workers, servers), servers=servers)
        for servers in {1, workers}:
            yield make(Group(workers), servers=servers, on="workers", update="worker")
    elif name == "broadcast":
        for root in {0, workers // 2, workers - 1}:
            yield make(Group(workers), root=root)
    elif name == "hierarchical":
        for size in (1, 2, 3):
            yield make(Group(workers, nodes=tuple(rank // size for rank in range(workers))))
            yield make(Group(workers, nodes=tuple(rank % size for rank in range(workers))))
    else:
        yield make(Group(workers))


@st.composite
def random_plans(draw: Callable[..., Any]) -> Plan:
    """Transfers of any kind that no algorithm would make: only the meaning of steps has to be kept."""
    world, chunks = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    rows = []
    for step in range(draw(st.integers(1, 4))):
        copied: set[tuple[int, int]] = set()  # what is copied to is written once in a step
        reduced: set[tuple[int, int]] = set()
        for _ in range(draw(st.integers(1, 5))):
            src, dst = draw(st.permutations(range(world)))[:2]
            lo = draw(st.integers(0, chunks - 1))
            count = draw(st.integers(1, chunks - lo))
            op = draw(st.sampled_from([REDUCE, COPY]))
            places = {(dst, chunk) for chunk in range(lo, lo + count)}
            if places & copied or (op == COPY and places & reduced):
                continue
            (copied if op == COPY else reduced).update(places)
            rows.append((step, src, dst, lo, count, op))
    return Plan.of("random", world, chunks, rows or [(0, 0, 1, 0, 1, REDUCE)])


Clocks = dict[tuple[int, int], list[int]]


def clocks(scripts: tuple[Script, ...]) -> Clocks:
    """For every (rank, operation): how many operations of each rank are done before it ends, whatever the order.

    Fails when the scripts block each other: conditions once met stay so, thus one order shows it for all.
    """
    found: Clocks = {}
    at = [0] * len(scripts)
    while any(at[rank] < len(script.operations) for rank, script in enumerate(scripts)):
        before = list(at)
        for rank, script in enumerate(scripts):
            while at[rank] < len(script.operations):
                waits = script.operations[at[rank]].waits
                if any(at[other] < position for other, position in waits):
                    break
                known = [found[other, position - 1] for other, position in waits]
                known += [found[rank, at[rank] - 1]] if at[rank] else []
                clock = [max(column) for column in zip(*known, strict=True)] if known else [0] * len(scripts)
                found[rank, at[rank]] = clock
                at[rank] += 1
                clock[rank] = at[rank]
        assert at != before, "the scripts block each other"
    return found


def accesses(scripts: tuple[Script, ...]) -> dict[tuple[int, int], list[tuple[int, int, bool]]]:
    """(rank, chunk) -> who (rank, operation) touches that memory, and whether to write."""
    found = defaultdict(list)
    for script in scripts:
        for i, operation in enumerate(script.operations):
            for chunk in range(operation.lo, operation.hi):
                for place in {*operation.sources, *operation.targets}:
                    if place >= 0:
                        found[place, chunk].append((script.rank, i, place in operation.targets))
    return found


def prove(plan: Plan) -> None:
    scripts = compile_scripts(plan)
    when = clocks(scripts)

    def ordered(first: tuple[int, int], second: tuple[int, int]) -> bool:
        return when[second][first[0]] > first[1] or when[first][second[0]] > second[1]

    for (owner, chunk), touched in accesses(scripts).items():
        last = len(scripts[owner].operations) - 1
        for (a, i, writes), (b, j, writes_too) in combinations(touched, 2):
            if a != b and (writes or writes_too):
                assert ordered((a, i), (b, j)), f"{plan.name}: {a}.{i} and {b}.{j} race for chunk {chunk} of {owner}"
        for rank, i, _ in touched:
            assert when[rank, i][owner] >= 1, f"{plan.name}: {rank}.{i} does not wait for memory of {owner}"
            assert when[owner, last][rank] > i, f"{plan.name}: {owner} does not wait for {rank}.{i}"


def check_form(plan: Plan) -> None:
    """Waits are for what there is, who is waited for rings, and whom a script names it has announced."""
    scripts = compile_scripts(plan)
    for script in scripts:
        named = set()
        for operation in script.operations:
            for other, position in operation.waits:
                assert other != script.rank
                assert 1 <= position <= len(scripts[other].operations)
                assert script.rank in scripts[other].operations[position - 1].ring
            named |= {other for other, _ in operation.waits}
            named |= {place for place in (*operation.sources, *operation.targets) if place >= 0}
            assert all(SCRATCH - script.scratch < place for place in (*operation.sources, *operation.targets))
            if len(operation.sources) > 1:  # what the passes ask for: the first target is the first source or none
                assert operation.targets[0] in (operation.sources[0], *operation.targets)
                assert operation.targets[0] == operation.sources[0] or operation.targets[0] not in operation.sources
        assert named - {script.rank} == set(script.touches)
        assert set(script.touched_by) == {other.rank for other in scripts if script.rank in other.touches}
        assert not script.operations[0].sources
        assert not script.operations[-1].sources


class Symbols:
    """Memory of all ranks and their scratch: sums are numbers of which every rank's part can be read off."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scripts = compile_scripts(plan)
        owners = plan.owners if plan.goal == "all_gather" else ()
        self.memory: dict[tuple[int, int, int], int | None] = {
            (rank, rank, chunk): (
                None if (rank not in plan.members and not owners) or (owners and owners[chunk] != rank) else part(rank)
            )
            for rank in range(plan.world)
            for chunk in range(plan.chunks)
        }
        self.at = [0] * plan.world
        self.reading: dict[int, list[tuple[tuple[int, int, int], ...]]] = {}

    def able(self) -> list[int]:
        """The ranks that can go on: end a pass that they are in, or begin the next one."""
        return [
            script.rank
            for script in self.scripts
            if script.rank in self.reading
            or (
                self.at[script.rank] < len(script.operations)
                and all(self.at[other] >= done for other, done in script.operations[self.at[script.rank]].waits)
            )
        ]

    def go_on(self, rank: int) -> None:
        """Begin the rank's next pass, or end the one it is in: in between its chunks are the pass's own."""
        operation = self.scripts[rank].operations[self.at[rank]]
        chunks = range(operation.lo, operation.hi)
        sources = [tuple((rank if s < 0 else s, s, chunk) for s in operation.sources) for chunk in chunks]
        targets = [tuple((rank if t < 0 else t, t, chunk) for t in operation.targets) for chunk in chunks]
        if rank not in self.reading:
            self.reading[rank] = [*sources, *targets]
            for others, places in self.reading.items():
                busy = {place for row in places for place in row}
                written = {place for row in targets for place in row}
                assert others == rank or not busy & written, "written while it is used"
            return
        del self.reading[rank]
        for source, target in zip(sources, targets, strict=True):
            values = [self.memory[place] for place in source]
            assert None not in values, "read where nothing is"
            for place in target:
                self.memory[place] = sum(value for value in values if value is not None)
        self.at[rank] += 1


def part(rank: int) -> int:
    return int(100**rank)


def by_the_book(plan: Plan) -> dict[tuple[int, int], int | None]:
    """What the plan's own words give: the transfers of a step read the values from before it."""
    held = {(rank, chunk): value for (rank, _, chunk), value in Symbols(plan).memory.items()}
    rows = np.stack([plan.step, plan.src, plan.dst, plan.chunk, plan.count, plan.op], axis=1).tolist()
    for step in sorted({row[0] for row in rows}):
        before = dict(held)
        for _, src, dst, lo, count, op in (row for row in rows if row[0] == step):
            for chunk in range(lo, lo + count):
                came, has = before[src, chunk], held[dst, chunk]
                held[dst, chunk] = came if op == COPY or has is None else has + (came or 0)
    return held


def play(plan: Plan, seed: int) -> dict[tuple[int, int], int | None]:
    symbols, draw = Symbols(plan), random.Random(seed)
    while able := symbols.able():
        symbols.go_on(draw.choice(able))
    assert [len(script.operations) for script in symbols.scripts] == symbols.at, "they block each other"
    return {
        (rank, chunk): symbols.memory[rank, rank, chunk] for rank in range(plan.world) for chunk in range(plan.chunks)
    }


def check_goal(plan: Plan, held: dict[tuple[int, int], int | None]) -> None:
    total = sum(part(member) for member in plan.members)
    for chunk in range(plan.chunks):
        if plan.goal == "reduce_scatter":
            assert held[plan.owners[chunk], chunk] == total
            continue
        source = {"allreduce": total, "broadcast": part(plan.root or 0)}.get(plan.goal)
        wanted = part(plan.owners[chunk]) if source is None else source
        assert all(held[member, chunk] == wanted for member in plan.members)


@pytest.mark.parametrize("name", NAMES)
def test_no_order_of_events_races_or_blocks(name: str) -> None:
    for workers in WORLDS:
        for plan in plans(name, workers):
            prove(plan)
            check_form(plan)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(NAMES), st.integers(1, 9), st.integers(0, 2**32))
def test_every_algorithm_reaches_its_goal_in_any_order(name: str, workers: int, seed: int) -> None:
    for plan in plans(name, workers):
        check_goal(plan, play(plan, seed))


@settings(deadline=None, max_examples=100)
@given(random_plans(), st.integers(0, 2**32))
def test_any_transfers_keep_the_meaning_of_their_steps(plan: Plan, seed: int) -> None:
    prove(plan)
    check_form(plan)
    assert play(plan, seed) == by_the_book(plan)


@pytest.mark.parametrize("workers", range(2, 17))
def test_direct_is_one_pass_per_rank_that_reads_and_writes_every_peer_once(workers: int) -> None:
    """The least traffic possible: n bytes read N times and written N times in all."""
    plan = registry.get("algorithms", "direct").target(Group(workers))
    scripts = compile_scripts(plan)
    passes = [[operation for operation in script.operations if operation.sources] for script in scripts]
    assert all(len(mine) == 1 for mine in passes)
    for (operation,) in passes:
        assert sorted(operation.sources) == sorted(operation.targets) == list(range(workers))
    assert sum(operation.hi - operation.lo for (operation,) in passes) == plan.chunks
    assert all(script.scratch == 0 for script in scripts)
