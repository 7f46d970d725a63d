"""Tickets of a meeting: read when all have come, once, and what each worker counts by them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from syncline.engine.order import Work
from syncline.errors import MismatchError
from syncline.session.tickets import (
    AVERAGE,
    BARRIER,
    JOINED,
    STEP,
    TICKET_BYTES,
    Meeting,
    Ticket,
    ticket_table,
)


def put(table: NDArray[np.uint8], rank: int, ticket: Ticket) -> None:
    """A worker's ticket comes."""
    table[rank, :TICKET_BYTES] = ticket_table(len(table), rank, ticket)[rank]


def meeting_of(tickets: list[Ticket], rank: int = 0, *, done: bool = True) -> tuple[Meeting, NDArray[np.uint8], Work]:
    """One to which all of these have come, as that rank sees it."""
    table = ticket_table(len(tickets), rank, tickets[rank])
    for number, ticket in enumerate(tickets):
        put(table, number, ticket)
    work = Work("tickets")
    work.done = done

    def mismatch(other: int, theirs: Ticket) -> Exception:
        return MismatchError(f"rank {other} is {theirs.text}")

    return Meeting(work, table, tickets[rank], mismatch), table, work


def ticket(weight: float = 1.0, kind: int = STEP) -> Ticket:
    return Ticket(kind, 1, 0, weight, 0)


def test_tickets_are_read_once() -> None:
    """However many buckets ask for a share, and whatever becomes of the memory in which they came."""
    meeting, table, _ = meeting_of([ticket(1.0), ticket(3.0)])
    assert [meeting.share() for _ in range(3)] == [0.5] * 3
    table[...] = 0
    assert meeting.tickets() == (ticket(1.0), ticket(3.0))
    assert meeting.tickets() is meeting.tickets()
    assert meeting.share() == 0.5


def test_nothing_is_kept_of_tickets_that_have_not_all_come() -> None:
    """Who asks too early hears of what is there, and later of all."""
    meeting, table, work = meeting_of([ticket(1.0), ticket(1.0)], done=False)
    assert meeting.share() == 1.0
    put(table, 1, ticket(3.0))
    work.done = True
    assert meeting.share() == 0.5
    assert meeting.tickets()[1].weight == 3.0


def test_who_came_for_something_else_is_named_whenever_it_is_asked() -> None:
    meeting, _, _ = meeting_of([ticket(), ticket(kind=BARRIER)])
    for ask in (meeting.tickets, meeting.share, meeting.tickets):
        with pytest.raises(MismatchError, match="rank 1 is at barrier"):
            ask()


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.0, 2.0, 5.0], [0.1, 0.2, 0.3]])
def test_shares_are_one_on_the_average(weights: list[float]) -> None:
    shares = [meeting_of([ticket(weight) for weight in weights], rank)[0].share() for rank in range(3)]
    assert sum(shares) / 3 == pytest.approx(1.0)
    for weight, share in zip(weights, shares, strict=True):
        assert share * sum(weights) == pytest.approx(weight * 3)


def test_where_all_count_nothing_all_count_alike() -> None:
    assert meeting_of([ticket(0.0), ticket(0.0)])[0].share() == 1.0


def test_who_has_no_batches_left_brings_zeros_to_steps_and_weights_to_averages() -> None:
    """Zeros need no share; weights that it has trained count as they are shown."""
    assert meeting_of([ticket(0.0, JOINED), ticket(2.0)])[0].share() == 1.0
    assert meeting_of([ticket(1.0, JOINED), ticket(3.0, AVERAGE)])[0].share() == 0.5
