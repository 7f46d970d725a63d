"""Laws of a library's own allreduce: types, matching by key, concurrent messages, faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...errors import PeerLost, UsageError
from ...nouns import numpy_dtype
from ...transports import Handle, HasAllreduce, Transport
from ..laws import Laws, require, same
from ..network import Ends, numbers, raised, together
from .cases import Case, Subject, between


def has_allreduce(case: Case) -> bool:
    """Whether these laws apply to a transport."""
    return case.subject.has_allreduce


def run(net: Ends, start: Callable[[Transport], list[Handle]]) -> None:
    """Run each end's operations in a thread of its own, as ranks do."""
    together(net.ends, lambda end: Ends([end]).wait(*start(end)))


def summed(end: Transport, key: int, array: NDArray[np.generic]) -> Handle:
    """Start the transport's own allreduce."""
    assert isinstance(end, HasAllreduce)
    return end.allreduce(key, array)


def each_type(subject: Subject, seed: int, count: int) -> Iterator[Case]:
    """One case per supported type."""
    for case in between(3)(subject, seed, count):
        yield from (replace(case, dtype=name) for name in subject.adds)


LAWS: Laws[Subject, Case] = Laws()


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
def messages_and_allreduces_share_the_way(case: Case) -> None:
    """A key and a tag with the same number do not clash."""
    into, sums = [np.zeros(300_000, np.uint8) for _ in range(2)], [np.ones(5, np.float32) for _ in range(2)]

    def start(end: Transport) -> list[Handle]:
        other, rank = 1 - end.rank, end.rank
        received = end.recv(other, 7, into[rank])
        return [received, summed(end, 7, sums[rank]), end.send(other, 7, numbers(300_000, rank))]

    with case.open() as net:
        run(net, start)
    for rank in range(2):
        same(into[rank], numbers(300_000, 1 - rank), f"what came to rank {rank}")
        same(sums[rank], np.full(5, 2.0), f"the sum at rank {rank}")


@LAWS.law(between(2), has_allreduce)
def what_it_cannot_add_is_refused(case: Case) -> None:
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
        require(error.rank == 2, f"the error names rank {error.rank} in place of 2")
