"""What transports keep: scratch memory that is used again, and nothing in ranks under mpirun after their end."""

from __future__ import annotations

import numpy as np
import pytest
from ends import MPI_KINDS, ONESIDED, network
from mpi_rank import WINDOW_BYTES
from remote import RemoteEnd

from syncline.errors import UsageError
from syncline.testing.network import numbers
from syncline.transports.mpi import check_room
from syncline.transports.tcp import Tcp


@pytest.mark.parametrize("kind", MPI_KINDS)
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


@pytest.mark.parametrize("kind", [kind for kind in MPI_KINDS if kind.endswith(ONESIDED)])
def test_bodies_are_read_where_they_lie(kind: str) -> None:
    """Those in the transport's own memory, as ``mpi_rank`` sends all but every third; the others come as messages."""
    with network(kind, 2) as net:
        sender, receiver = net.ends
        assert isinstance(receiver, RemoteEnd)
        before = receiver.ask("read")
        for number in range(6):
            data = numbers(200_000, number)
            into = np.zeros(data.nbytes, np.uint8)
            net.wait(receiver.recv(0, 0, into), sender.send(1, 0, data))
            assert np.array_equal(into, data)
        assert receiver.ask("read") - before == 4 * 200_000


@pytest.mark.parametrize("kind", [kind for kind in MPI_KINDS if kind.endswith(ONESIDED)])
def test_more_memory_than_a_window_has_is_sent(kind: str) -> None:
    """Twice what ``mpi_rank`` reserves; memory that nobody has any more is taken again, zeroed."""
    with network(kind, 2) as net:
        sender, receiver = net.ends
        assert isinstance(sender, RemoteEnd)
        for keep in (True, False):
            held = [sender.ask("hold", 8 << 20, keep) for _ in range(2 * WINDOW_BYTES // (8 << 20))]
            assert all(zeroed for _, zeroed in held)
            inside = [one for one, _ in held]
            assert inside == ([True] * 8 + [False] * 8 if keep else [True] * 16)
            data = numbers(200_000)
            into = np.zeros(data.nbytes, np.uint8)
            net.wait(receiver.recv(0, 0, into), sender.send(1, 0, data))
            assert np.array_equal(into, data)
            sender.ask("let_go")


def test_a_window_larger_than_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is made: pages without room would end the process when they are written."""

    class Room:
        f_bavail, f_frsize = 16, 1 << 20

    monkeypatch.setattr("os.statvfs", lambda path: Room)  # noqa: ARG005
    check_room(16 << 20)
    with pytest.raises(UsageError, match=r"window=17MiB\): /dev/shm has room for 16 MiB: use a smaller window="):
        check_room(17 << 20)
