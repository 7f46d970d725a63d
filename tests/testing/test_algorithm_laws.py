"""Every law of algorithms can be broken: an algorithm that does so is caught, by the name of the law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest

from syncline import registry
from syncline.algorithms import Roles
from syncline.algorithms.direct import direct
from syncline.algorithms.ps import ps, push_and_pull
from syncline.algorithms.ring import ring
from syncline.nouns import Group
from syncline.plans.plan import COPY, REDUCE, Plan
from syncline.registry import register
from syncline.testing import BrokenLaw, check_algorithm
from syncline.testing import algorithms as testing
from syncline.testing.algorithms import LAWS

turn = count()


def star(group: Group) -> Plan:
    others = range(1, group.workers)
    return Plan.of(
        "star",
        group,
        1,
        [(0, rank, 0, 0, 1, REDUCE) for rank in others] + [(1, 0, rank, 0, 1, COPY) for rank in others],
    )


def another_order_each_time(group: Group) -> Plan:
    plan = star(group)
    rows = np.roll(plan.rows[: group.workers - 1], next(turn), axis=0)
    return Plan.of("star", group, 1, np.concatenate([rows, plan.rows[group.workers - 1 :]]))


def another_goal(group: Group) -> Plan:
    return registry.get("algorithms", "reduce_scatter").target(group)


def without_the_servers(group: Group) -> Plan:
    return star(Group(group.workers))


def among_some(group: Group) -> Plan:
    return replace(star(group), members=tuple(range(max(1, group.workers - 1))))


def a_dropped_transfer(group: Group) -> Plan:
    plan = ring(group)
    return Plan.of("ring", group, plan.chunks, plan.rows[:-1]) if group.workers == 7 else plan


def a_transfer_done_twice(group: Group) -> Plan:
    plan = ring(group)
    return Plan.of("ring", group, plan.chunks, np.repeat(plan.rows, 1 + (np.arange(len(plan)) == 3), axis=0))


def wrong_on_some_nodes(group: Group) -> Plan:
    """Right unless there are nodes of three."""
    plan = direct(group)
    return Plan.of("direct", group, plan.chunks, plan.rows[1:]) if group.nodes[:4] == (0, 0, 0, 1) else plan


def alone_to_itself(group: Group) -> Plan:
    """One worker among servers of no use sends there and back."""
    if group.workers > 1 or not group.servers:
        return star(group)
    return Plan.of("star", group, 1, [(0, 0, 1, 0, 1, REDUCE), (1, 1, 0, 0, 1, REDUCE)][:1])


@pytest.mark.parametrize(
    ("law", "algorithm"),
    [
        ("the same group gets the same plan", another_order_each_time),
        ("the same group gets the same plan", another_goal),
        ("the same group gets the same plan", without_the_servers),
        ("the same group gets the same plan", among_some),
        ("every plan is proved", a_dropped_transfer),
        ("every plan is proved", a_transfer_done_twice),
        ("every plan is proved", wrong_on_some_nodes),
        ("one worker has nothing to send", alone_to_itself),
    ],
)
def test_a_broken_algorithm_is_caught_by_the_law(law: str, algorithm: Callable[[Group], Plan]) -> None:
    check_algorithm(star, workers=range(1, 9))
    with pytest.raises(BrokenLaw) as caught:
        check_algorithm(algorithm, workers=range(1, 9))
    assert caught.value.law == law
    assert str(caught.value).startswith(f"algorithm {algorithm.__name__} breaks the law {law!r} with Group(workers=")


@pytest.mark.parametrize(
    ("law", "name", "wrong"),
    [
        ("sums are right and equal everywhere", "wanted", lambda plan, given, chunk: given[0, chunk]),  # noqa: ARG005
        ("halves add up to the whole", "phases", lambda plan: (plan, plan)),
    ],
)
def test_what_the_proof_finds_first_is_found_by_numbers_too(
    law: str, name: str, wrong: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plan that is proved breaks these; they are held against a proof, or an execution, that is wrong itself."""
    monkeypatch.setattr(testing, name, wrong)
    with pytest.raises(BrokenLaw) as caught:
        check_algorithm(star, workers=range(1, 5))
    assert caught.value.law == law


@pytest.mark.parametrize("fault", ["pushes only", "elsewhere", "beside nobody"])
def test_roles_that_are_not_so_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def roles(servers: int) -> Roles:
        halves = partial(push_and_pull, servers=servers)
        if fault == "pushes only":
            return Roles(servers, True, True, lambda group: (halves(group)[0],) * 2)
        if fault == "elsewhere":
            return Roles(servers, True, True, lambda group: tuple(among_others(half) for half in halves(group)))
        return Roles(servers, True, True, halves, beside="nobody")

    def among_others(half: Plan) -> Plan:
        ranks = list(range(half.world))
        return half.among([*ranks[1:-1], ranks[0], ranks[-1]] if len(ranks) > 2 else ranks[::-1])

    registry.names("algorithms")
    monkeypatch.setitem(registry._entries, "algorithms", dict(registry._entries["algorithms"]))

    @register("algorithms", "aggregator", goal="allreduce", roles=roles)
    def aggregator(group: Group, *, servers: int = 1) -> Plan:
        return replace(ps(group, servers=servers), name="aggregator")

    with pytest.raises(BrokenLaw, match="aggregator") as caught:
        check_algorithm("aggregator", workers=range(1, 5))
    assert caught.value.law == "owners are at the declared places"


def test_laws_that_do_not_concern_an_algorithm_are_not_counted() -> None:
    assert check_algorithm("ps", workers=range(1, 5)) == LAWS.names
    assert check_algorithm("broadcast", workers=range(1, 5)) == LAWS.names[:4]
    assert check_algorithm("recursive_doubling", workers=[4]) == (*LAWS.names[:2], LAWS.names[3])
