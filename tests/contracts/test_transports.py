"""Every transport keeps the laws of its kind: ``testing.transports`` has them."""

from __future__ import annotations

import pytest
from ends import KINDS, MESSAGE_KINDS, MPI_KINDS, ONESIDED, TEXTS, network_for

from syncline import registry
from syncline.testing import check_transport
from syncline.transports._frames import AHEAD_BYTES

pytestmark = pytest.mark.usefixtures("no_old_garbage")

ADDED = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64", "uint64"]
"""What the allreduce of a library has to add."""
LIBRARY_KINDS = ["torch", *MPI_KINDS]
"""Libraries with an allreduce."""
ADDING = ("tcp", "shaped", "auto-far", "grpc", "ucx", "zmq", "zmq-near")
PACKAGES = {"torch": "torch", "grpc": "grpc", "ucx": "libucx", "zmq": "zmq", "zmq-near": "zmq"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_transport_keeps_all_laws(kind: str) -> None:
    if kind in PACKAGES:
        pytest.importorskip(PACKAGES[kind])
    ahead = AHEAD_BYTES if kind in (*LIBRARY_KINDS, *MESSAGE_KINDS) else 0
    held = check_transport(TEXTS.get(kind, network_for(kind)), ahead_bytes=ahead, adds=ADDED)
    assert ("its allreduce adds every type" in held) == (kind in LIBRARY_KINDS)
    assert ("what comes in is added" in held) == (kind in ADDING or kind.endswith(ONESIDED))


def test_every_registered_transport_is_tried() -> None:
    assert {entry.name for entry in registry.entries("transports")} <= {*KINDS, "mpi"}
