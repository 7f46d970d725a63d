"""Groups of workers: any may be made and used at once, under every strategy, and each is told of by itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from group_calls import all_calls, wanted
from hypothesis import given, settings
from hypothesis import strategies as st

from recorded import Recorder
from syncline.engine.order import Order
from syncline.errors import UsageError
from syncline.launch.connecting import in_process
from syncline.session.groups import found_group, new_group
from syncline.session.session import MODEL_KEYS, Session

STRATEGIES = ["ring", "direct", "tree", "hierarchical", "ps(servers=1)", "ps(servers=2, on=workers)", "codec=int8"]


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[tuple[int, ...]]]:
    """A number of workers, and groups of some of them, which may overlap, in the order in which they are made."""
    workers = draw(st.integers(1, 5))
    groups = st.sets(st.integers(0, workers - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    return workers, draw(st.lists(groups, min_size=1, max_size=6))


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[tuple[int, ...]]]:
    """A number of workers, each of which is in one of some groups."""
    workers = draw(st.integers(2, 6))
    places = draw(st.lists(st.integers(0, 2), min_size=workers, max_size=workers))
    return workers, [tuple(np.flatnonzero(np.equal(places, place)).tolist()) for place in sorted(set(places))]


@settings(max_examples=40, deadline=None)
@given(run=runs(), strategy=st.sampled_from(STRATEGIES[:4]))
def test_any_groups_communicate_by_themselves(group: Any, run: Any, strategy: str) -> None:
    """Overlapping, nested, of one, of all: each gets what its own workers give, whatever the others do."""
    workers, groups = run

    def body(session: Session) -> list[Any]:
        made = [new_group(session, ranks) for ranks in groups]
        return [all_calls(one.session, session.rank) for one in made if one.rank >= 0]

    for rank, found in enumerate(group(strategy, workers, body)):
        assert found == [wanted(ranks) for ranks in groups if rank in ranks]


@settings(max_examples=20, deadline=None)
@given(run=partitions(), data=st.data())
def test_groups_that_share_nobody_have_the_same_number_and_do_not_meet(
    group: Any, run: Any, data: st.DataObject
) -> None:
    """Parts of a run are made by their own ranks alone, in any order, and used at once."""
    workers, groups = run
    rounds = data.draw(st.integers(1, 4))

    def body(session: Session) -> list[Any]:
        mine = next(ranks for ranks in groups if session.rank in ranks)
        made = found_group(session, mine)
        return [all_calls(made.session, session.rank) for _ in range(rounds)]

    for rank, found in enumerate(group("ring", workers, body)):
        assert found == [wanted(next(ranks for ranks in groups if rank in ranks))] * rounds


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_workers_make_groups_under_every_strategy(group: Any, strategy: str) -> None:
    """Also beside servers, which take no part."""

    def body(session: Session) -> Any:
        if not session.is_worker:
            return None
        halves = [new_group(session, ranks) for ranks in ([2, 0], [1, 3])]
        assert [one.rank for one in halves].count(-1) == 1
        assert [one.ranks for one in halves] == [(0, 2), (1, 3)]
        return all_calls(halves[session.rank % 2].session, session.rank)

    found = group(strategy, 4, body)
    assert found[:4] == [wanted((0, 2)), wanted((1, 3))] * 2


def test_two_groups_are_used_at_once_by_two_threads_in_different_orders(group: Any) -> None:
    """Rows and columns: whoever is in the middle of one is in the middle of the other."""

    def body(session: Session) -> Any:
        grid = [new_group(session, ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        mine = [one for one in grid if one.rank >= 0]
        order = mine if session.rank % 2 else mine[::-1]
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda one: [all_calls(one.session, session.rank) for _ in range(20)], order))
        return [(one.ranks, calls) for one, calls in zip(order, found, strict=True)]

    for found in group("ring", 4, body):
        assert all(calls == [wanted(ranks)] * 20 for ranks, calls in found)


def test_what_is_under_way_in_two_groups_and_in_all_ends_in_any_order(group: Any) -> None:
    def body(session: Session) -> Any:
        small, large = new_group(session, [0, 1]), new_group(session, [0, 1, 2])
        arrays, works = [], []
        for here in (
            (large.session, session, small.session) if session.rank else (small.session, session, large.session)
        ):
            arrays.append((here.world_size, np.full(70_000, 1.0 + session.rank)))
            program = here.allreduce_program(arrays[-1][1].nbytes)
            works.append(here.engine.start(Order(program, arrays[-1][1], 7, "one key in all of them")))
        session.engine.wait(*works)
        return {size: float(array[0]) for size, array in arrays}

    def in_three(session: Session) -> Any:
        if session.rank < 2:
            return body(session)
        new_group(session, [0, 1])
        large = new_group(session, [0, 1, 2])
        arrays = [np.full(70_000, 3.0) for _ in range(2)]
        works = [
            here.engine.start(Order(here.allreduce_program(array.nbytes), array, 7, "one key in all of them"))
            for here, array in zip((session, large.session), arrays, strict=True)
        ]
        session.engine.wait(*works)
        return [float(array[0]) for array in arrays]

    first, second, third = group("ring", 3, in_three)
    assert first == second == {2: 3.0, 3: 6.0}
    assert third == [6.0, 6.0]


def test_a_group_counts_what_is_its_own(group: Any) -> None:
    """Bytes by rank in the run, and the time blocked: what is done in others is not in it."""

    def body(session: Session) -> Any:
        pair, trio = new_group(session, [0, 2]), new_group(session, [0, 1, 2])
        trio.session.allreduce(np.ones(1 << 16))
        if pair.rank < 0:
            return None
        before = pair.session.stats()
        array = np.ones(1 << 16)
        pair.session.allreduce(array)
        found = pair.session.stats()
        other = 2 - session.rank
        assert (dict(before.bytes_sent), before.blocked_s) == ({}, 0.0)
        assert array.nbytes <= found.bytes_sent[other] < array.nbytes + 1000
        assert array.nbytes <= found.bytes_received[other] < array.nbytes + 1000
        assert set(found.bytes_sent) == {other}
        assert found.blocked_s > 0
        return sum(session.stats().bytes_sent.values()) > found.bytes_sent[other]

    assert group("ring", 3, body) == [True, None, True]


def test_a_timeline_says_of_what_is_done_in_a_group_whose_it_is(run_on: Any) -> None:
    """By its label, and by keys that no other group has."""
    recorders = [Recorder(lambda: 0.0) for _ in range(3)]

    def body(session: Session) -> None:
        pair = new_group(session, [0, 2])
        session.allreduce(np.ones(10))
        if pair.rank >= 0:
            pair.session.allreduce(np.ones(10))

    run_on(in_process("ring", 3, recorders), body)
    for rank, recorder in enumerate(recorders):
        runs = [span for span in recorder.spans("work") if span.label.endswith("allreduce") and span.key >= 0]
        labels = {span.label for span in runs}
        assert labels == ({"allreduce"} if rank == 1 else {"allreduce", "group of ranks 0, 2: allreduce"})
        keys = [{span.key for span in runs if span.label == label} for label in sorted(labels)]
        assert len(set.union(*keys)) == sum(map(len, keys))


def test_models_of_a_group_have_keys_that_no_other_has(group: Any) -> None:
    """The first model of each: one key within its group, another one in the run."""

    def body(session: Session) -> Any:
        both = [new_group(session, [0, 1]), new_group(session, [0, 1])]
        models = [object.__new__(type("Model", (), {})) for _ in both]
        firsts = [one.session.enter_model(model) for one, model in zip(both, models, strict=True)]
        arrays = [np.full(9, float(number)) for number in range(2)]
        works = [
            one.session.engine.start(Order(one.session.bucket_program(72), array, first + MODEL_KEYS - 2, "a bucket"))
            for one, first, array in zip(both, firsts, arrays, strict=True)
        ]
        session.engine.wait(*works)
        with pytest.raises(
            UsageError, match=r"models, or samplers, were made with the <group of ranks 0-1>, which therefore ends"
        ):
            both[0].end()
        return firsts, [float(array[0]) for array in arrays]

    assert group("ring", 2, body) == [([0, 0], [0.0, 2.0])] * 2
