"""Groups of workers: any may be made and used at once; how they end, and which calls are refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
from group_calls import all_calls, wanted
from hypothesis import given, settings
from hypothesis import strategies as st

from recorded import Recorder
from syncline.engine.order import Order
from syncline.engine.scope import SCOPES
from syncline.errors import ClosedError, MismatchError, PeerTimeout, UsageError
from syncline.launch.connecting import in_process
from syncline.session.groups import WorkerGroup, found_group, new_group
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
        with pytest.raises(UsageError, match=r"models or samplers were made with the <group of ranks 0-1>: it ends"):
            both[0].end()
        return firsts, [float(array[0]) for array in arrays]

    assert group("ring", 2, body) == [([0, 0], [0.0, 2.0])] * 2


def test_an_ended_group_says_so_and_gives_its_number_back(group: Any) -> None:
    """As many can be made, one after the other, as anybody likes."""

    def body(session: Session) -> Any:
        for number in range(2 * SCOPES):
            one = new_group(session, [0, 1])
            array = np.full(3, 1.0 + session.rank)
            if one.rank >= 0:
                one.session.allreduce(array)
                assert array[0] == 1.5
            if number % 3 == 0 and session.rank < 2:
                one.session.gather(b"more calls in some than in others")
            one.end()
            with pytest.raises(UsageError, match=r"<group of ranks 0-1> has ended: make another one"):
                one.session.check_usable()
        return len(session.family)

    assert group("ring", 3, body) == [1, 1, 1]


def test_a_group_whose_number_only_some_have_given_back_gets_a_new_one(group: Any) -> None:
    def body(session: Session) -> Any:
        first, second = new_group(session, [0, 1]), new_group(session, [0, 1])
        if (
            session.rank == 0
        ):  # who calls what has not been made for it gets what it asks for, and nobody else a wrong sum
            session.give_back_number((0, 1), 1)
        third = new_group(session, [0, 1])
        return [all_calls(one.session, session.rank) for one in (third, second, first)]

    assert group("ring", 2, body) == [[wanted((0, 1))] * 3] * 2


def test_a_group_that_was_made_within_another_gives_its_number_back_to_the_same_processes(group: Any) -> None:
    """Which the other one counts differently."""

    def body(session: Session) -> Any:
        outer = new_group(session, [1, 2, 3])
        if outer.rank < 0:
            return None
        inner = outer.session.split([1, 2])
        if inner is not None:
            inner.barrier()
            inner.give_back()
        return session.process.given_back

    assert [found and set(found) for found in group("ring", 4, body)] == [None, {}, {(2, 3)}, {(2, 3)}]


def test_a_process_is_in_so_many_groups_at_a_time(group: Any) -> None:
    def body(session: Session) -> None:
        made = [new_group(session, [0, 1]) for _ in range(SCOPES - 1)]
        assert all_calls(made[-1].session, session.rank) == wanted((0, 1))
        says = (
            rf"the group of ranks 0-1 would get number {SCOPES}, but {SCOPES - 1} is the last: .* Make groups once and"
        )
        with pytest.raises(UsageError, match=says):
            new_group(session, [0, 1])

    group("ring", 2, body)


def test_groups_that_share_workers_each_with_the_next_use_up_numbers_together(group: Any) -> None:
    """Whoever shares nobody with them has others."""

    def body(session: Session) -> Any:
        made = [new_group(session, sorted({i % 3, (i + 1) % 3})) for i in range(SCOPES - 1)]
        with pytest.raises(UsageError, match="above the numbers of all groups that its ranks have been in"):
            new_group(session, [0, 1])
        apart = new_group(session, [3, 4])
        return sum(one.rank >= 0 for one in made), apart.rank

    found = group("ring", 5, body)
    assert [rank for _, rank in found] == [-1, -1, -1, 0, 1]
    assert max(count for count, _ in found) < SCOPES - 30


def test_a_group_does_not_end_while_another_thread_is_in_it(group: Any) -> None:
    begun = threading.Barrier(2)

    def body(session: Session) -> Any:
        one = new_group(session, [0, 1])
        with ThreadPoolExecutor(1) as threads:
            if session.rank == 0:
                call = threads.submit(one.session.gather, b"0")
                while not one.session.callers.is_busy:
                    assert not wait([call], timeout=0.01).done
                with pytest.raises(UsageError, match="another thread of this process is in a call of the <group of"):
                    one.end()
                begun.wait(30)
                found = call.result()
            else:
                begun.wait(30)
                found = one.session.gather(b"1")
        one.session.barrier()  # which has not ended
        one.end()
        return found

    assert group("ring", 2, body) == [[b"0", b"1"]] * 2


def test_no_thread_begins_a_call_while_another_one_ends_the_group(group: Any) -> None:
    """Also one that has asked for the group before, and one that ends it too."""

    def body(session: Session) -> None:
        one = new_group(session, [0, 1])
        here = one.session
        heard: list[str] = []

        def late(call: Any) -> None:
            with pytest.raises(UsageError) as raised:
                call()
            heard.append(str(raised.value))

        calls = [lambda: here.gather(b""), lambda: here.tell_all(b""), lambda: here.allreduce(np.ones(3)), one.end]
        with ThreadPoolExecutor(1) as threads:
            barrier = here.barrier

            def meanwhile() -> None:
                for call in calls:
                    threads.submit(late, call).result(30)
                barrier()

            here.barrier = meanwhile  # type: ignore[method-assign]
            one.end()
            threads.submit(late, calls[0]).result(30)
        ends = [text for text in heard if "is ending this group, or has ended it: make a new one" in text]
        assert (len(heard), len(ends)) == (5, 4)
        assert "is in a call of the <group of ranks 0-1>" in heard[3]

    group("ring", 2, body)


def test_a_group_whose_end_fails_is_there_still(group: Any) -> None:
    def body(session: Session) -> list[bytes]:
        one = new_group(session, [0, 1])
        here, barrier = one.session, one.session.barrier

        def fails() -> None:
            raise KeyboardInterrupt

        here.barrier = fails  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            one.end()
        here.barrier = barrier  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as threads:
            found = threads.submit(one.session.gather, bytes([session.rank])).result(30)
        one.end()
        return found

    assert group("ring", 2, body) == [[b"\0", b"\1"]] * 2


def test_groups_end_with_their_run(group: Any) -> None:
    made: dict[int, WorkerGroup] = {}

    def body(session: Session) -> None:
        made[session.rank] = new_group(session, [0, 1])

    group("ring", 2, body)
    for one in made.values():
        with pytest.raises(ClosedError, match="this session has been shut down"):
            one.session.barrier()


def test_a_worker_outside_is_told_where_it_may_call(group: Any) -> None:
    def body(session: Session) -> None:
        one = new_group(session, [0, 2])
        assert (one.size, one.rank) == (2, {0: 0, 1: -1, 2: 1}[session.rank])
        if session.rank == 1:
            with pytest.raises(
                UsageError,
                match=r"rank 1 is not in the <group of ranks 0, 2>: call this on its ranks alone, as under"
                r" `if group.rank >= 0:`",
            ):
                one.session.barrier()
            one.end()
        else:
            one.session.barrier()

    group("ring", 3, body)


@pytest.mark.parametrize("ranks", [[], [0, 0], [0, 3], [-1]])
def test_ranks_that_cannot_be_a_group_are_refused_before_anybody_waits(group: Any, ranks: list[int]) -> None:
    def body(session: Session) -> None:
        with pytest.raises(UsageError, match="name ranks from 0 to 2, each once"):
            new_group(session, ranks)

    group("ring", 3, body)


def test_what_is_no_rank_is_refused(group: Any) -> None:
    def body(session: Session) -> None:
        with pytest.raises(TypeError, match="integer"):
            new_group(session, [0, 1.5])  # type: ignore[list-item]

    group("ring", 2, body)


@pytest.mark.parametrize("late", [0, 2])
def test_a_worker_that_makes_another_group_is_named_on_all(run_on: Any, late: int) -> None:
    """Two groups in two orders are that too."""
    found: dict[int, str] = {}
    sessions = in_process("ring", 3)

    def body(session: Session) -> None:
        orders = [[[0, 1], [1, 2]], [[1, 2], [0, 1]]]
        with pytest.raises(MismatchError) as caught:
            [new_group(session, ranks) for ranks in orders[session.rank == late]]
        found[session.rank] = str(caught.value)

    run_on(sessions, body)
    assert len(found) == 3
    for text in found.values():
        assert f"rank {late} is at making a group of ranks 1, 2 (call 1)" in text
        assert "is at making a group of ranks 0, 1 (call 1)" in text
        assert "let every rank make the same groups in the same order, including groups that it is not in" in text


def test_a_worker_that_does_something_else_is_named(run_on: Any) -> None:
    def body(session: Session) -> None:
        call = session.barrier if session.rank == 2 else lambda: new_group(session, [0, 1])
        with pytest.raises(MismatchError, match=r"rank 2 is at barrier .*making a group|making a group of ranks 0, 1"):
            call()

    run_on(in_process("ring", 3), body)


def test_a_worker_that_does_not_come_is_named_when_the_time_is_over(run_on: Any) -> None:
    begun, over = threading.Barrier(2), threading.Barrier(3)

    def body(session: Session) -> None:
        if session.rank != 2:
            begun.wait(30)
            with pytest.raises(PeerTimeout, match=r"making a group: not reached within 0\.3 s by (rank [01], )?rank 2"):
                new_group(session, [0, 1], timeout=0.3)
        over.wait(30)  # one that has left is gone for those that still wait

    run_on(in_process("ring", 3), body)


def test_a_mismatch_in_a_group_names_ranks_by_their_number_in_the_run(group: Any) -> None:
    def body(session: Session) -> None:
        one = new_group(session, [1, 3])
        if one.rank >= 0:
            one.session.allreduce(np.zeros(3 if session.rank == 3 else 4))

    sizes = r"group of ranks 1, 3: rank [13] is at allreduce \(call 1, [34] elements of float64\) while rank [13] is at"
    with pytest.raises(MismatchError, match=sizes):
        group("ring", 4, body)


def test_one_that_does_not_come_to_a_call_of_a_group_is_named_by_its_number_in_the_run(run_on: Any) -> None:
    waited = threading.Event()

    def body(session: Session) -> None:
        one = new_group(session, [1, 2])
        if session.rank == 1:
            says = r"^group of ranks 1-2: barrier: not reached within 0\.3 s by rank 2"
            with pytest.raises(PeerTimeout, match=says) as caught:
                one.session.barrier(timeout=0.3)
            assert caught.value.rank == 2
            waited.set()
        else:
            waited.wait(30)

    run_on(in_process("ring", 3), body)


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (
            "ps(servers=1)",
            r"its server processes serve all workers of the run, not a group of them; use ps\(servers=1,",
        ),
        (
            "ps(servers=3, on=workers)",
            r"in a group of 2: ps\(on=workers\) cannot place 3 servers on 2 workers: use",
        ),
    ],
)
def test_strategies_that_are_nothing_in_a_group_are_refused_for_models_and_not_for_collectives(
    group: Any, strategy: str, says: str
) -> None:
    def body(session: Session) -> None:
        if not session.is_worker:
            return
        one = new_group(session, [0, 2])
        if one.rank >= 0:
            assert all_calls(one.session, session.rank) == wanted((0, 2))
            with pytest.raises(UsageError, match=says):
                one.session.check_fit()

    group(strategy, 3, body)
