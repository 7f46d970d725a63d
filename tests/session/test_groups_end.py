"""Groups of workers end: their numbers are given back, and nobody is in one that ends."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
from group_calls import all_calls, wanted

from syncline.engine.scope import SCOPES
from syncline.errors import ClosedError, UsageError
from syncline.session.groups import WorkerGroup, new_group
from syncline.session.session import Session


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
            session.numbers.give_back((0, 1), 1)
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
        return session.member.process.given_back

    assert [found and set(found) for found in group("ring", 4, body)] == [None, {}, {(2, 3)}, {(2, 3)}]


def test_a_process_is_in_so_many_groups_at_a_time(group: Any) -> None:
    def body(session: Session) -> None:
        made = [new_group(session, [0, 1]) for _ in range(SCOPES - 1)]
        assert all_calls(made[-1].session, session.rank) == wanted((0, 1))
        says = (
            rf"the group of ranks 0-1 would be number {SCOPES}, and {SCOPES - 1} is the last: .* make groups once and"
        )
        with pytest.raises(UsageError, match=says):
            new_group(session, [0, 1])

    group("ring", 2, body)


def test_groups_that_share_workers_each_with_the_next_use_up_numbers_together(group: Any) -> None:
    """Whoever shares nobody with them has others."""

    def body(session: Session) -> Any:
        made = [new_group(session, sorted({i % 3, (i + 1) % 3})) for i in range(SCOPES - 1)]
        with pytest.raises(UsageError, match="those which share workers, each with the next, use up numbers together"):
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
        ends = [text for text in heard if "ends this group, or has: make another one" in text]
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
