"""What ranks do that are slow for a planted reason."""

from __future__ import annotations

import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import rank_bodies as bodies
import torch

import syncline
from syncline.process import process

FORWARD_S, BACKWARD_S = 0.005, 0.01
SLOW_BYTES_PER_S = 8_000_000
PACING = 47  # SO_MAX_PACING_RATE, which socket does not name


class Lasting(torch.autograd.Function):
    """Takes a time in each pass, as a layer on a device does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Layer(torch.nn.Module):
    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear, self.times = torch.nn.Linear(width, width), (forward_s, backward_s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(Lasting.apply(x, *self.times))  # type: ignore[no-untyped-call]
        return out


def train(cause: str, rank: int, steps: int) -> None:
    """Some steps, in which the cause keeps the ranks."""
    width, count = {"small_buckets": (64, 60), "slow_link": (400, 6), "shared_server": (300, 6)}.get(cause, (128, 6))
    share = 0.0 if cause == "small_buckets" else 6 / count  # buckets so small belong to a model that computes little
    forward_s, backward_s = FORWARD_S * share, BACKWARD_S * share
    if cause == "slow_rank" and rank == 1:
        backward_s *= 3
    if cause == "slow_link" and rank == 1:
        link = process.session.engine.transport._links[2]  # type: ignore[attr-defined]
        link.sock.setsockopt(socket.SOL_SOCKET, PACING, SLOW_BYTES_PER_S)
    model = torch.nn.Sequential(*(Layer(width, forward_s, backward_s) for _ in range(count)))
    model, optimizer = syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(steps):
        if cause == "slow_loading" or (cause == "late_loader" and rank == 2):
            time.sleep(0.06)
        optimizer.zero_grad()
        model(torch.ones(4, width)).square().mean().backward()
        optimizer.step()


def are_slow(line: Connection, place: bodies.Place, plants: list[list[str]], steps: int) -> None:
    """One session after the other, each with a cause and a strategy. A server's process ends with its session."""
    for cause, strategy in plants:
        with bodies.joined(place, strategy):
            train(cause, place[0], steps)
    line.send("ended")
