"""All ends of a transport in one place, for every kind of transport: what the suite of contracts runs on."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from remote import World

from mpi_launch import LIBRARIES
from syncline.nouns import Rate, Seconds
from syncline.transports import Handle, Place, Transport
from syncline.transports._auto import Auto
from syncline.transports.inproc import Hub
from syncline.transports.shm import Shm
from syncline.transports.tcp import Tcp
from syncline.wire.store import MemoryStore

LIMIT_S = 20.0

KINDS = ["inproc", "shm", "tcp", "shaped", "auto-near", "auto-far", "torch", *LIBRARIES]


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
        close(kind, ends)


def close(kind: str, ends: list[Transport]) -> None:
    """End all; those that wait a moment for each other at once."""
    with ThreadPoolExecutor(len(ends) if kind == "torch" and ends else 1) as threads:
        list(threads.map(lambda end: end.close(), ends))


def numbers(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
