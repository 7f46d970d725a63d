"""A drawn plan fits 80 columns, leaves no rank and no step out, and says what it does not show."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import registry
from syncline.nouns import Group
from syncline.plans.plan import Plan
from syncline_bench.report.plan_drawing import WIDTH, draw_plan


def make(name: str, workers: int) -> Plan:
    group = Group(workers, servers=2 if name == "ps" else 0, nodes=tuple(rank * rank % 3 for rank in range(workers)))
    plan: Plan = registry.get("algorithms", name).target(group, **({"servers": 2} if name == "ps" else {}))
    return plan


def numbers(text: str) -> set[int]:
    """The numbers of ``0-3, 7``."""
    found: set[int] = set()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.update(range(int(low), int(high or low) + 1))
    return found


def table(text: str, first: str) -> list[str]:
    """The lines of the table whose head starts with that word and has a column ``bytes out`` or ``transfers``."""
    block = next(block for block in text.split("\n\n") if re.search(rf"^{first} .*(bytes out|transfers)", block, re.M))
    lines = block.splitlines()
    head = next(i for i, line in enumerate(lines) if re.match(rf"{first} .*(bytes out|transfers)", line))
    return lines[head + 1 :]


@given(st.sampled_from(registry.names("algorithms")), st.integers(1, 70))
def test_width_ranks_and_steps(name, workers):
    plan = make(name, workers)
    text = draw_plan(plan)
    assert all(len(line) <= WIDTH for line in text.splitlines())
    loads = [re.split(r"\s{2,}", line)[0] for line in table(text, "rank")]
    assert numbers(" ".join(loads)) == set(range(plan.world))
    if len(plan):
        steps = [re.split(r"\s{2,}", line)[0] for line in table(text, "step")]
        assert numbers(" ".join(steps)) == set(plan.step.tolist())


@pytest.mark.parametrize("name", registry.names("algorithms"))
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_small_plan_shows_every_transfer(name, workers):
    plan = make(name, workers)
    drawn = re.findall(r"([+=])(\d+)(?:-(\d+))?<(\d+)", draw_plan(plan).split("takes it over.")[1])
    signs = {"reduce": "+", "copy": "="}
    expected = [
        (signs[item.op], str(item.chunk), str(item.chunk + item.count - 1) if item.count > 1 else "", str(item.src))
        for item in plan
    ]
    assert sorted(drawn) == sorted(expected)


def test_what_is_left_out_is_said():
    text = draw_plan(make("ring", 64))
    assert "The drawing of 8064 single transfers is left out" in text
    assert "<" not in text


def test_head_names_goal_sizes_owners_root_and_servers():
    assert draw_plan(make("ring", 4)).startswith("ring: allreduce among 4 ranks; 4 chunks, 6 steps, 24 transfers\n")
    assert "Rank r owns chunk r." in draw_plan(make("reduce_scatter", 4))
    assert "Rank 0 is the root." in draw_plan(make("broadcast", 4))
    assert "3 ranks and 2 servers (3-4)" in draw_plan(make("ps", 3))
    assert "Nothing has to be sent." in draw_plan(make("ring", 1))
