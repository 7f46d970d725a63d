"""Transports over MPI one after the other in the same processes, whatever the one before has left behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from remote import RemoteEnd, World

from mpi_launch import LIBRARIES
from syncline.errors import GroupError
from syncline.testing.network import together

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
        for late in (1, 2, 0):  # who leaves it out
            ends = world.ends("off")
            for number in range(2 if late == 1 else 1):
                assert together(ends, partial(total, number)) == [[6.0] * 4] * RANKS
            for end in ends:
                if end.rank != late:
                    end.allreduce(9, np.ones(4))
                    end.poll(0.0)
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
        with pytest.raises(GroupError, match=r"have not met in this process.*start the processes anew"):
            world.alone(0, timeout_s=1.0).answer()
    finally:
        world.close()
