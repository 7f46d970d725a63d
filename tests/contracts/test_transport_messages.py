"""Messages of every transport: matching, order, sizes, concurrency, what does not fit, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest
from ends import KINDS, network, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.transports import INLINE_BYTES

SIZES = [0, 1, 7, 4095, 4096, 4097, INLINE_BYTES, INLINE_BYTES + 1, 1_000_003, 9_000_001]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "allocated"])
def test_a_message_arrives_unchanged(kind: str, nbytes: int, shared: bool) -> None:
    with network(kind, 2) as net:
        data = net.ends[0].allocate(nbytes) if shared else np.zeros(nbytes, np.uint8)
        data[:] = numbers(nbytes)
        into = np.zeros(nbytes, np.uint8)
        received, sent = net.ends[1].recv(0, 5, into), net.ends[0].send(1, 5, data)
        net.wait(sent, received)
        assert received.nbytes == nbytes
        np.testing.assert_array_equal(into, data)


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_borrowed_message_is_readable_until_released(kind: str, nbytes: int) -> None:
    with network(kind, 2) as net:
        data = net.ends[0].allocate(nbytes)
        data[:] = numbers(nbytes)
        handle, sent = net.ends[1].borrow(0, 1, nbytes), net.ends[0].send(1, 1, data)
        net.wait(handle)
        assert handle.payload is not None
        np.testing.assert_array_equal(handle.payload, data)
        net.ends[1].release(handle)
        net.wait(sent)


@pytest.mark.parametrize("nbytes", [3, 100_000])
def test_receives_in_any_order_of_tags(kind: str, nbytes: int) -> None:
    with network(kind, 2) as net:
        data = [numbers(nbytes, seed) for seed in range(6)]
        sent = [net.ends[0].send(1, tag, item) for tag, item in enumerate(data)]
        net.turn()
        for tag in (3, 0, 5, 1, 4, 2):
            into = np.zeros(nbytes, np.uint8)
            net.wait(net.ends[1].recv(0, tag, into))
            np.testing.assert_array_equal(into, data[tag])
        net.wait(*sent)


@given(
    sizes=st.lists(st.sampled_from([0, 1, 5000, INLINE_BYTES, INLINE_BYTES + 1, 300_000]), min_size=1, max_size=6),
    late=st.booleans(),
    capacity=st.sampled_from([300_000, 400_000]),
)
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("kind", KINDS)
def test_one_tag_keeps_its_order_whatever_the_sizes(kind: str, sizes: list[int], late: bool, capacity: int) -> None:
    with network(kind, 2) as net:
        data = [numbers(size, seed) for seed, size in enumerate(sizes)]
        sent = [net.ends[0].send(1, 9, item) for item in data] if late else []
        if late:
            net.turn(2)
        into = [np.zeros(capacity, np.uint8) for _ in sizes]
        received = [net.ends[1].recv(0, 9, item) for item in into]
        sent = sent or [net.ends[0].send(1, 9, item) for item in data]
        net.wait(*sent, *received)
        for handle, place, item in zip(received, into, data, strict=True):
            assert handle.nbytes == item.nbytes
            np.testing.assert_array_equal(place[: item.nbytes], item)


def test_many_exchanges_in_flight_between_all_pairs(kind: str) -> None:
    world, tags, nbytes = 4, 8, 70_001
    with network(kind, world) as net:
        handles, checks = [], []
        for a in range(world):
            for b in range(world):
                if a != b:
                    for tag in range(tags):
                        into = np.zeros(nbytes, np.uint8)
                        data = numbers(nbytes, a * 100 + b * 10 + tag)
                        handles.append(net.ends[b].recv(a, tag, into))
                        handles.append(net.ends[a].send(b, tag, data))
                        checks.append((into, data))
        net.wait(*handles)
        for into, data in checks:
            np.testing.assert_array_equal(into, data)


def test_both_send_large_messages_before_either_receives(kind: str) -> None:
    with network(kind, 2) as net:
        big = numbers(20_000_000)
        sent = [net.ends[rank].send(1 - rank, 0, big) for rank in (0, 1)]
        net.turn()
        into = [np.zeros(big.nbytes, np.uint8) for _ in range(2)]
        received = [net.ends[rank].recv(1 - rank, 0, into[rank]) for rank in (0, 1)]
        net.wait(*sent, *received)
        np.testing.assert_array_equal(into[0], big)


def test_a_message_that_does_not_fit_is_an_error_and_harms_no_other(kind: str) -> None:
    with network(kind, 2) as net:
        net.ends[0].send(1, 0, numbers(90_000))
        net.ends[0].send(1, 1, numbers(10))
        bad, good = net.ends[1].recv(0, 0, np.zeros(80_000, np.uint8)), net.ends[1].recv(0, 1, np.zeros(10, np.uint8))
        net.wait(good)
        with pytest.raises(UsageError, match="90000 bytes from rank 0 does not fit a receive of 80000"):
            net.wait(bad)


def test_unknown_peers_are_refused(kind: str) -> None:
    with network(kind, 2) as net, pytest.raises(UsageError, match="rank 0 cannot exchange messages with 2"):
        net.ends[0].send(2, 0, numbers(1))


def test_traffic_counts_every_byte_of_a_message(kind: str) -> None:
    with network(kind, 2) as net:
        data = numbers(100_000)
        net.wait(net.ends[1].recv(0, 0, np.zeros(100_000, np.uint8)), net.ends[0].send(1, 0, data))
        sent, received = net.ends[0].traffic()[0][1], net.ends[1].traffic()[1][0]
        assert sent == received
        assert 100_000 <= sent < 100_200
