"""The allreduce that message libraries have of their own: types, matching by key, messages beside it, faults."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from ends import Net, network, numbers

from mpi_launch import LIBRARIES
from syncline.errors import PeerLost, UsageError
from syncline.nouns import numpy_dtype
from syncline.transports import Handle, Transport

LIBRARY_KINDS = ["torch", *LIBRARIES]
ADDED = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64", "uint64"]


def together(net: Net, *calls: Callable[[Transport], list[Handle]]) -> list[list[Handle]]:
    """Each end starts its operations and waits for them in a thread of its own, as ranks do."""

    def run(end: Transport, start: Callable[[Transport], list[Handle]]) -> list[Handle]:
        handles = start(end)
        Net([end]).wait(*handles)
        return handles

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, net.ends, calls))


@pytest.mark.parametrize("kind", LIBRARY_KINDS)
@pytest.mark.parametrize("dtype", ADDED)
def test_a_librarys_allreduce_adds_every_type(kind: str, dtype: str) -> None:
    inputs = [np.arange(1003).astype(numpy_dtype(dtype)) % 11 + rank for rank in range(3)]
    expected = sum(item.astype(np.int64) for item in inputs)
    with network(kind, 3) as net:
        arrays = [item.astype(numpy_dtype(dtype)) for item in inputs]
        together(net, *(lambda end, a=array: [end.allreduce(4, a)] for array in arrays))
    for array in arrays:
        np.testing.assert_array_equal(array.astype(np.int64), expected)


@pytest.mark.parametrize("kind", LIBRARY_KINDS)
def test_allreduces_match_by_key_whatever_the_order_of_ranks(kind: str) -> None:
    sizes = {1: 70_001, 2: 3, 3: 500}
    orders = [(1, 2, 3), (3, 1, 2), (2, 3, 1)]
    with network(kind, 3) as net:
        arrays = [{key: np.full(size, key + rank, np.float32) for key, size in sizes.items()} for rank in range(3)]
        together(
            net,
            *(
                lambda end, rank=rank, order=order: [end.allreduce(key, arrays[rank][key]) for key in order]
                for rank, order in enumerate(orders)
            ),
        )
    for found in arrays:
        for key, size in sizes.items():
            np.testing.assert_array_equal(found[key], np.full(size, 3 * key + 3))


@pytest.mark.parametrize("kind", LIBRARY_KINDS)
def test_messages_and_allreduces_share_the_way(kind: str) -> None:
    def start(end: Any) -> list[Handle]:
        other, rank = 1 - end.rank, end.rank
        return [
            end.recv(other, 7, into[rank]),
            end.allreduce(7, sums[rank]),
            end.send(other, 7, numbers(300_000, rank)),
        ]

    with network(kind, 2) as net:
        into, sums = [np.zeros(300_000, np.uint8) for _ in range(2)], [np.ones(5, np.float32) for _ in range(2)]
        together(net, start, start)
    for rank in range(2):
        np.testing.assert_array_equal(into[rank], numbers(300_000, 1 - rank))
        np.testing.assert_array_equal(sums[rank], np.full(5, 2.0))


@pytest.mark.parametrize("kind", LIBRARY_KINDS)
def test_what_a_library_cannot_add_is_refused(kind: str) -> None:
    def start(end: Any) -> list[Handle]:
        return [end.allreduce(0, np.zeros(4, "V8"))]

    with network(kind, 2) as net, pytest.raises(UsageError, match=r"cannot add elements of type .*: use ring"):
        together(net, start, start)


@pytest.mark.parametrize("kind", LIBRARY_KINDS)
def test_an_allreduce_that_a_peer_leaves_out_fails(kind: str) -> None:
    with network(kind, 3) as net:
        waits: Any = net.ends[0]
        handle = waits.allreduce(1, np.zeros(3, np.float32))
        net.turn(2)
        net.ends.pop().close()
        with pytest.raises(PeerLost, match="rank 2"):
            Net([waits]).wait(handle)
