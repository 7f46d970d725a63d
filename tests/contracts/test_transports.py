"""Every transport keeps the laws of its kind (``testing.transports``); transports made of several.

Several transports as one: what is lent depends on the peer, one wait covers all, and the name says which.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from ends import KINDS, MESSAGE_KINDS, MPI_KINDS, ONESIDED, TEXTS, network, network_for

from syncline import registry
from syncline.testing import check_transport
from syncline.testing.network import LIMIT_S, numbers
from syncline.transports import Handle, Transport
from syncline.transports._frames import AHEAD_BYTES

pytestmark = pytest.mark.usefixtures("no_old_garbage")

ADDED = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64", "uint64"]
"""What the allreduce of a library has to add."""
LIBRARY_KINDS = ["torch", "torch-near", *MPI_KINDS]
"""Libraries with an allreduce."""
ADDING = ("tcp", "shaped", "checked", "tls", "auto-far", "grpc", "ucx", "zmq", "zmq-near")
PACKAGES = {
    "tls": "cryptography",
    "torch": "torch",
    "torch-near": "torch",
    "grpc": "grpc",
    "ucx": "libucx",
    "zmq": "zmq",
    "zmq-near": "zmq",
}


VARIANTS = ("checked", "shaped", "auto-far", "zmq-near")
"""Kinds that share nearly all with another one."""
MARKS = dict.fromkeys((*VARIANTS, *MPI_KINDS[::3]), pytest.mark.slow)
MARKS |= {kind: pytest.mark.deep for kind in MPI_KINDS if kind not in MARKS}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=MARKS.get(kind, ())) for kind in (*KINDS, "torch-near")],
)
def test_every_transport_keeps_all_laws(kind: str) -> None:
    if kind in PACKAGES:
        pytest.importorskip(PACKAGES[kind])
    ahead = AHEAD_BYTES if kind in (*LIBRARY_KINDS, *MESSAGE_KINDS) else 0
    examples = 2 if kind == "torch-near" else 8  # its messages are those of shm, and Gloo takes long to connect
    held = check_transport(TEXTS.get(kind, network_for(kind)), ahead_bytes=ahead, adds=ADDED, examples=examples)
    assert ("its allreduce adds every type" in held) == (kind in LIBRARY_KINDS)
    assert ("received data is added" in held) == (kind in ADDING or kind.endswith(ONESIDED))
    if kind in ("inproc", "tcp", "shm"):
        assert "an urgent message overtakes waiting messages" in held


def test_every_registered_transport_is_tried() -> None:
    assert {entry.name for entry in registry.entries("transports")} <= {*KINDS, "mpi"}


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
