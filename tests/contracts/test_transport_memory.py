"""What transports keep: scratch memory that is used again, and nothing in ranks under mpirun after their end."""

from __future__ import annotations

import numpy as np
import pytest
from ends import network
from remote import RemoteEnd

from mpi_launch import LIBRARIES
from syncline.testing.network import numbers
from syncline.transports.tcp import Tcp


@pytest.mark.parametrize("kind", LIBRARIES)
def test_ranks_under_mpirun_keep_nothing(kind: str) -> None:
    held = []
    for _ in range(4):
        with network(kind, 2) as net:
            net.wait(net.ends[1].recv(0, 0, np.zeros(200_000, np.uint8)), net.ends[0].send(1, 0, numbers(200_000)))
            ends = net.ends[:]
        held.append([end.ask("holds") for end in ends if isinstance(end, RemoteEnd)])
    assert held[1:] == held[:1] * 3


def test_scratch_memory_is_used_again_once_warm() -> None:
    with network("tcp", 2) as net:
        receiver = net.ends[1]
        assert isinstance(receiver, Tcp)
        held = []
        for _ in range(20):
            handle = receiver.borrow(0, 0, 500_000)
            net.wait(handle, net.ends[0].send(1, 0, numbers(500_000)))
            receiver.release(handle)
            held.append(receiver.scratch.allocated_bytes)
        assert held[-1] == held[0]
