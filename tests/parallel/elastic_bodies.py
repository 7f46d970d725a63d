"""What ranks of an elastic run do: train, and die or break at given steps."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch
from rank_bodies import SECRET

import syncline
from syncline import recovery
from syncline.launch import relay

SAMPLES, BATCH, EPOCHS = 22, 6, 3
STEPS = 4  # of an epoch


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module, torch.optim.Optimizer, Any]:
    """Data, a model, its optimizer and a schedule of its learning rate."""
    numbers = torch.Generator().manual_seed(1)
    x, y = (torch.randn(SAMPLES, size, generator=numbers, dtype=torch.float64) for size in (5, 2))
    model = torch.nn.Linear(5, 2, dtype=torch.float64)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.25)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return x, y, model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def learn(x: torch.Tensor, y: torch.Tensor, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    """One step. It ends by dropping the gradients, so that one which breaks leaves them to the next."""
    torch.nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def train(line: Connection, index: int, processes: int, address: str, least: int, plan: dict[str, Any]) -> None:
    """Train elastically. ``plan`` has what happens to this process, and at which step of the run."""
    fd = recv_handle(line)
    host, _, port = address.rpartition(":")
    number, world = str(index), str(processes)
    os.environ.update(
        {relay.VARIABLE: f"{fd}:{index}:{processes}:{least}", "SYNCLINE_LAUNCHER": str(os.getppid())},
        SYNCLINE_PROCESS=number, SYNCLINE_PROCESSES=world, RANK=number, WORLD_SIZE=world, LOCAL_RANK=number,
        SYNCLINE_SAMPLES=plan.get("samples", ""), LOCAL_WORLD_SIZE=world, MASTER_ADDR=host,
        SYNCLINE_MEETING_PORT=port, SYNCLINE_RUN_ID="elastic",
    )  # fmt: skip
    what, when = plan.get(number, ("", -1))
    x, y, model, optimizer, scheduler = problem()
    syncline.init(plan["strategy"], secret=SECRET, liveness=2.0)
    syncline.prepare(model, optimizer, weight="batch")
    sampler = syncline.sampler(SAMPLES, global_batch=BATCH, seed=4)
    calls = 0

    def happen(now: str) -> None:
        if what == now and when == sampler.epoch * STEPS + sampler.step:
            if now == "raise":
                raise RuntimeError("a bug of one worker")
            os.kill(os.getpid(), signal.SIGSTOP if now == "stop" else signal.SIGKILL)

    def course() -> None:
        nonlocal calls
        calls += 1
        while sampler.epoch < EPOCHS:
            for batch in sampler:
                for now in ("before", "stop", "raise"):
                    happen(now)
                learn(x[batch], y[batch], model, optimizer, scheduler)
                sampler.commit()
                happen("after")

    if what == "restoring":  # it dies with the weights that the others wait for
        recovery.Members._restore = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    syncline.elastic(course, [scheduler])
    weights = [parameter.detach().reshape(-1).tolist() for parameter in model.parameters()]
    flat = [weight for tensor in weights for weight in tensor]
    line.send([flat, optimizer.param_groups[0]["lr"], calls, syncline.rank(), syncline.world_size()])
    syncline.shutdown()
