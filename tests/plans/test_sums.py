"""The order in which plans add: plans of one order give the same bits, wherever an element lies."""

from __future__ import annotations

import numpy as np
import pytest

from syncline import registry
from syncline.nouns import Group
from syncline.plans.plan import REDUCE, Plan
from syncline.plans.sums import order_of_additions

GROUPS = (2, 3, 4, 5, 6, 7, 8, 12)
NAMES = [
    entry.name
    for entry in registry.entries("algorithms")
    if entry.capabilities.get("goal") == "allreduce" and "roles" not in entry.capabilities and entry.own
]


def sums(plan: Plan, arrays: np.ndarray) -> np.ndarray:
    """What each rank has in the end, chunk by chunk; values of a step are those from before it."""
    held = np.repeat(arrays[:, None], plan.chunks, axis=1)
    for step in np.unique(plan.step):
        before = held.copy()
        for place in np.flatnonzero(plan.step == step):
            move = plan[int(place)]
            chunks = slice(move.chunk, move.chunk + move.count)
            if plan.op[place] == REDUCE:
                held[move.dst, chunks] += before[move.src, chunks]
            else:
                held[move.dst, chunks] = before[move.src, chunks]
    return held


@pytest.mark.parametrize("workers", GROUPS)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_with_an_order_gives_the_same_bits_in_every_chunk(name: str, workers: int) -> None:
    """Every chunk holds the same numbers here, so that chunks differ in bits where they are added in other orders."""
    plan = registry.get("algorithms", name).target(Group(workers))
    draw = np.random.default_rng(workers)
    found = sums(plan, draw.standard_normal((workers, 200)).astype(np.float32))
    alike = bool((found == found[0, 0]).all())
    assert alike == (order_of_additions(plan) is not None)


@pytest.mark.parametrize("workers", GROUPS)
def test_plans_of_one_order_give_the_same_bits(workers: int) -> None:
    arrays = np.random.default_rng(workers).standard_normal((workers, 200)).astype(np.float32)
    by_order: dict[str, list[bytes]] = {}
    for name in NAMES:
        plan = registry.get("algorithms", name).target(Group(workers))
        if (order := order_of_additions(plan)) is not None:
            by_order.setdefault(order, []).append(sums(plan, arrays)[0, 0].tobytes())
    assert by_order
    for found in by_order.values():
        assert len(set(found)) == 1
    assert len({found[0] for found in by_order.values()}) == len(by_order)


@pytest.mark.parametrize("workers", range(2, 65))
def test_halving_doubling_has_an_order_for_every_number_of_workers(workers: int) -> None:
    """So that it can run where buckets are tried on the live run."""
    assert order_of_additions(registry.get("algorithms", "halving_doubling").target(Group(workers))) is not None


def test_a_plan_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = registry.get("algorithms", "ring").target(Group(5))
    found = order_of_additions(plan)
    monkeypatch.setattr(Plan, "__getitem__", None)  # by which it is followed
    assert order_of_additions(plan) == found
