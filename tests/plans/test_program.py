"""Programs: what one rank does of a plan, and what each action waits for."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import registry
from syncline.algorithms.direct import direct_all_gather
from syncline.algorithms.ps import ps, push_and_pull
from syncline.errors import PlanError
from syncline.nouns import Group
from syncline.plans.messages import Program, compile_program
from syncline.plans.plan import COPY, REDUCE, Plan

GOALS = {entry.name: entry.target for entry in registry.entries("algorithms") if entry.name != "ps"}


def plans(draw: Callable[..., int]) -> Plan:
    """A plan of any algorithm for any group of up to 9."""
    name = draw(st.sampled_from([*sorted(GOALS), "ps", "push", "pull"]))
    workers = draw(st.integers(1, 9))
    if name in GOALS:
        found: Plan = GOALS[name](Group(workers))
        return found
    servers = draw(st.integers(1, 3))
    group = Group(workers, servers)
    if name == "ps":
        return ps(group, servers=servers)
    return push_and_pull(group, servers=servers)[name == "pull"]


@st.composite
def programs(draw: Callable[..., int]) -> list[Program]:
    plan = plans(draw)
    world = max([plan.world, *(max(transfer.src, transfer.dst) + 1 for transfer in plan)])
    return [compile_program(plan, rank) for rank in range(world)]


@given(programs())
def test_every_transfer_is_one_send_and_one_receive_of_its_two_ranks(all_ranks: list[Program]) -> None:
    """Which both ranks number alike: messages are matched by their two ends and that number."""
    sends: dict[tuple[int, int, int], tuple[int, int]] = {}
    receives: dict[tuple[int, int, int], tuple[int, int]] = {}
    for program in all_ranks:
        for action in program.actions:
            ends = (program.rank, action.peer) if action.kind == "send" else (action.peer, program.rank)
            table = sends if action.kind == "send" else receives
            assert (*ends, action.index) not in table
            table[(*ends, action.index)] = action.lo, action.hi
    wanted: dict[tuple[int, int, int], tuple[int, int]] = {}
    among: Counter[tuple[int, int]] = Counter()
    for transfer in all_ranks[0].plan:
        ends = transfer.src, transfer.dst
        wanted[(*ends, among[ends])] = transfer.chunk, transfer.chunk + transfer.count
        among[ends] += 1
    assert sends == wanted
    assert receives == wanted


@pytest.mark.parametrize("world", [1024, 1025])
def test_the_tickets_of_a_thousand_ranks_are_few_messages_of_each(world: int) -> None:
    """The plan has N(N-1) rows, of which a rank looks at its own."""
    program = compile_program(direct_all_gather(Group(world)), world - 1)
    assert len(program.actions) == 2 * (world - 1)
    assert {action.index for action in program.actions} == {0}


@given(programs())
def test_actions_wait_for_earlier_ones_and_can_all_run(all_ranks: list[Program]) -> None:
    """The waits of a rank are the number of actions that unlock it; nothing waits for itself in a circle."""
    for program in all_ranks:
        counted = [0] * len(program.actions)
        for i, unlocked in enumerate(program.unlocks):
            for j in unlocked:
                counted[j] += 1
                assert (program.actions[i].step, i) != (program.actions[j].step, j)
                assert program.actions[i].step <= program.actions[j].step
        assert tuple(counted) == program.waits
        ready = [i for i, waits in enumerate(counted) if waits == 0]
        done = 0
        while ready:
            done += 1
            for j in program.unlocks[ready.pop()]:
                counted[j] -= 1
                if counted[j] == 0:
                    ready.append(j)
        assert done == len(program.actions)


def reachable(program: Program, start: int) -> set[int]:
    found: set[int] = set()
    todo = [start]
    while todo:
        for j in program.unlocks[todo.pop()]:
            if j not in found:
                found.add(j)
                todo.append(j)
    return found


@given(programs())
def test_actions_on_one_chunk_are_ordered_unless_both_only_read(all_ranks: list[Program]) -> None:
    """Two actions that touch one chunk, one of them writing, never run at the same time.

    Within a step sends come before receives, since all transfers of a step read the values from before it; receives
    keep plan order.
    """
    for program in all_ranks:
        after = [reachable(program, i) for i in range(len(program.actions))]
        for i, j in itertools.combinations(range(len(program.actions)), 2):
            first, second = program.actions[i], program.actions[j]
            share = max(first.lo, second.lo) < min(first.hi, second.hi)
            if not share or first.kind == second.kind == "send":
                continue
            turned = first.step == second.step and second.kind == "send"
            assert (i in after[j]) if turned else (j in after[i])


@given(programs())
def test_swaps_marks_reductions_into_chunks_sent_in_the_same_step(all_ranks: list[Program]) -> None:
    for program in all_ranks:
        for action in program.actions:
            sent = any(
                other.kind == "send"
                and other.step == action.step
                and max(other.lo, action.lo) < min(other.hi, action.hi)
                for other in program.actions
            )
            if action.kind == "reduce":
                assert action.swaps == sent
            else:
                assert not action.swaps


def test_the_first_reduction_into_a_servers_empty_chunk_is_a_copy() -> None:
    plan = ps(Group(3, 1))
    assert [action.kind for action in compile_program(plan, 3).actions][:3] == ["copy", "reduce", "reduce"]


def test_a_reduction_into_empty_and_filled_chunks_at_once_is_refused() -> None:
    rows = [(0, 0, 2, 0, 1, REDUCE), (1, 1, 2, 0, 2, REDUCE), (2, 2, 0, 0, 2, COPY), (2, 2, 1, 0, 2, COPY)]
    plan = Plan.of("odd", Group(2, 1), 2, rows)
    with pytest.raises(PlanError, match="empty and filled chunks at once"):
        compile_program(plan, 2)
