"""A script that goes on at its newest checkpoint: of DistributedDataParallel over the backend syncline, or of Syncline.

Arguments: a folder, the rank that is killed in the first attempt, between the update of a step and its checkpoint, and
backend or syncline.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import syncline

STEPS, LOST, BATCH = 8, 4, 6


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module, torch.optim.Optimizer]:
    """Data, a model and its optimizer."""
    numbers = torch.Generator().manual_seed(1)
    x, y = (torch.randn(STEPS, BATCH, size, generator=numbers, dtype=torch.float64) for size in (5, 2))
    model = torch.nn.Linear(5, 2, dtype=torch.float64)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.25)
    return x, y, model, torch.optim.Adam(model.parameters(), lr=0.1)


def learn(x: torch.Tensor, y: torch.Tensor, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def main(folder: Path, victim: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("syncline")
    rank, world, attempt = dist.get_rank(), dist.get_world_size(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    x, y, model, optimizer = problem()
    newest, step = folder / "newest.pt", 0
    if newest.exists():
        state = torch.load(newest)
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    replica = DistributedDataParallel(model)
    while step < STEPS:
        learn(x[step, rank::world], y[step, rank::world], replica, optimizer)
        if rank == 0:
            with (folder / "steps").open("a") as file:
                print(attempt, step, file=file)
        if rank == victim and attempt == 0 and step == LOST:
            os.kill(os.getpid(), signal.SIGKILL)
        step += 1
        if rank == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / "next.pt")
            (folder / "next.pt").replace(newest)  # complete, or not there
    dist.destroy_process_group()


def resume(folder: Path, victim: str) -> None:
    """Train with Syncline, and save a checkpoint after each step."""
    torch.set_num_threads(1)
    syncline.init("ring", liveness=2.0)
    rank, attempt = syncline.rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    x, y, model, optimizer = problem()
    syncline.prepare(model, optimizer, weight="batch")
    sampler = syncline.sampler(STEPS * BATCH, global_batch=BATCH, shuffle=False)
    store = syncline.checkpoints(folder / "checkpoints")
    if (found := store.load()) is not None:
        state: Any = found[1]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        syncline.load_state_dict(state["syncline"])
        sampler.load_state_dict(state["sampler"])
    samples = x.reshape(-1, 5), y.reshape(-1, 2)
    while sampler.epoch < 1:
        for batch in sampler:
            step = sampler.epoch * STEPS + sampler.step
            learn(samples[0][batch], samples[1][batch], model, optimizer)
            if rank == 0:
                with (folder / "steps").open("a") as file:
                    print(attempt, step, file=file)
            if str(rank) == victim and attempt == 0 and step == LOST:
                os.kill(os.getpid(), signal.SIGKILL)
            sampler.commit()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            store.save(step + 1, state | {"syncline": syncline.state_dict(), "sampler": sampler.state_dict()})
            store.wait()
    if rank == 0:
        torch.save({"model": model.state_dict()}, folder / "newest.pt")


if __name__ == "__main__":
    if sys.argv[3:] == ["syncline"]:
        resume(Path(sys.argv[1]), sys.argv[2])
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]))
