"""What is measured how often, which algorithms are candidates, and a whole measuring between threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import registry
from syncline.algorithms.tree import tree
from syncline.errors import UsageError
from syncline.nouns import Group
from syncline.plans.plan import Plan
from syncline.session.session import Session
from syncline.strategy.choice import choose
from syncline.strategy.strategy import Strategy
from syncline.tuning import algorithm_choice
from syncline.tuning.algorithm_choice import HOPELESS, SIZES, Course, Measuring, plan_course

seconds = st.floats(1e-6, 100.0)


def spent(course: Course, foreseen: dict[str, float], meeting_s: float) -> float:
    exchanges = course.rounds * (course.calls + 1) if course.calls > 1 else course.rounds + 1
    return sum(exchanges * foreseen[name] + course.rounds * meeting_s for name in course.names)


@given(st.lists(seconds, min_size=1, max_size=6), st.floats(-1.0, 2.0), st.integers(1, 4), st.sampled_from([0.0, 1e-3]))
def test_a_course_keeps_to_the_budget_and_to_what_is_worth_it(
    times: list[float], remaining: float, left: int, meeting: float
) -> None:
    foreseen = {f"a{number}": found for number, found in enumerate(times)}
    course = plan_course(foreseen, remaining, left, meeting)
    assert len(course.names) != 1  # nothing to compare with
    assert not course.names or spent(course, foreseen, meeting) <= remaining
    assert all(foreseen[name] <= HOPELESS * min(times) for name in course.names)
    assert [name for name in foreseen if name in course.names] == list(course.names)
    if course.names:
        dropped = [found for name, found in foreseen.items() if name not in course.names]
        assert all(found >= max(foreseen[name] for name in course.names) for found in dropped)


def test_slow_links_stop_the_measuring_of_large_arrays() -> None:
    assert plan_course({"ring": 2.0, "tree": 3.0}, 1.0, 1).names == ()
    assert plan_course({"ring": 0.1, "tree": 0.15, "direct": 0.28}, 1.0, 1).names == ("ring", "tree")
    assert plan_course({"ring": 2e-4, "tree": 3e-4}, 1.0, 4) == Course(("ring", "tree"), 2, 9)


def test_schedules_are_tried_among_plans_of_one_order_where_these_are_not_slower() -> None:
    def worth(workers: int, **times_s: float) -> list[str]:
        plans = {name: registry.get("algorithms", name).target(Group(workers)) for name in times_s}
        return list(algorithm_choice._worth_trials({name: [1e-6, seconds] for name, seconds in times_s.items()}, plans))

    near, far = 1 + algorithm_choice.SLOWER / 2, 1 + 2 * algorithm_choice.SLOWER
    assert worth(4, ring=1.0, tree=9.0, halving_doubling=near) == ["halving_doubling", "tree"]
    assert worth(4, ring=1.0, tree=9.0, halving_doubling=far) == []
    assert worth(4, ring=1.0, direct=2.0) == []
    assert set(worth(2, ring=1.0, tree=9.0, halving_doubling=far)) == {"ring", "tree", "halving_doubling"}


def test_candidates_differ_and_the_choice_by_topology_comes_first() -> None:
    def names(workers: int, strategy: str = "transport=shm", nodes: tuple[int, ...] = (), hosts: int = 1) -> list[str]:
        group = Group(workers, nodes=nodes)
        return list(algorithm_choice.candidates(Strategy.parse(strategy).resolve(group, hosts=hosts), group))

    # Two workers make a ring, halves and two levels of the same messages.
    assert names(2) == ["direct", "tree", "recursive_doubling"]
    assert names(4)[0] == "direct"
    assert set(names(4)) == {"direct", "tree", "ring", "double_tree", "halving_doubling", "recursive_doubling"}
    assert names(4, "auto", (0, 0, 1, 1), 2)[0] == "hierarchical"
    assert "ps" not in names(3)


def test_of_equal_plans_the_one_that_comes_with_syncline_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", {kind: dict(found) for kind, found in registry._entries.items()})

    def broken(group: Group) -> Plan:
        raise IndexError(group.workers)

    def same(group: Group) -> Plan:
        return tree(group)

    for name, target in (("a", same), ("star", same), ("b", broken)):
        registry.register("algorithms", name, goal="allreduce")(target)
    group = Group(4)
    found = list(algorithm_choice.candidates(Strategy.parse("transport=tcp").resolve(group), group))
    assert "tree" in found
    assert not {"a", "star", "b"} & set(found)


def test_the_variable_is_held_to_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, ring = Strategy(), Strategy.parse("ring")
    resolved = auto.resolve(Group(2))
    monkeypatch.delenv(algorithm_choice.VARIABLE)
    assert algorithm_choice.mode() == "on"
    assert algorithm_choice.is_wanted(auto, resolved, 2)
    assert not algorithm_choice.is_wanted(auto, resolved, 1)
    assert not algorithm_choice.is_wanted(ring, ring.resolve(Group(2)), 2)
    monkeypatch.setenv(algorithm_choice.VARIABLE, "off")
    assert not algorithm_choice.is_wanted(auto, resolved, 2)
    monkeypatch.setenv(algorithm_choice.VARIABLE, "sometimes")
    with pytest.raises(UsageError, match="choose on, fresh, off"):
        algorithm_choice.mode()


@pytest.mark.parametrize("budget_s", [0.0, 0.05])
def test_all_workers_measure_the_same_and_then_run_what_was_chosen(group: Any, budget_s: float) -> None:
    def body(session: Session) -> Any:
        plans = algorithm_choice.candidates(session.strategy, session.group)
        times = Measuring(session, plans, budget_s).times()
        assert all(len(found) == len(SIZES) and min(found) > 0 for found in times.values())
        session.run_by(choose(SIZES, dict.fromkeys(times, [1.0] * 4) | {"tree": [0.5, 0.5, 2.0, 2.0]}))
        array = np.full(1000, session.rank + 1.0, np.float32)
        session.allreduce(array, average=False)
        names = [session.bucket_plan(nbytes).name for nbytes in (1, 4000, 1 << 25)]
        stats = session.stats()
        return list(times), array.tolist(), names, stats.strategy, stats.algorithms, stats.chosen

    results = group("ring", 3, body)
    for names, array, plans, strategy, algorithms, chosen in results:
        assert names == results[0][0]
        assert array == [6.0] * 1000
        assert plans == ["tree", "tree", "ring"]
        assert strategy == "schedule=fixed transport=inproc"
        assert list(algorithms.values()) == ["tree", "ring"]
        assert chosen.startswith("schedule=fixed transport=inproc, by size: tree below ")


def test_workers_that_resume_with_different_tables_are_told(group: Any) -> None:
    from syncline.errors import MismatchError
    from syncline.strategy.choice import Choice

    def body(session: Session) -> None:
        session.resume_with(Choice(((0, "tree"),)))
        assert session.bucket_plan(1).name == "tree"
        session.resume_with(Choice(((0, "ring" if session.rank else "direct"),)))

    with pytest.raises(MismatchError, match="load_state_dict with measured algorithms"):
        group("ring", 2, body)
