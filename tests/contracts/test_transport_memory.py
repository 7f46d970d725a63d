"""What transports keep: memory that is used again or stays known, and nothing at all after their end."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
from ends import LIMIT_S, network, numbers
from remote import RemoteEnd

from mpi_launch import LIBRARIES
from syncline.transports.tcp import Tcp

pytestmark = pytest.mark.usefixtures("no_old_garbage")


def settle(before: set[threading.Thread]) -> None:
    """Wait for threads that end with their peers, those of ``before`` aside, and drop what they held."""
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("syncline"):
            thread.join(LIMIT_S)
    gc.collect()


def shared_names() -> set[str]:
    """What is in /dev/shm but for files of Open MPI and MPICH, which come and go with the ranks of other tests."""
    of_libraries = ("sm_segment.", "mpich_shm_")
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(of_libraries)}


def test_nothing_is_left_behind(kind: str) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    if kind in LIBRARIES:
        pytest.skip("what is in the ranks' own processes is looked at in the next test")
    others = set(threading.enumerate())  # of other tests, and what they do is not this one's affair
    with network(kind, 2):
        pass
    settle(others)
    files, threads, shared = open_files(), threading.active_count(), shared_names()
    for _ in range(3):
        with network(kind, 3) as net:
            data = net.ends[0].allocate(200_000)
            net.wait(net.ends[1].recv(0, 0, np.zeros(200_000, np.uint8)), net.ends[0].send(1, 0, data))
            del data  # memory lives as long as somebody looks at it
    settle(others)
    assert open_files() <= files
    assert threading.active_count() <= threads
    assert shared_names() <= shared


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


def test_allocated_memory_stays_known_when_its_owner_drops_it() -> None:
    """The address of a dropped buffer must not be taken for shared memory once something else lies there."""
    with network("shm", 2) as net:
        for _ in range(5):
            net.ends[0].allocate(1 << 21)
            gc.collect()
            plain = numbers(1 << 21)
            into = np.zeros(plain.nbytes, np.uint8)
            net.wait(net.ends[1].recv(0, 0, into), net.ends[0].send(1, 0, plain))
            np.testing.assert_array_equal(into, plain)
