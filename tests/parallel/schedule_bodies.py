"""What ranks of the pool do under ``schedule=auto``."""

from __future__ import annotations

import math
from multiprocessing.connection import Connection

import torch
from rank_bodies import BATCH, Place, batch, build, joined

import syncline
from syncline.tuning import algorithm_choice


def chooses(line: Connection, place: Place, strategy: str, count: int, looks_at: int) -> None:
    """What the statistics say after every step, the reason, and the weights; rank 1 looks at gradients in one step.

    Schedules are tried however slow a busy machine makes the algorithms that add in one order.
    """
    algorithm_choice.SLOWER = algorithm_choice.HOPELESS = math.inf
    with joined(place, strategy):
        model = build(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        try:
            syncline.prepare(model, optimizer)
        except SystemExit:  # a server's part ends in prepare
            line.send(None)
            raise
        rank, world, said = syncline.rank(), syncline.world_size(), []
        for step in range(count):
            x, y = batch(step, torch.float64)
            mine = slice(BATCH * rank // world, BATCH * (rank + 1) // world)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            if step == looks_at and rank == 1:
                assert all(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()
            said.append(syncline.stats().strategy)
        weights = {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}
        line.send([said, syncline.stats().reason, weights])
