"""Communicators in one process: several at a time, keys of calls, and threads in calls when one ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import registry
from syncline.engine.order import Order, Work
from syncline.errors import MismatchError, PlanError, UsageError
from syncline.nouns import Group
from syncline.plans.check import check
from syncline.plans.plan import Plan
from syncline.session import tickets
from syncline.session.communicator import Communicator
from syncline.session.session import Session
from syncline.session.tickets import BARRIER, CALL_KEYS, COMMUNICATORS, Callers, CallKeys

GRID = ((0, 1), (2, 3))
ROWS, COLUMNS = GRID, tuple(zip(*GRID, strict=True))
ROUNDS = 20
STRATEGIES = ["ring", "direct", "tree", "hierarchical", "ps(servers=1)"]


def row_and_column(session: Session) -> tuple[Communicator, Communicator]:
    """Those of this rank; all ranks make all groups, in the same order."""
    mine = [made for ranks in (*ROWS, *COLUMNS) if (made := session.split(ranks)) is not None]
    assert len(mine) == 2
    return mine[0], mine[1]


def collectives(communicator: Communicator, worker: int) -> list[Any]:
    """Some of everything, of values that say which worker and round they are of."""
    found: list[Any] = []
    for number in range(ROUNDS):
        array = np.full(5000 + number, 10.0**worker + number)
        communicator.allreduce(array, average=False)
        found.append(float(array[0]) if (array == array[0]).all() else array)
        told = np.array([worker + number])
        communicator.broadcast(told, root=1)
        found += [int(told[0]), communicator.gather(b"%d" % worker)]
        communicator.barrier()
    return found


def wanted(ranks: tuple[int, ...]) -> list[Any]:
    found: list[Any] = []
    for number in range(ROUNDS):
        total = sum(10.0**rank + number for rank in ranks)
        found += [total, ranks[1] + number, [b"%d" % rank for rank in ranks]]
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_and_columns_of_a_grid_communicate_at_the_same_time(group: Any, strategy: str) -> None:
    """Every worker is in a row and in a column, and runs the collectives of both in threads of their own."""

    def body(session: Session) -> Any:
        if not session.is_worker:
            return None
        both = row_and_column(session)
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda communicator: collectives(communicator, session.rank), both))
        return [communicator.ranks for communicator in both], found

    for index, (groups, found) in enumerate(group(strategy, 4, body)[:4]):
        assert groups == [ROWS[index // 2], COLUMNS[index % 2]]
        assert found == [wanted(groups[0]), wanted(groups[1])]


def test_exchanges_of_two_groups_and_of_all_are_under_way_together(group: Any) -> None:
    def body(session: Session) -> Any:
        row, column = row_and_column(session)
        arrays = [np.full(70_000, 1.0 + session.rank) for _ in range(3)]
        works = [
            communicator.engine.start(Order(communicator.allreduce_program(array.nbytes), array, key, "all"))
            for key, (communicator, array) in enumerate(zip((column, session, row), arrays, strict=True))
        ]
        session.engine.wait(*works)
        return [float(array[0]) for array in arrays]

    found = group("ring", 4, body)
    assert found == [[4.0, 10.0, 3.0], [6.0, 10.0, 3.0], [4.0, 10.0, 7.0], [6.0, 10.0, 7.0]]


def test_groups_that_only_some_have_made_do_not_get_into_the_way_of_later_ones(group: Any) -> None:
    """Some ranks have made more groups than others when all make the next ones, and use them at the same time."""

    def body(session: Session) -> list[float]:
        half = session.split([0, 1])
        inner = None if half is None else half.split([1, 0])
        both = [session.split(np.arange(4)), session.split([0, 1, 2, 3])]

        def work(number: int) -> float:
            made = both[number]
            assert made is not None
            array = np.full(3000, 100.0**number)
            for _ in range(ROUNDS):
                made.allreduce(array)
            return float(array.mean())

        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(work, range(2)))
        return [*found, 0.0 if inner is None else float(len(inner.gather(b"")))]

    assert group("ring", 4, body) == [[1.0, 100.0, 2.0]] * 2 + [[1.0, 100.0, 0.0]] * 2


def test_two_groups_are_made_one_after_the_other(group: Any) -> None:
    """A thread waits for the one that makes a group, whichever way it makes its own."""

    def body(session: Session) -> Any:
        with ThreadPoolExecutor(1) as threads:
            with session.process.splitting:
                made = threads.submit(session.split, [0, 1])
                assert not wait([made], timeout=0.05).done
            first = made.result()
            with session.process.splitting:
                made = threads.submit(session.found, [0, 1], "another")
                assert not wait([made], timeout=0.05).done
            return [one.gather(b"") for one in (first, made.result()) if one is not None]

    assert group("ring", 2, body) == [[[b"", b""]] * 2] * 2


def test_sizes_that_differ_are_named(group: Any) -> None:
    def body(session: Session) -> None:
        session.allreduce(np.zeros(3 + session.rank, np.float32 if session.rank else np.float64))

    with pytest.raises(MismatchError, match=r"rank 1 is at allreduce \(call 1, 4 elements of float32\) while rank 0"):
        group("tree transport=inproc", 2, body)


def test_a_group_has_ranks_and_an_order_of_its_own(group: Any) -> None:
    def body(session: Session) -> Any:
        turned = session.split([3, 1])
        if turned is None:
            return None
        smaller = turned.split([1])
        return turned.rank, turned.gather(b"%d" % session.rank), turned.name(0), smaller and smaller.gather(b"alone")

    found = group("ring", 4, body)
    assert found == [None, (1, [b"3", b"1"], "rank 3", [b"alone"]), None, (0, [b"3", b"1"], "rank 3", None)]


def test_workers_that_make_different_groups_are_named(group: Any) -> None:
    def body(session: Session) -> None:
        session.split([0, 1] if session.rank != 2 else [0, 2])

    # Any of them may find out first, and names another one.
    with pytest.raises(MismatchError, match=r"^(?=.*rank 2 is at making a group of ranks 0, 2).* while rank [012] is"):
        group("ring", 3, body)


def test_a_fault_in_a_group_names_the_rank_by_its_number_in_the_run(group: Any) -> None:
    def body(session: Session) -> None:
        smaller = session.split([1, 2])
        if smaller is not None:
            smaller.allreduce(np.zeros(3 if session.rank == 2 else 4))

    with pytest.raises(MismatchError, match=r"rank [12] is at allreduce .* while rank [12] is at allreduce"):
        group("ring", 3, body)


@pytest.mark.parametrize("ranks", [[], [0, 0], [0, 4], [-1]])
def test_a_group_that_cannot_be_is_refused_before_anybody_waits(group: Any, ranks: list[int]) -> None:
    def body(session: Session) -> None:
        with pytest.raises(UsageError, match="name ranks from 0 to 3, each once"):
            session.split(ranks)

    group("ring", 4, body)


def test_there_are_as_many_groups_as_have_keys(group: Any) -> None:
    def body(session: Session) -> int:
        for _ in range(COMMUNICATORS - 1):
            last = session.split([0, 1])
        assert last is not None
        array = np.ones(3)
        last.allreduce(array, average=False)
        with pytest.raises(UsageError, match=f"in up to {COMMUNICATORS} communicators"):
            session.split([0, 1])
        return int(array.sum())

    assert group("ring", 2, body) == [6, 6]


def test_numbers_that_all_ranks_have_given_back_are_used_again(group: Any) -> None:
    """More often than there are numbers; messages of one life of a number are not taken for those of the next."""

    def body(session: Session) -> set[int]:
        numbers = set()
        for turn in range(COMMUNICATORS + 50):
            made = session.found([0, 2], f"turn {turn}") if session.rank != 1 else None
            if made is not None:
                numbers.add(made.number)
                if turn % 50 == 0:
                    array = np.full(5, float(turn + session.rank))
                    made.allreduce(array, average=False)
                    assert array.tolist() == [2.0 * turn + 2] * 5
                    assert made.gather(bytes([session.rank])) == [bytes([0]), bytes([2])]
                made.give_back()
        return numbers

    assert group("ring", 3, body) == [{1}, set(), {1}]


@pytest.mark.parametrize("why", ["calls", "work", "other ranks"])
def test_a_number_of_which_something_may_be_left_is_not_used_again(group: Any, why: str) -> None:
    def body(session: Session) -> tuple[int, int]:
        first = session.found([0, 1], "first")
        if why == "calls" and session.rank == 0:
            first.come(BARRIER)  # which the other does not
        if why == "work":
            first.keys.hold(first.keys.take(), Work("that goes on"))
        first.give_back()
        second = session.found([0, 1, 2] if why == "other ranks" else [0, 1], "second")
        return first.number, second.number

    if why == "other ranks":

        def all_three(session: Session) -> Any:
            return body(session) if session.rank < 2 else (1, session.found([0, 1, 2], "second").number)

        assert group("ring", 3, all_three) == [(1, 2)] * 3
    else:
        assert group("ring", 2, body) == [(1, 2)] * 2


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_plan_among_other_numbers_is_as_right(data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True))
    for entry in registry.entries("algorithms"):
        if entry.capabilities.get("goal") != "allreduce" or entry.name == "ps":
            continue
        plan: Plan = entry.target(Group(len(numbers)))
        there = plan.among(numbers)
        check(there)
        assert there.members == tuple(numbers[rank] for rank in plan.members)
        assert [(numbers[t.src], numbers[t.dst]) for t in plan] == [(t.src, t.dst) for t in there]


def test_numbers_that_are_no_ranks_are_refused() -> None:
    plan: Plan = registry.get("algorithms", "ring").target(Group(3))
    for numbers in ([0, 1], [0, 1, 1], [0, 1, 2, 3]):
        with pytest.raises(PlanError, match="3 ranks need 3 different numbers"):
            plan.among(numbers)


@pytest.fixture
def callers() -> Callers:
    return Callers(lambda text: f"<group>: {text}")


def elsewhere(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as other:
        return other.submit(call).result(30)


def call(callers: Callers) -> bool:
    with callers.inside():
        return callers.is_busy


def closed_within(callers: Callers) -> bool:
    with callers.inside():
        return callers.close()


def test_a_group_is_busy_for_the_threads_that_are_not_in_the_call(callers: Callers) -> None:
    with callers.inside(), callers.inside():
        assert not callers.is_busy
        assert elsewhere(lambda: callers.is_busy)
    assert not elsewhere(lambda: callers.is_busy)


def test_a_group_in_which_another_thread_is_in_a_call_is_not_closed(callers: Callers) -> None:
    with callers.inside():
        assert not elsewhere(callers.close)
        assert not elsewhere(lambda: closed_within(callers))
    assert elsewhere(callers.close)


def test_only_the_thread_that_has_closed_a_group_calls_in_it(callers: Callers) -> None:
    assert callers.close()
    assert not callers.close()
    assert not call(callers)
    with pytest.raises(
        UsageError, match="<group>: another thread is ending this group, or has ended it: make a new one"
    ):
        elsewhere(lambda: call(callers))
    assert not callers.is_busy
    callers.reopen()
    assert elsewhere(lambda: call(callers)) is False


def test_a_call_that_fails_is_over(callers: Callers) -> None:
    def fail() -> None:
        with callers.inside():
            raise ValueError(threading.get_ident())

    with pytest.raises(ValueError, match=r"\d+"):
        elsewhere(fail)
    assert callers.close()


def done(label: str) -> Work:
    work = Work(label)
    work.done = True
    return work


def test_keys_of_two_communicators_are_never_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "CALLS_IN_FLIGHT", 4)
    awaited: list[Work] = []
    both = CallKeys(0, awaited.append), CallKeys(1, awaited.append)
    first, second = ({one.take() for _ in range(9)} for one in both)
    assert not awaited
    assert first == set(range(CALL_KEYS, CALL_KEYS + 4))
    assert second == set(range(CALL_KEYS + 4, CALL_KEYS + 8))


def test_who_takes_a_key_again_waits_for_what_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "CALLS_IN_FLIGHT", 2)
    awaited: list[Work] = []
    mine, goes_on = CallKeys(0, awaited.append), Work("goes on")
    key = mine.take()
    mine.hold(key, goes_on)
    mine.hold(mine.take(), done("over"))
    assert not awaited
    assert mine.take() == key
    assert awaited == [goes_on]
    mine.take()
    assert mine.take() == key
    assert awaited == [goes_on]  # what is over is not waited for, nor anything twice


def test_keys_are_held_until_every_work_is_done() -> None:
    mine, goes_on = CallKeys(0, lambda _: None), Work("goes on")
    assert not mine.held
    mine.hold(mine.take(), done("over"))
    assert not mine.held
    mine.hold(mine.take(), goes_on)
    assert mine.held
    goes_on.done = True
    assert not mine.held
