"""A right plan stays right under no change: what is dropped, doubled or swapped is found, and the ranks are named."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from syncline import registry
from syncline.errors import PlanError
from syncline.nouns import Group
from syncline.plans.check import check
from syncline.plans.plan import Plan
from syncline.sync.gossip import Gossip

NAMES_RANKS = re.compile(
    r"step \d+, \d+ -> \d+ (reduce|copy) chunks? \d+.*rank \d+|at the end rank \d+ .* of ranks? \d+"
    r"|a message library carries out the transfers among ranks \d+"
)


@st.composite
def right_plans(draw: st.DrawFn) -> Plan:
    """A registered algorithm's plan for a group of 2 to 12 workers, or a mix of theirs."""
    name = draw(st.sampled_from([*registry.names("algorithms"), "gossip"]))
    workers = draw(st.integers(2, 12))
    if name == "gossip":
        return Gossip(draw(st.sampled_from(["ring", "exponential"]))).mix(workers, draw(st.integers(0, 9)))
    target = registry.get("algorithms", name).target
    if name == "ps":
        servers = draw(st.integers(1, 4))
        if draw(st.booleans()):
            return target(Group(workers, servers), servers=servers)
        return target(Group(workers), servers=min(servers, workers), on="workers")
    if name == "double_tree":
        return target(Group(workers), pieces=draw(st.integers(1, 3)))
    if name == "hierarchical":
        nodes = draw(st.lists(st.integers(0, 3), min_size=workers, max_size=workers))
        return target(Group(workers, nodes=tuple(nodes)), inside=draw(st.sampled_from(["ring", "native"])))
    if name == "broadcast":
        return target(Group(workers), root=draw(st.integers(0, workers - 1)))
    return target(Group(workers))


def changed(plan: Plan, rows: list[list[int]]) -> Plan:
    return Plan.of(
        plan.name,
        plan.world,
        plan.chunks,
        rows,
        goal=plan.goal,
        members=plan.members,
        owners=plan.owners,
        root=plan.root,
        sums=plan.sums,
        native=plan.native,
    )


@given(right_plans())
def test_an_unchanged_plan_is_right(plan):
    check(changed(plan, plan.rows.tolist()))


@given(right_plans(), st.data())
def test_a_dropped_transfer_is_found(plan, data):
    place = data.draw(st.integers(0, len(plan) - 1))
    rows = plan.rows.tolist()
    del rows[place]
    with pytest.raises(PlanError, match=NAMES_RANKS):
        check(changed(plan, rows))


@given(right_plans(), st.data())
def test_a_transfer_done_twice_is_found_and_named(plan, data):
    place = data.draw(st.integers(0, len(plan) - 1))
    rows = plan.rows.tolist()
    rows.insert(place, rows[place])
    with pytest.raises(PlanError, match=NAMES_RANKS) as caught:
        check(changed(plan, rows))
    assert f"step {plan[place].step}, {plan[place]}:" in str(caught.value)


@given(right_plans(), st.data())
def test_a_transfer_done_again_later_is_found(plan, data):
    place = data.draw(st.integers(0, len(plan) - 1))
    again = plan.rows[place].tolist()
    again[0] = data.draw(st.integers(again[0] + 1, int(plan.step[-1]) + 1))
    with pytest.raises(PlanError, match=NAMES_RANKS):
        check(changed(plan, [*plan.rows.tolist(), again]))


def depends(plan, i, j):
    """Whether transfer j must wait for transfer i, which stands before it: two reduces into one chunk commute."""
    first, second = plan[i], plan[j]
    if first.step == second.step or first.chunk >= second.chunk + second.count:
        return False
    if second.chunk >= first.chunk + first.count:
        return False
    commute = first.op == second.op == "reduce"
    return first.dst == second.src or first.src == second.dst or (first.dst == second.dst and not commute)


@given(right_plans(), st.data())
def test_swapped_steps_of_dependent_transfers_are_found(plan, data):
    chunk = data.draw(st.integers(0, plan.chunks - 1))
    touching = [i for i, item in enumerate(plan) if item.chunk <= chunk < item.chunk + item.count]
    pairs = [(i, j) for i, j in combinations(touching, 2) if depends(plan, i, j)]
    assume(pairs)
    i, j = data.draw(st.sampled_from(pairs))
    rows = plan.rows.tolist()
    rows[i][0], rows[j][0] = rows[j][0], rows[i][0]
    with pytest.raises(PlanError, match=NAMES_RANKS):
        check(changed(plan, rows))
