"""Groups of workers that cannot be, calls that are not for a group, and who is named where ranks disagree."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from group_calls import all_calls, wanted

from syncline.errors import MismatchError, PeerTimeout, UsageError
from syncline.launch.connecting import in_process
from syncline.session.groups import new_group
from syncline.session.session import Session


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
        with pytest.raises(UsageError, match="name some of 0 to 2, each once"):
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
        assert "let every rank make the same groups in the same order, also those that it is not in" in text


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
            r"its server processes serve all workers of the run, and no group of them; use ps\(servers=1,",
        ),
        (
            "ps(servers=3, on=workers)",
            r"in a group of 2: ps\(on=workers\) has 2 workers to place 3 servers on: ask for",
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
