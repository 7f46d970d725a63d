"""All ends of a transport in one place, for every kind of transport: what the suites of contracts run on."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from remote import World

from mpi_launch import LIBRARIES
from syncline import registry
from syncline.testing.network import LIMIT_S, Ends, Network, connected, network_of, together
from syncline.transports import MemoryStore, Place, Transport
from syncline.transports._auto import Auto, AutoWithLibrary
from syncline.transports.shm import Shm
from syncline.transports.tcp import Tcp
from syncline.wire.tls import Credentials

MESSAGE_KINDS = ("grpc", "ucx", "zmq", "zmq-near")
"""Libraries without an allreduce."""
TEXTS = {kind: kind for kind in ("inproc", "shm", "tcp", "torch", "grpc", "ucx", "zmq")} | {
    "shaped": "tcp(rate=8Gbit, delay=2ms)",
    "checked": "tcp(checksum=on)",
}
ONESIDED = "-onesided"
MPI_KINDS = (*LIBRARIES, *(library + ONESIDED for library in LIBRARIES))
KINDS = [*TEXTS, "tls", "zmq-near", "auto-near", "auto-far", *MPI_KINDS]

worlds: dict[tuple[str, int], World] = {}
"""Ranks under mpirun, by library and number; started when first asked for."""


def node(kind: str, rank: int) -> int:
    """The host of a rank: of two ranks both are on one, or each is on its own."""
    return rank // 2 if kind == "auto-near" else rank % 2


def make_auto(kind: str, rank: int, socks: dict[int, socket.socket]) -> Transport:
    near = {peer: sock for peer, sock in socks.items() if node(kind, peer) == node(kind, rank)}
    far = {peer: sock for peer, sock in socks.items() if peer not in near}
    return Auto(rank, {Shm(rank, near): near, Tcp(rank, far): far})


def sealed(socks: Sequence[dict[int, socket.socket]]) -> list[dict[int, socket.socket]]:
    """The same connections over TLS."""
    ranks = [Credentials("on", b"a secret of tests", b"a run of tests", rank) for rank in range(len(socks))]

    def seal(call: tuple[int, int]) -> socket.socket:
        rank, peer = call
        made = ranks[rank].wrap(socks[rank][peer], listening=rank < peer)
        made.do_handshake()
        return made

    calls = [(rank, peer) for rank, mine in enumerate(socks) for peer in mine]
    found = dict(zip(calls, together(calls, seal), strict=True))
    return [{peer: found[rank, peer] for peer in mine} for rank, mine in enumerate(socks)]


def make_summing(library: Any, socks: dict[int, socket.socket], place: Place) -> Transport:
    """An end whose messages travel over shared memory, while a library sums among all ranks."""
    shm = Shm(place.rank, socks)
    return AutoWithLibrary(place.rank, {shm: socks}, library(replace(place, carrier=shm)))


@contextmanager
def made(kind: str, world: int) -> Iterator[Sequence[Transport]]:
    """The ends of a kind that no text names."""
    if kind in MPI_KINDS:
        if (kind, world) not in worlds:
            worlds[kind, world] = World(kind.removesuffix(ONESIDED), world)
        ends: Sequence[Transport] = [*worlds[kind, world].ends("on" if kind.endswith(ONESIDED) else "off")]
    elif kind == "tls":
        ends = [Tcp(rank, mine) for rank, mine in enumerate(sealed(connected(world, lambda *_: False)))]
    elif kind == "zmq-near":
        store, all_ranks = MemoryStore(), frozenset(range(world))
        places = [Place(rank, world, store, timeout_s=LIMIT_S, near=all_ranks - {rank}) for rank in range(world)]
        ends = together(places, registry.get("transports", "zmq").target)
    elif kind == "torch-near":
        store, every = MemoryStore(), tuple(range(world))
        places = [Place(rank, world, store, timeout_s=LIMIT_S, together=every) for rank in every]
        library = registry.get("transports", "torch").target
        near = zip(connected(world, lambda *_: True), places, strict=True)
        ends = together([*near], lambda one: make_summing(library, *one))
    else:
        socks = connected(world, lambda low, high: node(kind, low) == node(kind, high))
        ends = [make_auto(kind, rank, mine) for rank, mine in enumerate(socks)]
    try:
        yield ends
    finally:
        together(ends, lambda end: end.close())


def network_for(kind: str) -> Network:
    """What makes the ends of a kind."""
    return network_of(TEXTS[kind]) if kind in TEXTS else partial(made, kind)


@contextmanager
def network(kind: str, world: int) -> Iterator[Ends]:
    with network_for(kind)(world) as ends:
        yield Ends(ends)
