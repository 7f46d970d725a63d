"""Transports over MPI one after the other in the same processes, whatever the one before has left behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from remote import RemoteEnd, World

from mpi_launch import LIBRARIES
from syncline.errors import GroupError, UsageError
from syncline.testing.network import together
from syncline.transports import Place, mpi

RANKS = 3


def total(key: int, end: RemoteEnd) -> list[Any]:
    """What an allreduce gives one rank, which waits inside of MPI for the others once all have come."""
    array = np.full(4, end.rank + 1.0)
    handle = end.allreduce(key, array)
    while not handle.done:
        end.poll(0.01)
    assert handle.error is None
    return array.tolist()


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_allreduce_that_a_rank_has_left_out_shifts_none_of_the_next_transport(library: str) -> None:
    world = World(library, RANKS)
    try:
        for late, near in ((1, False), (2, True), (0, True), (0, False)):  # who leaves it out
            ends = world.ends("off", near)
            for number in range(2 if late == 1 else 1):
                assert together(ends, partial(total, number)) == [[6.0] * 4] * RANKS
            for end in ends:
                if end.rank != late:
                    end.allreduce(9, np.ones(4))
                    end.poll(0.0)
            assert ends[0].ask("hosts") == (late != 1)
            for end in ends:
                end.close()
    finally:
        status = world.close()
    assert status == 0  # MPI has ended, too: nothing was under way any more


@pytest.mark.parametrize("library", LIBRARIES)
def test_processes_whose_ranks_have_not_met_say_so(library: str) -> None:
    """One begins a transport alone; the next one that it begins cannot know what the others have heard."""
    world = World(library, 2)
    try:
        together(world.ends("off"), RemoteEnd.close)  # MPI itself begins where all ranks are
        first = world.alone(0, timeout_s=1.0)
        with pytest.raises(GroupError, match=r"the first exchange over MPI did not end within 1 s"):
            first.answer()
        with pytest.raises(
            GroupError, match=r"have not met in this process \(the first exchange over MPI did .*start the proc"
        ):
            world.alone(0, timeout_s=1.0).answer()
    finally:
        world.close()


@pytest.mark.parametrize("library", LIBRARIES)
def test_ranks_that_have_met_and_disagree_begin_anew(library: str) -> None:
    """What all have heard of each other leaves nothing behind: the next transport works."""
    world = World(library, 2)
    try:
        for end in [world.alone(rank, timeout_s=20.0, says=0) for rank in (0, 1)]:
            with pytest.raises(UsageError, match=r"say they are \[0, 0\]: they belong to different runs"):
                end.answer()
        for end in [world.alone(rank, 20.0, onesided) for rank, onesided in enumerate(("off", "on"))]:
            with pytest.raises(
                GroupError, match=r"only ranks \[1\] ask for mpi\(onesided=on\): give all ranks the same"
            ):
                end.answer()
        ends = world.ends("on")
        assert together(ends, partial(total, 1)) == [[3.0] * 4] * 2
        together(ends, RemoteEnd.close)
        ends[1].ask("hide_window")
        for end in [world.alone(rank, 20.0, "on") for rank in (0, 1)]:
            with pytest.raises(GroupError, match=r"only ranks \[0\] have made MPI's window.*restart the processes"):
                end.answer()
        ends = world.ends("off")
        assert together(ends, partial(total, 2)) == [[3.0] * 4] * 2
        together(ends, RemoteEnd.close)
        ends[1].ask("hide_window")
    finally:
        status = world.close()
    assert status == 0


def test_a_wait_that_ends_early_keeps_what_mpi_may_still_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI's end has to know of the requests, too."""

    class Endless:
        def Test(self) -> bool:
            return False

    def interrupt() -> None:
        raise KeyboardInterrupt

    left: list[tuple[list[Any], list[Any]]] = []
    monkeypatch.setattr(mpi, "_left_behind", left)
    request, memory = Endless(), np.zeros(4)
    with pytest.raises(KeyboardInterrupt):
        mpi._wait([request], Place(0, 2, check=interrupt), "a wait", [memory])
    assert left == [([request], [memory])]
