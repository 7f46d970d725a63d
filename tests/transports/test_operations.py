"""What becomes of operations: told once, failed when their peer is gone, refused after the end; and turns of sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncline.errors import ClosedError, PeerLost, UsageError
from syncline.transports import Handle
from syncline.transports._envelope import _MOST_TURNS, Turns
from syncline.transports._operations import Operations, Receive


def receive(peer: int, nbytes: int = 8) -> Receive:
    return Receive(Handle("recv", peer, 5, nbytes, None), np.zeros(nbytes, np.uint8))


matched: list[tuple[Receive, str]] = []


@pytest.fixture
def operations() -> Operations[str]:
    matched.clear()
    return Operations(0, [1, 2], "rank {} has left", lambda *both: matched.append(both))


def test_an_operation_ends_once_and_is_taken_once(operations: Operations[str]) -> None:
    handle = receive(1).handle
    assert operations.admit(handle)
    operations.finish(handle)
    operations.finish(handle, UsageError("too late"))
    assert operations.take() == [handle]
    assert operations.take() == []
    assert handle.done
    assert handle.error is None


def test_what_waits_for_a_peer_that_goes_fails_and_what_begins_later_too(operations: Operations[str]) -> None:
    waits, other, late = receive(1), receive(2), receive(1)
    assert operations.post(waits)
    assert operations.post(other)
    operations.lose(1)
    assert not operations.post(late)
    assert operations.take() == [waits.handle, late.handle]
    for handle in (waits.handle, late.handle):
        with pytest.raises(PeerLost, match="rank 1 has left") as lost:
            raise handle.error or AssertionError
        assert lost.value.rank == 1
    assert not other.handle.done


def test_a_message_that_is_there_is_had_from_a_peer_that_is_gone(operations: Operations[str]) -> None:
    operations.arrive(1, 5, "hello")
    operations.lose(1)
    assert not operations.post(one := receive(1))
    assert matched == [(one, "hello")]
    assert operations.take() == []


def test_strangers_and_work_after_the_end_are_refused(operations: Operations[str]) -> None:
    with pytest.raises(UsageError, match="rank 0 cannot exchange messages with 3 in a world of 3"):
        operations.admit(receive(3).handle)
    assert not operations.fits(receive(2), 90)
    assert "a message of 90 bytes from rank 2 does not fit a receive of 8" in str(operations.take()[0].error)
    operations.closed = True
    with pytest.raises(ClosedError):
        operations.admit(receive(1).handle)


def come(turns: Turns, key: int) -> Any:
    handle = Handle("allreduce", -1, key, 4, None)
    turns.come(key, handle, np.zeros(1, np.float32))
    return handle


def test_collectives_run_in_the_order_of_rank_0() -> None:
    turns = Turns(1, 2)
    handles = {key: come(turns, key) for key in (7, 3)}
    with pytest.raises(UsageError, match="rank 1 has a collective with key 7 under way already"):
        turns.check_new(7)
    assert turns.take() is None  # rank 0 has said nothing
    for key in (3, 9, 7):
        turns.add(key)
    first = turns.take()
    assert first is not None
    assert first[0] is handles[3]
    assert turns.take() is None  # this rank has not come to 9
    late = come(turns, 9)
    assert [turn and turn[0] for turn in (turns.take(), turns.take())] == [late, handles[7]]
    assert turns.begun == 3
    turns.ended(handles[3])
    assert turns.left_out(1) == [late, handles[7]]
    assert turns.left_out(0) == [late, handles[7]]


def test_a_rank_is_at_most_so_many_collectives_ahead_of_the_first() -> None:
    """It may still reach those that another has reached, each once."""
    turns = Turns(0, 3)
    for key in range(_MOST_TURNS):
        assert turns.may_reach(key, 1)
        assert not turns.reached(key, 1)
    assert not turns.may_reach(_MOST_TURNS, 1)
    assert not turns.may_reach(7, 1)
    assert turns.may_reach(7, 2)
    assert not turns.reached(7, 2)
    assert turns.reached(7, 0)
    assert turns.may_reach(_MOST_TURNS, 1)


def test_what_will_never_begin_is_given_up() -> None:
    turns = Turns(0, 2)
    handle = come(turns, 4)
    assert turns.give_up() == [handle]
    turns.add(4)
    assert turns.take() is None
