"""One suite for every transport: matching, order, sizes, concurrency, time limits, dying peers, clean ends."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from remote import RemoteEnd, World

from mpi_launch import LIBRARIES
from syncline.errors import ClosedError, PeerLost, UsageError
from syncline.transports import INLINE_BYTES, Handle, Place, Transport
from syncline.transports.auto import Auto
from syncline.transports.inproc import Hub
from syncline.transports.shm import Shm
from syncline.transports.tcp import Tcp
from syncline.types import Rate, Seconds, numpy_dtype
from syncline.wire.store import MemoryStore

LIMIT_S = 20.0


@dataclass
class Net:
    """All ends of one transport, driven by the test's own thread."""

    ends: list[Transport]

    def wait(self, *handles: Handle, limit: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit
        while not all(handle.done for handle in handles):
            for end in self.ends:
                end.poll(0.0005)
            if time.monotonic() > deadline:
                raise TimeoutError([handle for handle in handles if not handle.done])
        for handle in handles:
            if handle.error is not None:
                raise handle.error

    def turn(self, times: int = 5) -> None:
        for _ in range(times):
            for end in self.ends:
                end.poll(0.001)


def pairs(world: int, kind: str) -> list[dict[int, socket.socket]]:
    found: list[dict[int, socket.socket]] = [{} for _ in range(world)]
    for low in range(world):
        for high in range(low + 1, world):
            if kind == "shm" or (kind.startswith("auto") and node(kind, low) == node(kind, high)):
                a, b = socket.socketpair()
            else:
                with socket.create_server(("127.0.0.1", 0)) as door:
                    a = socket.create_connection(door.getsockname())
                    b, _ = door.accept()
            found[low][high], found[high][low] = a, b
    return found


def node(kind: str, rank: int) -> int:
    """The host of a rank: of two ranks both are on one, or each is on its own."""
    return rank // 2 if kind == "auto-near" else rank % 2


def make_auto(kind: str, rank: int, socks: dict[int, socket.socket]) -> Transport:
    near = {peer: sock for peer, sock in socks.items() if node(kind, peer) == node(kind, rank)}
    far = {peer: sock for peer, sock in socks.items() if peer not in near}
    return Auto(rank, {Shm(rank, near): near, Tcp(rank, far): far})


MAKE: dict[str, Callable[..., Transport]] = {
    "shm": Shm,
    "tcp": Tcp,
    "shaped": partial(Tcp, rate=Rate(8e9), delay=Seconds(0.002)),
    "auto-near": partial(make_auto, "auto-near"),
    "auto-far": partial(make_auto, "auto-far"),
}
worlds: dict[tuple[str, int], World] = {}
"""Ranks under mpirun, by library and number; started when first asked for."""


@pytest.fixture(scope="module", autouse=True)
def _end_of_worlds() -> Iterator[None]:
    yield
    while worlds:
        worlds.popitem()[1].close()


def torch_ends(world: int) -> list[Transport]:
    """All ends of a torch transport: making one waits for the others."""
    pytest.importorskip("torch")
    from syncline.transports.torch import Torch

    store = MemoryStore()
    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(Torch, [Place(rank, world, store) for rank in range(world)]))


@contextmanager
def network(kind: str, world: int) -> Iterator[Net]:
    if kind == "inproc":
        hub = Hub(world)
        ends: list[Transport] = [hub.transport(rank) for rank in range(world)]
    elif kind == "torch":
        ends = torch_ends(world)
    elif kind in LIBRARIES:
        if (kind, world) not in worlds:
            worlds[kind, world] = World(kind, world)
        ends = [*worlds[kind, world].ends()]
    else:
        ends = [MAKE[kind](rank, socks) for rank, socks in enumerate(pairs(world, kind))]
    try:
        yield Net(ends)
    finally:
        for end in ends:
            end.close()


KINDS = ["inproc", "shm", "tcp", "shaped", "auto-near", "auto-far", "torch", *LIBRARIES]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def numbers(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


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


def test_poll_returns_after_its_time_limit(kind: str) -> None:
    with network(kind, 2) as net:
        handle = net.ends[0].recv(1, 0, np.zeros(1, np.uint8))
        assert net.ends[0].poll(0.01) == []
        assert not handle.done


def test_wake_ends_a_poll_from_another_thread(kind: str) -> None:
    with network(kind, 2) as net:
        begun = threading.Event()
        ended = threading.Event()

        def poll() -> None:
            begun.set()
            net.ends[0].poll(LIMIT_S)
            ended.set()

        thread = threading.Thread(target=poll)
        thread.start()
        begun.wait(LIMIT_S)
        net.ends[0].wake()
        assert ended.wait(LIMIT_S / 2)
        thread.join()


def test_a_peer_that_ends_fails_what_waits_for_it_only(kind: str) -> None:
    with network(kind, 3) as net:
        waits = net.ends[0].recv(2, 0, np.zeros(8, np.uint8))
        large = net.ends[0].send(2, 1, numbers(1_000_000))
        net.turn(2)
        net.ends.pop().close()
        for handle in (waits, large):
            with pytest.raises(PeerLost, match="rank 2"):
                net.wait(handle)
        late = net.ends[0].recv(2, 5, np.zeros(1, np.uint8))
        with pytest.raises(PeerLost):
            net.wait(late)
        into = np.zeros(3, np.uint8)
        net.wait(net.ends[1].recv(0, 0, into), net.ends[0].send(1, 0, numbers(3)))


def test_what_waits_for_a_peer_that_has_ended_keeps_nobody_from_ending(kind: str) -> None:
    with network(kind, 2) as net:
        for tag in range(3):
            net.ends[0].send(1, tag, numbers(60_000))
            net.ends[0].send(1, tag, numbers(1_000_000))
        net.ends.pop().close()
        for _ in range(200):
            if net.ends[0].idle:
                break
            net.ends[0].poll(0.01)
        assert net.ends[0].idle


def test_what_a_peer_sent_before_it_ended_still_arrives(kind: str) -> None:
    with network(kind, 2) as net:
        sent = net.ends[1].send(0, 0, numbers(100))
        if kind != "inproc":  # by reference: done when consumed
            net.wait(sent)
        net.turn(2)
        net.ends.pop().close()
        into = np.zeros(100, np.uint8)
        net.wait(net.ends[0].recv(1, 0, into))
        np.testing.assert_array_equal(into, numbers(100))


def test_a_closed_transport_refuses_work(kind: str) -> None:
    with network(kind, 2) as net:
        end = net.ends.pop()
        end.close()
        end.close()
        with pytest.raises(ClosedError):
            end.poll(0)
        with pytest.raises(ClosedError):
            end.send(0, 0, numbers(1))


def test_traffic_counts_every_byte_of_a_message(kind: str) -> None:
    with network(kind, 2) as net:
        data = numbers(100_000)
        net.wait(net.ends[1].recv(0, 0, np.zeros(100_000, np.uint8)), net.ends[0].send(1, 0, data))
        sent, received = net.ends[0].traffic()[0][1], net.ends[1].traffic()[1][0]
        assert sent == received
        assert 100_000 <= sent < 100_200


def settle() -> None:
    """Wait for threads that end with their peers, and drop what they held."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("syncline"):
            thread.join(LIMIT_S)
    gc.collect()


def shared_names() -> set[str]:
    """What is in /dev/shm but for Open MPI's files, which come and go with the ranks of other tests."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sm_segment.")}


def test_nothing_is_left_behind(kind: str) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    if kind in LIBRARIES:
        pytest.skip("what is in the ranks' own processes is looked at in the next test")
    with network(kind, 2):
        pass
    settle()
    files, threads, shared = open_files(), threading.active_count(), shared_names()
    for _ in range(3):
        with network(kind, 3) as net:
            data = net.ends[0].allocate(200_000)
            net.wait(net.ends[1].recv(0, 0, np.zeros(200_000, np.uint8)), net.ends[0].send(1, 0, data))
            del data  # memory lives as long as somebody looks at it
    settle()
    assert open_files() == files
    assert threading.active_count() == threads
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


def together(net: Net, *calls: Callable[[Transport], list[Handle]]) -> list[list[Handle]]:
    """Each end starts its operations and waits for them in a thread of its own, as ranks do."""

    def run(end: Transport, start: Callable[[Transport], list[Handle]]) -> list[Handle]:
        handles = start(end)
        Net([end]).wait(*handles)
        return handles

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, net.ends, calls))


LIBRARY_KINDS = ["torch", *LIBRARIES]
ADDED = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64", "uint64"]


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


def test_a_wake_after_the_end_touches_no_file(kind: str) -> None:
    with network(kind, 2) as net:
        end = net.ends.pop()
        end.close()
        pipes = [os.pipe() for _ in range(4)]  # the numbers that the transport's own files had
        end.wake()
        for reading, writing in pipes:
            os.set_blocking(reading, False)
            with pytest.raises(BlockingIOError):
                os.read(reading, 8)
            os.close(reading)
            os.close(writing)


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


def test_what_was_acknowledged_last_is_written_before_the_end(kind: str) -> None:
    with network(kind, 2) as net:
        data = net.ends[0].allocate(300_000)
        sent = net.ends[0].send(1, 0, data)
        received = net.ends[1].recv(0, 0, np.zeros(300_000, np.uint8))
        net.wait(received)
        for _ in range(100):
            if net.ends[1].idle:
                break
            net.ends[1].poll(0.001)
        net.ends.pop().close()
        net.wait(sent)


def test_what_is_lent_is_said_of_each_peer() -> None:
    """From a peer on this host one sees its memory, from another a copy: the sender is done before the release."""
    with network("auto-near", 4) as net:
        reader = net.ends[1]
        assert [reader.lends_from(peer) for peer in (0, 2, 3)] == [True, False, False]
        for peer in (0, 2):
            data = net.ends[peer].allocate(300_000)
            data[:] = numbers(300_000, peer)
            seen, sent = reader.borrow(peer, 0, 300_000), net.ends[peer].send(1, 0, data)
            net.wait(seen)
            net.turn()
            assert sent.done is not reader.lends_from(peer)
            data[0] ^= 255
            assert seen.payload is not None
            assert (seen.payload[0] == data[0]) is np.bool_(reader.lends_from(peer))
            reader.release(seen)
            net.wait(sent)


def test_one_wait_sees_what_comes_by_any_member() -> None:
    """The end that waits polls once and long; the others send from another thread."""
    with network("auto-near", 4) as net:
        waiting, others = net.ends[0], [net.ends[1], net.ends[2]]
        for sender in others:
            handle = waiting.recv(sender.rank, 7, np.zeros(5, np.uint8))
            waiting.poll(0.0)

            def send(sender: Transport = sender) -> None:
                sender.send(0, 7, numbers(5))
                sender.poll(0.0)

            thread = threading.Thread(target=send)
            thread.start()
            found: list[Handle] = []
            deadline = time.monotonic() + LIMIT_S
            while not found and time.monotonic() < deadline:
                found = waiting.poll(LIMIT_S)
            thread.join()
            assert found == [handle]


def test_a_transport_of_several_is_named_after_them() -> None:
    with network("auto-near", 4) as net:
        assert net.ends[0].name == "shm+tcp"
        assert net.ends[0].world == 4
        assert list(net.ends[2].traffic()[0]) == [0, 1, 3]
