"""Laws of the ends of transports: time limits, ends of peers, calls after the end, remains, and an allreduce."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ClosedError, PeerLost, UsageError
from ..nouns import numpy_dtype
from ..transports import Handle, HasAllreduce, HasCollectives, Transport
from . import network
from .laws import Laws, require, same
from .network import Case, Ends, Subject, between, in_time, numbers, raised, together

LAWS: Laws[Subject, Case] = Laws()


@LAWS.law(between(2))
def poll_returns_after_its_time_limit(case: Case) -> None:
    with case.open() as net:
        handle = net.ends[0].recv(1, 0, np.zeros(1, np.uint8))
        found = in_time(lambda: net.ends[0].poll(0.01), "poll(0.01)")
        require(found == [] and not handle.done, f"poll found {found or [handle]}, but nothing was sent")


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
def the_end_of_a_peer_fails_only_operations_that_wait_for_it(case: Case) -> None:
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
        same(into, numbers(3), "the data sent between the other ranks")


def lost(net: Ends, handle: Handle, rank: int) -> None:
    """Wait for a handle that must fail with the name of an ended rank."""
    error = raised(lambda: net.wait(handle), PeerLost)
    assert isinstance(error, PeerLost)
    require(error.rank == rank, f"the error of an operation that waits for rank {rank} names rank {error.rank}")
    require(f"rank {rank}" in str(error), f"the error does not name rank {rank}: {error}")


@LAWS.law(between(2))
def messages_for_an_ended_peer_delay_no_end(case: Case) -> None:
    """``idle`` becomes true, whatever was queued for the ended peer."""
    with case.open() as net:
        for tag in range(3):
            net.ends[0].send(1, tag, numbers(60_000))
            net.ends[0].send(1, tag, numbers(1_000_000))
        net.close(1)
        net.until(lambda: net.ends[0].idle, lambda: "messages to a peer that has ended are still unwritten")


@LAWS.law(between(2))
def messages_sent_before_the_end_still_arrive(case: Case) -> None:
    """Receives posted later still get it."""
    with case.open() as net:
        net.ends[1].send(0, 0, numbers(100))
        net.until(lambda: net.ends[1].idle, lambda: "a message is still unwritten")
        net.turn(2)
        net.close(1)
        into = np.zeros(100, np.uint8)
        net.wait(net.ends[0].recv(1, 0, into))
        same(into, numbers(100), "the data sent before the end")


@LAWS.law(between(2))
def the_last_acknowledgements_are_written_before_the_end(case: Case) -> None:
    """An idle rank may end, because the senders have their acknowledgements."""
    with case.open() as net:
        sent = net.ends[0].send(1, 0, net.ends[0].allocate(300_000))
        received = net.ends[1].recv(0, 0, np.zeros(300_000, np.uint8))
        net.wait(received)
        net.until(lambda: net.ends[1].idle, lambda: "an acknowledgement is still unwritten")
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
    require(open_files() <= files, f"{open_files() - files} descriptors stay open after three networks")
    left = [thread.name for thread in threading.enumerate() if thread not in others]
    require(threading.active_count() <= threads, f"threads remain: {', '.join(left)}")
    still = sorted(name for name in names if Path(name).exists())
    require(not still, f"shared memory remains: {', '.join(still)}")


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


def has_allreduce(case: Case) -> bool:
    """Whether these laws apply to a transport."""
    return case.subject.has_allreduce


def run(net: Ends, start: Callable[[Transport], list[Handle]]) -> None:
    """Run each end's operations in a thread of its own, as ranks do, which drives the end until all are done."""
    ended: set[int] = set()

    def drive(end: Transport) -> None:
        alone = Ends([end])
        try:
            alone.wait(*start(end))
        finally:
            ended.add(end.rank)
        alone.until(lambda: len(ended) == len(net.ends), lambda: f"only ranks {sorted(ended)} have ended")

    together(net.ends, drive)


def summed(end: Transport, key: int, array: NDArray[np.generic]) -> Handle:
    """Start the transport's own allreduce."""
    assert isinstance(end, HasAllreduce)
    return end.allreduce(key, array)


def each_type(subject: Subject, seed: int, count: int) -> Iterator[Case]:
    """One case per supported type."""
    for case in between(3)(subject, seed, count):
        yield from (replace(case, dtype=name) for name in subject.adds)


@LAWS.law(each_type, has_allreduce)
def its_allreduce_adds_every_type(case: Case) -> None:
    """In place, over all ranks."""
    dtype = numpy_dtype(case.dtype)
    arrays = [(np.arange(1003).astype(dtype) % 11 + rank).astype(dtype) for rank in range(3)]
    wanted = np.sum([array.astype(np.int64) for array in arrays], axis=0)
    with case.open() as net:
        run(net, lambda end: [summed(end, 4, arrays[end.rank])])
    for rank, array in enumerate(arrays):
        same(array.astype(np.int64), wanted, f"the sum of {case.dtype} at rank {rank}")


def has_halves(case: Case) -> bool:
    """Whether a transport also has the halves of an allreduce."""
    return case.subject.has_halves


@LAWS.law(between(3), has_halves)
def its_halves_add_and_gather_every_type(case: Case) -> None:
    """In place, with parts of any sizes that lie anywhere: each rank sums its part, and then all have all parts."""
    sizes = 5, 0, 70_001
    with case.open() as net:
        for key, name in enumerate(case.subject.adds):
            dtype = numpy_dtype(name)
            rows = [[(np.arange(size) % 11 + rank).astype(dtype) for size in sizes] for rank in range(3)]
            wanted = [np.sum([row[part].astype(np.int64) for row in rows], axis=0) for part in range(3)]
            run(net, lambda end, key=key, rows=rows: [halves(end).reduce_scatter(key, rows[end.rank])])  # type: ignore[misc]
            for rank, row in enumerate(rows):
                same(row[rank].astype(np.int64), wanted[rank], f"the sum of {name} at rank {rank}")
            run(net, lambda end, key=key, rows=rows: [halves(end).all_gather(key, rows[end.rank])])  # type: ignore[misc]
            for rank, row in enumerate(rows):
                for part, array in enumerate(row):
                    same(array.astype(np.int64), wanted[part], f"part {part} of {name} at rank {rank}")


@LAWS.law(between(3), has_halves)
def a_half_that_all_ranks_have_reached_waits_for_no_other(case: Case) -> None:
    """Two ranks start both halves, and the third starts one of them only after the end of the other."""
    with case.open() as net:
        for late, early in (HALVES, HALVES[::-1]):
            rows = [{goal: [np.full(70_001, part + 1.0) for part in range(3)] for goal in HALVES} for _ in range(3)]

            def start(end: Transport, late: str = late, early: str = early, rows: Rows = rows) -> list[Handle]:
                calls = {goal: getattr(halves(end), goal) for goal in HALVES}
                parts = rows[end.rank]
                if end.rank < 2:
                    return [calls[late](1, parts[late]), calls[early](2, parts[early])]
                Ends([end]).wait(calls[early](2, parts[early]))
                return [calls[late](1, parts[late])]

            run(net, start)
            for rank, parts in enumerate(rows):
                wanted = np.full(70_001, 3.0 * (rank + 1))
                same(parts["reduce_scatter"][rank], wanted, f"the sum at rank {rank} with the {late} last")


HALVES = "reduce_scatter", "all_gather"
Rows = Sequence[dict[str, list[NDArray[np.float64]]]]


def halves(end: Transport) -> HasCollectives:
    """The end as one with halves of an allreduce."""
    assert isinstance(end, HasCollectives)
    return end


@LAWS.law(between(3), has_allreduce)
def allreduces_match_by_key_whatever_the_order_of_ranks(case: Case) -> None:
    """Ranks that start the same allreduces in different orders get the same sums."""
    sizes = {1: 70_001, 2: 3, 3: 500}
    orders = (1, 2, 3), (3, 1, 2), (2, 3, 1)
    arrays = [{key: np.full(size, key + rank, np.float32) for key, size in sizes.items()} for rank in range(3)]
    with case.open() as net:
        run(net, lambda end: [summed(end, key, arrays[end.rank][key]) for key in orders[end.rank]])
    for rank, found in enumerate(arrays):
        for key, size in sizes.items():
            same(found[key], np.full(size, 3 * key + 3), f"the sum of key {key} at rank {rank}")


@LAWS.law(between(2), has_allreduce)
def messages_and_allreduces_share_the_transport(case: Case) -> None:
    """A key and a tag with the same number do not clash."""
    into, sums = [np.zeros(300_000, np.uint8) for _ in range(2)], [np.ones(5, np.float32) for _ in range(2)]

    def start(end: Transport) -> list[Handle]:
        other, rank = 1 - end.rank, end.rank
        received = end.recv(other, 7, into[rank])
        return [received, summed(end, 7, sums[rank]), end.send(other, 7, numbers(300_000, rank))]

    with case.open() as net:
        run(net, start)
    for rank in range(2):
        same(into[rank], numbers(300_000, 1 - rank), f"the data received by rank {rank}")
        same(sums[rank], np.full(5, 2.0), f"the sum at rank {rank}")


@LAWS.law(between(2), has_allreduce)
def unsupported_types_of_sums_are_refused(case: Case) -> None:
    with case.open() as net:
        raised(lambda: run(net, lambda end: [summed(end, 0, np.zeros(4, "V8"))]), UsageError)


@LAWS.law(between(3), has_allreduce)
def an_allreduce_that_a_peer_leaves_out_fails(case: Case) -> None:
    with case.open() as net:
        handle = summed(net.ends[0], 1, np.zeros(3, np.float32))
        net.turn(2)
        net.close(2)
        error = raised(lambda: Ends(net.ends[:1]).wait(handle), PeerLost)
        assert isinstance(error, PeerLost)
        require(error.rank == 2, f"the error names rank {error.rank} instead of 2")
