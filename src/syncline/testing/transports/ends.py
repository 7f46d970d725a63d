"""Laws about time limits and ends: polls return, peers end, calls after the end fail, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import numpy as np

from ...errors import ClosedError, PeerLost
from ...transports import Handle
from .. import network
from ..laws import Laws, require, same
from ..network import Ends, in_time, numbers, raised
from .cases import Case, Subject, between

LAWS: Laws[Subject, Case] = Laws()


@LAWS.law(between(2))
def poll_returns_after_its_time_limit(case: Case) -> None:
    with case.open() as net:
        handle = net.ends[0].recv(1, 0, np.zeros(1, np.uint8))
        found = in_time(lambda: net.ends[0].poll(0.01), "poll(0.01)")
        require(found == [] and not handle.done, f"poll found {found or [handle]}, and nothing was sent")


@LAWS.law(between(2))
def wake_ends_a_poll_from_another_thread(case: Case) -> None:
    """The current poll, or else the next one."""
    begun = threading.Event()
    with case.open() as net:
        end = net.ends[0]

        def poll() -> None:
            begun.set()
            end.poll(2 * network.LIMIT_S)

        def wake() -> None:
            begun.wait(network.LIMIT_S)
            end.wake()

        end.wake()
        in_time(lambda: end.poll(2 * network.LIMIT_S), "a poll after a wake")
        thread = threading.Thread(target=wake)
        thread.start()
        in_time(poll, "a poll that was woken")
        thread.join()


@LAWS.law(between(3))
def a_peer_that_ends_fails_what_waits_for_it_only(case: Case) -> None:
    """Operations with it fail with PeerLost and its rank, also later ones; operations with others continue."""
    with case.open() as net:
        waits = net.ends[0].recv(2, 0, np.zeros(8, np.uint8))
        large = net.ends[0].send(2, 1, numbers(1_000_000))
        net.turn(2)
        net.close(2)
        lost(net, waits, 2)
        lost(net, large, 2)
        lost(net, net.ends[0].recv(2, 5, np.zeros(1, np.uint8)), 2)
        into = np.zeros(3, np.uint8)
        net.wait(net.ends[1].recv(0, 0, into), net.ends[0].send(1, 0, numbers(3)))
        same(into, numbers(3), "what was sent between the others")


def lost(net: Ends, handle: Handle, rank: int) -> None:
    """Wait for a handle that must fail with the name of an ended rank."""
    error = raised(lambda: net.wait(handle), PeerLost)
    assert isinstance(error, PeerLost)
    require(error.rank == rank, f"the error of what waits for rank {rank} names {error.rank}")
    require(f"rank {rank}" in str(error), f"the error does not say 'rank {rank}': {error}")


@LAWS.law(between(2))
def what_waits_for_a_peer_that_has_ended_keeps_nobody_from_ending(case: Case) -> None:
    """``idle`` becomes true, whatever was queued for the ended peer."""
    with case.open() as net:
        for tag in range(3):
            net.ends[0].send(1, tag, numbers(60_000))
            net.ends[0].send(1, tag, numbers(1_000_000))
        net.close(1)
        net.until(lambda: net.ends[0].idle, lambda: "messages to a peer that has ended are still to be written")


@LAWS.law(between(2))
def what_a_peer_sent_before_it_ended_still_arrives(case: Case) -> None:
    """Receives posted later still get it."""
    with case.open() as net:
        net.ends[1].send(0, 0, numbers(100))
        net.until(lambda: net.ends[1].idle, lambda: "a message is still to be written")
        net.turn(2)
        net.close(1)
        into = np.zeros(100, np.uint8)
        net.wait(net.ends[0].recv(1, 0, into))
        same(into, numbers(100), "what was sent before the end")


@LAWS.law(between(2))
def what_was_acknowledged_last_is_written_before_the_end(case: Case) -> None:
    """An idle rank may end, because the senders have their acknowledgements."""
    with case.open() as net:
        sent = net.ends[0].send(1, 0, net.ends[0].allocate(300_000))
        received = net.ends[1].recv(0, 0, np.zeros(300_000, np.uint8))
        net.wait(received)
        net.until(lambda: net.ends[1].idle, lambda: "an acknowledgement is still to be written")
        net.close(1)
        net.wait(sent)


@LAWS.law(between(2))
def a_closed_transport_refuses_work(case: Case) -> None:
    """With ClosedError. Closing it again does nothing."""
    with case.open() as net:
        end, memory = net.ends[1], np.zeros(1, np.uint8)
        net.close(1)
        end.close()
        raised(lambda: end.poll(0), ClosedError)
        raised(lambda: end.send(0, 0, memory), ClosedError)
        raised(lambda: end.recv(0, 0, memory), ClosedError)
        raised(lambda: end.borrow(0, 0, 1), ClosedError)


@LAWS.law(between(2))
def a_wake_after_the_end_touches_no_file(case: Case) -> None:
    """Its descriptors' numbers may belong to other files by then."""
    with case.open() as net:
        end = net.ends[1]
        net.close(1)
        pipes = [os.pipe() for _ in range(4)]
        try:
            end.wake()
            for reading, _ in pipes:
                os.set_blocking(reading, False)
                raised(lambda reading=reading: os.read(reading, 8), BlockingIOError)  # type: ignore[misc]
        finally:
            for reading, writing in pipes:
                os.close(reading)
                os.close(writing)


@LAWS.law(between(3))
def nothing_is_left_behind(case: Case) -> None:
    """After any traffic, no descriptors, threads or names of shared memory are left in this process."""
    others = set(threading.enumerate())  # of something else, which the transport does not own
    with case.open():
        pass
    settle(others)
    files, threads = open_files(), threading.active_count()
    names, earlier = set(), shared_names()  # a library that something else has loaded may own some
    for _ in range(3):
        with case.open() as net:
            data = net.ends[0].allocate(200_000)
            net.wait(net.ends[1].recv(0, 0, np.zeros(200_000, np.uint8)), net.ends[0].send(1, 0, data))
            names |= shared_names() - earlier
            del data  # memory lives as long as arrays that use it
        del net
    settle(others)
    deadline = time.monotonic() + network.LIMIT_S  # a library's own threads close files with a delay
    while open_files() > files and time.monotonic() < deadline:
        time.sleep(0.01)
    require(open_files() <= files, f"{open_files() - files} descriptors are left open after three networks")
    left = [thread.name for thread in threading.enumerate() if thread not in others]
    require(threading.active_count() <= threads, f"threads are left: {', '.join(left)}")
    still = sorted(name for name in names if Path(name).exists())
    require(not still, f"shared memory is left: {', '.join(still)}")


def settle(before: set[threading.Thread]) -> None:
    """Wait for threads to end, except those of ``before``, and collect garbage."""
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(network.LIMIT_S)
    gc.collect()


def open_files() -> int:
    """The number of descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def shared_names() -> set[str]:
    """The files of shared memory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {name for line in lines if (name := line.partition("/")[1] + line.partition("/")[2]).startswith("/dev/shm/")}
