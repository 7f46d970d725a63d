"""What ranks of the pool do when something goes wrong: one is gone, comes late, makes another call, is interrupted."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_bodies import SECRET, Place, joined
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.errors import PeerError, UsageError
from syncline.launch import connecting
from syncline.session.session import Session
from syncline.torch_backend import sessions
from syncline.wire.meeting_sockets import MeetingClient


def train_until(line: Connection, place: Place, strategy: str, victim: int, number: int, liveness: float) -> None:
    """Train for ever; a victim that computes sends itself a signal in the middle of its third backward pass.

    It waits for a word before: the others may not have all of the step before it yet.
    """
    index = place[0]
    with joined(place, strategy, liveness=liveness):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(6)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = syncline.prepare(model, optimizer)
        for step in range(1_000_000):
            optimizer.zero_grad()
            if step == 2 and index == victim:
                line.recv()
                model[3].weight.register_hook(lambda _: os.kill(os.getpid(), number))
            model(torch.ones(4, 300)).sum().backward()
            optimizer.step()
            if step < 2:
                line.send(step)


def sits_elsewhere(line: Connection, place: Place, strategy: str, victim: int, number: int, liveness: float) -> None:
    """As with a data loader whose process is gone: the others do not come back to Syncline after the first step."""
    with joined(place, strategy, liveness=liveness):
        model = torch.nn.Linear(30, 3)
        model, optimizer = syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        model(torch.ones(4, 30)).sum().backward()
        optimizer.step()
        line.send("stepped")
        line.recv()
        if place[0] == victim:
            os.kill(os.getpid(), number)


def waits_for_one(line: Connection, place: Place, progress: float) -> None:
    """Rank 1 does not come to the barrier until the test says so."""
    with joined(place, "ring transport=tcp", progress=progress):
        syncline.barrier()
        line.send("joined")
        if place[0] == 1:
            line.recv()
        syncline.barrier()
    line.send("met")


def raises(line: Connection, place: Place, strategy: str) -> None:
    """Rank 1 raises between two steps."""
    with joined(place, strategy):
        model = torch.nn.Linear(100, 100)
        model, optimizer = syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for step in range(1_000_000):
            if step == 2 and place[0] == 1:
                raise ValueError("the data of this rank are spoilt: caf\udce9.jpg")
            optimizer.zero_grad()
            model(torch.ones(4, 100)).sum().backward()
            optimizer.step()
    line.send("never")


def fails(line: Connection, place: Place, strategy: str, victim: int, fault: str) -> None:  # noqa: ARG001
    """One rank fails in its fourth step, while the others train for ever."""
    syncline.init(strategy, rank=place[0], world_size=place[1], address=place[2], secret=SECRET, liveness=2.0)
    model = torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(3)))
    model, optimizer = syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    step, used = trained(model, optimizer), trained(model[:1], optimizer)
    for number in range(1_000_000):
        if number == 3 and place[0] == victim:
            if fault == "raises":
                raise ValueError("the data of this rank are spoilt")
            if fault == "gradient":
                used()
            if fault == "other call":
                syncline.allreduce(np.ones(3))
            if fault == "exits":
                os._exit(3)
            if fault == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
        step()


def stops_while_connecting(line: Connection, place: Place, victim: int, at: str) -> None:
    """One rank is stopped when all have come: at its control connections, at those for data, or when all stand."""
    connect, through = connecting.connect, MeetingClient.through

    def stop(reached: str) -> None:
        if reached != at:
            return
        if place[0] != victim:
            line.send("come")
            return
        line.recv()  # until the others know of all: it may be rank 0, which tells them
        os.kill(os.getpid(), signal.SIGSTOP)

    def connect_late(roll: Any, listener: Any, purpose: str, *arguments: Any) -> Any:
        stop(purpose)
        return connect(roll, listener, purpose, *arguments)

    def through_late(client: MeetingClient) -> None:
        stop("through")
        through(client)

    connecting.connect, MeetingClient.through = connect_late, through_late  # type: ignore[attr-defined, method-assign]
    with joined(place, "ring transport=tcp", liveness=1.0):
        pass


def ends_quickly(line: Connection, place: Place, path: str, fault: str) -> None:
    """Garbage holds a file with something in its buffer; what is called behind Syncline says how the process ends."""
    before = gc.get_freeze_count()
    atexit.register(lambda: print("frozen:", gc.get_freeze_count() > before))
    with joined(place, "ring"):
        circle: list[Any] = [Path(path).open("w")]  # noqa: SIM115
        circle.append(circle)
        circle[0].write("written")
        syncline.barrier()
        if fault == "raises" and place[0] == 1:
            raise ValueError("the data of this rank are spoilt")
        if fault == "raises":
            syncline.barrier()
    line.send("ended well")


def server_calls(line: Connection, place: Place) -> None:
    """A script whose servers come by collective calls, since these stand before prepare."""
    with joined(place, "ps(servers=1)"):
        syncline.barrier()
        try:
            syncline.broadcast(np.zeros(3))
        except UsageError as error:
            line.send(str(error))
        else:
            line.send("done")


def late_to_barrier(line: Connection, place: Place) -> None:
    """Rank 1 does not come to the barrier until the test says so."""
    with joined(place, "ring"):
        syncline.barrier(timeout=30)
        line.send("joined")
        if place[0] == 1:
            line.recv()
        syncline.barrier(timeout=0.2)


def mismatch(line: Connection, place: Place, calls: list[str]) -> None:
    """Every rank makes its own call."""
    with joined(place, "ring"):
        syncline.barrier()
        call = calls[place[0]]
        if call == "barrier":
            syncline.barrier()
        elif call == "broadcast":
            syncline.broadcast(np.zeros(5))
        elif call == "step":
            model = torch.nn.Linear(2, 1)
            syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        else:
            syncline.allreduce(np.zeros(int(call), np.float32))
        syncline.barrier()
    line.send("never")


def other_models(line: Connection, place: Place, strategy: str, how: str) -> None:
    """The last process's model differs in one way."""
    odd = place[0] == place[1] - 1
    with joined(place, strategy):
        width = 9 if odd and how == "shape" else 8
        layers = [torch.nn.Linear(4, 8), torch.nn.Linear(8, width), torch.nn.Linear(width, 2)]
        if odd and how == "more":
            layers.append(torch.nn.Linear(2, 2))
        model = torch.nn.Sequential(*layers)
        if odd and how == "type":
            model[1].double()
        if odd and how == "frozen":
            model[1].weight.requires_grad_(False)
        model, optimizer = syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    line.send("never")


def leaves_early(line: Connection, place: Place) -> None:
    """Rank 1's script ends while the others still need it."""
    with joined(place, "ring"):
        for step in range(1_000_000):
            if step == 2 and place[0] == 1:
                break
            syncline.allreduce(np.ones(10_000))
    line.send("ended")


def interrupted(line: Connection, place: Place) -> None:
    """Runs until SIGINT, with Python's own handler for it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with joined(place, "ring"):
        syncline.barrier()
        line.send("running")
        while True:
            syncline.allreduce(np.ones(1000))


def survives(line: Connection, place: Place) -> None:
    """Another process's failure is an exception that a script can catch."""
    index = place[0]
    with joined(place, "ring"):
        if index == 1:
            syncline.barrier()
            sys.stdout.flush()
            os._exit(3)
        try:
            syncline.barrier()  # rank 1 may be gone before its last message of it has left
            while True:
                syncline.allreduce(np.ones(1000))
        except PeerError as error:
            line.send((error.rank, error.host))


def loses_one_at_the_end(line: Connection, place: Place, kind: str, fault: str, end: str) -> None:
    """Rank 1 is gone in the last step or after it; the others end when they have heard of it, in every way."""
    begin, step = KINDS[kind](place)
    for number in range(4):
        if number == 3 and fault == "is stopped" and place[0] == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        step()
    if place[0] == 1:
        if fault == "raises":
            raise ValueError("the data of this rank are spoilt")
        if fault == "exits":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    watcher = begin().process.watcher
    assert watcher is not None
    assert watcher.failed.wait(30)
    if end == "call":
        dist.destroy_process_group() if kind == "DDP" else syncline.shutdown()
    if end == "exception":
        raise KeyError("of the script's own")
    line.send("ended well")


def under(strategy: str) -> Callable[[Place], tuple[Callable[[], Session], Callable[[], None]]]:
    """A training step of a model of PyTorch."""

    def begin(place: Place) -> tuple[Callable[[], Session], Callable[[], None]]:
        syncline.init(strategy, rank=place[0], world_size=place[1], address=place[2], secret=SECRET, liveness=2.0)
        model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3))
        model, optimizer = syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        return syncline.api.session, trained(model, optimizer)

    return begin


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 30)).sum().backward()
        optimizer.step()

    return step


def under_ddp(place: Place) -> tuple[Callable[[], Session], Callable[[], None]]:
    host, _, port = place[2].rpartition(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, SYNCLINE_SECRET=SECRET)
    dist.init_process_group("syncline", rank=place[0], world_size=place[1])
    model = DistributedDataParallel(torch.nn.Linear(30, 3))
    step = trained(model, torch.optim.SGD(model.parameters(), lr=0.01))
    return lambda: sessions._live[0], step


class Descent:
    lr = 0.1

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: dict[str, np.ndarray]) -> None:  # noqa: ARG002
        weights -= self.lr * gradient


def of_arrays(place: Place) -> tuple[Callable[[], Session], Callable[[], None]]:
    syncline.init("ps(servers=1, on=workers)", rank=place[0], world_size=place[1], address=place[2], secret=SECRET)
    _, optimizer = syncline.prepare({"w": np.ones(50, np.float32)}, Descent())
    return syncline.api.session, lambda: optimizer.step({"w": np.ones(50, np.float32)})


KINDS: dict[str, Callable[[Place], tuple[Callable[[], Session], Callable[[], None]]]] = {
    "DDP": under_ddp,
    "NumPy": of_arrays,
    **{
        strategy: under(strategy)
        for strategy in (
            "ring",
            "ring transport=tcp",
            "ring schedule=split",
            "ring schedule=priority",
            "ring schedule=delayed",
            "ring sync=local(steps=2)",
            "ps(servers=1)",
            "ps(servers=1) schedule=priority",
            "ps(servers=1) sync=asp",
            "ps(servers=1) sync=ssp(staleness=1)",
            "ps(servers=1, on=workers) sync=ssp(staleness=1)",
        )
    },
}
"""What trains, and who knows the session."""
