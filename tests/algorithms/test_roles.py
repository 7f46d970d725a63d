"""The plans of one worker's push and pull, whoever the owners are: proved, and no concern of other workers."""

from __future__ import annotations

import numpy as np
import pytest

from syncline.nouns import Group
from syncline.plans.check import check
from syncline.strategy.strategy import Strategy


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("owners", [1, 2, 5])
@pytest.mark.parametrize("on", ["ranks", "workers"])
def test_a_push_and_a_pull_are_between_one_worker_and_the_owners(workers: int, owners: int, on: str) -> None:
    strategy = Strategy.parse(f"ps(servers={owners}, on={on})")
    roles = strategy.roles
    assert roles is not None
    group = Group(workers, strategy.servers)
    places = roles.places(group)
    for worker in range(workers if on == "ranks" or owners <= workers else 0):
        push, pull = roles.halves_of(group, worker)
        for plan in (push, pull):
            check(plan)
            assert plan.owners == places
            assert plan.members == (worker,)
            assert plan.steps <= 1
        others = sorted(place for place in places if place != worker)
        assert set(push.src.tolist()) | set(pull.dst.tolist()) <= {worker}
        assert sorted(push.dst.tolist()) == sorted(pull.src.tolist()) == others
        np.testing.assert_allclose(push.bytes_sent(owners)[worker], len(others))


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("owners", [1, 2, 3])
@pytest.mark.parametrize("on", ["ranks", "workers"])
def test_owners_send_the_push_of_one_worker_on_to_their_followers(workers: int, owners: int, on: str) -> None:
    strategy = Strategy.parse(f"ps(servers={owners}, on={on}, replicas=1)")
    roles, group = strategy.roles, Group(workers, strategy.servers)
    assert roles is not None
    for worker in range(workers if on == "ranks" or owners <= workers else 0):
        push, pull = roles.halves_of(group, worker)
        check(push)
        check(pull)
        copies = {(push[i].src, push[i].dst, push[i].chunk) for i in range(len(push)) if push[i].op == "copy"}
        both = zip(roles.places(group), roles.followers(group), range(owners), strict=False)
        assert copies == {(place, follower, part) for place, follower, part in both if follower != worker}


@pytest.mark.parametrize("local", ["false", "true"])
@pytest.mark.parametrize("nodes", [(0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 0, 1, 1, 2, 2)])
def test_every_owner_has_a_follower_of_its_own(nodes: tuple[int, ...], local: str) -> None:
    """It gets the sums by the push, on another host if one turn of the owners allows that."""
    for owners in range(1, len(nodes) + 1):
        strategy = Strategy.parse(f"ps(servers={owners}, on=workers, local={local}, replicas=1)")
        group, roles = Group(len(nodes), nodes=nodes), strategy.roles
        assert roles is not None
        places, followers = roles.places(group), roles.followers(group)
        assert len(set(followers)) == owners
        assert all(place != follower for place, follower in zip(places, followers, strict=True))
        if nodes != (0, 0, 0, 1) and len(set(nodes)) > 1 and owners != 3:
            assert all(nodes[place] != nodes[follower] for place, follower in zip(places, followers, strict=True))
        push, pull = strategy.halves(group)
        check(push)
        check(pull)
        chunks = push.chunks // owners
        copies = {
            (push[i].src, push[i].dst, push[i].chunk, push[i].count) for i in range(len(push)) if push[i].op == "copy"
        }
        assert copies == {(places[i], followers[i], i * chunks, chunks) for i in range(owners)}
    assert Strategy.parse("ps(servers=1, on=workers, replicas=1)").roles.followers(Group(1)) == ()  # type: ignore[union-attr]


def test_workers_turn_to_the_owners_after_their_own_number_first() -> None:
    roles = Strategy.parse("ps(servers=3)").roles
    assert roles is not None
    first = [roles.halves_of(Group(3, 3), worker)[0].dst[0] for worker in range(3)]
    assert first == [3, 4, 5]


@pytest.mark.parametrize(
    ("servers", "nodes", "wanted"),
    [
        (2, (0, 0, 1, 1), (0, 2)),
        (3, (0, 0, 1, 1), (0, 1, 2)),
        (4, (0, 0, 1, 1), (0, 1, 2, 3)),
        (3, (0, 0, 0, 1), (0, 1, 3)),
        (3, (0, 1, 0, 1, 2, 2), (0, 1, 4)),
        (2, (), (0, 1)),
    ],
)
def test_serving_workers_stand_on_different_hosts(
    servers: int, nodes: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    strategy = Strategy.parse(f"ps(servers={servers}, on=workers)")
    group, roles = Group(len(nodes) or 4, nodes=nodes), strategy.roles
    assert roles is not None
    assert roles.places(group) == wanted
    for half in (*strategy.halves(group), strategy.plan(group)):
        check(half)
    assert strategy.halves(group)[0].owners == wanted
