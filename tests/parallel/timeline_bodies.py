"""What ranks do that are recorded: on one clock, or on clocks of their own, to a good end or to a bad one."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import rank_bodies as bodies
import torch

import syncline
from syncline.timeline import folder, recording, spans

AHEAD_S = 1000.0
"""By how much the clock of each rank is ahead of that of the rank before, where they differ."""


def differ(index: int) -> None:
    """Let this process have a clock of its own."""

    class Ahead(spans.SpanFile):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, clock=lambda: time.perf_counter() + index * AHEAD_S, **options)

    folder.SpanFile = Ahead
    recording.identity = lambda: f"clock {index}"


def train(steps: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(60, 60) for _ in range(3)))
    model, optimizer = syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 60)).sum().backward()
        optimizer.step()


def trains(line: Connection, place: bodies.Place, strategy: str, clocks: bool) -> None:
    """Some steps; when they began and ended, by the machine's clock."""
    if clocks:
        differ(place[0])
    begun = time.perf_counter()
    with bodies.joined(place, strategy):
        train(4)
    line.send([begun, time.perf_counter()])


def fails(line: Connection, place: bodies.Place, how: str) -> None:
    """Rank 1 does not come to the third call, and ends when it is told that the others have come."""
    with bodies.joined(place, "ring transport=tcp", liveness=2.0):
        for _ in range(2):
            syncline.allreduce(np.ones(1000))
        if place[0] == 1:
            line.recv()
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the data of this rank are spoilt")
        line.send("comes")
        syncline.allreduce(np.ones(1000))
    line.send("never")


def leaves_first(line: Connection, place: bodies.Place, patience_s: float) -> None:
    """Rank 1 is gone when the others come to the end."""
    recording.PATIENCE_S = 0.2 if place[0] == 1 else patience_s
    with bodies.joined(place, "ring"):
        syncline.barrier()
        if place[0] != 1:
            line.recv()
    line.send("ended")


def twice(line: Connection, place: bodies.Place) -> None:
    """Two sessions of the same processes."""
    for _ in range(2):
        with bodies.joined(place, "ring"):
            syncline.barrier()
    line.send("ended")


def starts(line: Connection, place: bodies.Place, paths: list[str]) -> None:
    """Join, with an idea of its own of where a timeline goes."""
    os.environ["SYNCLINE_TRACE"] = paths[place[0]]
    bodies.starts(line, place, {"timeout": 20.0})
