"""What ranks on several hosts do: hosts are pretended, or are network namespaces of this machine."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import codec_bodies
import numpy as np
import rank_bodies as bodies
import torch

import syncline
from syncline.wire.listener import Listener
from syncline.wire.meeting import Member

_CLONE_NEWNET = 0x40000000


def pretend(node: int) -> None:
    """Let this process be on another host than those of other nodes."""

    describe = Listener.describe

    def elsewhere(listener: Listener, terms: dict[str, str]) -> Member:
        me = describe(listener, terms)
        return replace(me, host=f"host{node}", machine=f"{me.machine} {node}", pid_space=f"{me.pid_space} {node}")

    Listener.describe = elsewhere  # type: ignore[method-assign]


def enter(namespace: str) -> None:
    """Move this process, which has one thread, into a named network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def on_nodes(line: Connection, place: bodies.Place, nodes: list[int], body: str, *case: Any) -> None:
    """Another body, with every process on its node."""
    pretend(nodes[place[0]])
    getattr(bodies, body)(line, place, *case)


def what_runs(
    line: Connection, place: bodies.Place, where: list[Any], strategy: str, elements: int = 1_000_000
) -> None:
    """Allreduce a large array; what ran, and how many of its bytes went to each peer. Servers only serve."""
    here = where[place[0]]
    if isinstance(here, str):
        enter(here)
    else:
        pretend(here)
    with bodies.joined(place, strategy):
        array = np.full(elements, place[0] + 1, np.float32)
        before = syncline.stats()
        syncline.allreduce(array, op="sum")
        assert (array == sum(range(1, place[1] + 1))).all()
        syncline.barrier()
        stats = syncline.stats()
        sent = {peer: count - before.bytes_sent[peer] for peer, count in stats.bytes_sent.items()}
        line.send([stats.strategy, stats.transport, [sent.get(peer, 0) for peer in range(place[1])]])


def resumes(line: Connection, place: bodies.Place, nodes: list[int], strategies: list[str]) -> None:
    """``codec_bodies.stop_and_resume``, with every process on its node."""
    pretend(nodes[place[0]])
    codec_bodies.stop_and_resume(line, place, strategies)


def what_is_coded(line: Connection, place: bodies.Place, nodes: list[int], strategy: str, codecs: list[str]) -> None:
    """A large gradient with each codec: what ran, the bytes to each peer, and the average."""
    pretend(nodes[place[0]])
    found = []
    for codec in codecs:
        with bodies.joined(place, f"{strategy} codec={codec}"):
            model = torch.nn.Linear(1024, 512, bias=False)
            syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            x = torch.randn(1, 1024, generator=torch.Generator().manual_seed(syncline.rank()))
            syncline.barrier()
            before = syncline.stats().bytes_sent
            model(x).sum().backward()
            stats = syncline.stats()
            sent = [stats.bytes_sent.get(peer, 0) - before.get(peer, 0) for peer in range(place[1])]
            assert model.weight.grad is not None
            found.append([stats.chosen, stats.exchange, sent, model.weight.grad.numpy().tobytes()])
    line.send(found)


def dies(line: Connection, place: bodies.Place, nodes: list[int], victim: int, strategy: str) -> None:
    """One process is killed between two steps."""
    pretend(nodes[place[0]])
    with bodies.joined(place, strategy):
        for step in range(1_000_000):
            if step == 2 and place[0] == victim:
                os.kill(os.getpid(), 9)
            syncline.allreduce(np.ones(300_000, np.float32))
    line.send("never")


def holds_the_interpreter(line: Connection, place: bodies.Place, liveness: float) -> None:
    """Rank 1 is in a call that keeps the interpreter lock for longer than the liveness limit."""
    pretend(place[0])
    with bodies.joined(place, "ring", liveness=liveness):
        syncline.barrier()
        if place[0] == 1:
            ctypes.PyDLL(None).usleep(int(1.75e6 * liveness))
        syncline.barrier()
    line.send("met")


def loses_its_cable(line: Connection, place: bodies.Place, namespaces: list[str], liveness: float) -> None:
    """Exchanges something again and again, from another network namespace of the same machine."""
    enter(namespaces[place[0]])
    with bodies.joined(place, "ring", liveness=liveness):
        syncline.barrier()
        line.send("running")
        while True:
            syncline.allreduce(np.ones(1000))
