"""What ranks do in ``test_periodic_ranks``: train by themselves, between two exchanges of weights."""

from __future__ import annotations

import copy
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from rank_bodies import Place, batch, build, joined

import syncline

STEPS = 5


def _steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x, y = batch(10 * step + syncline.rank(), torch.float32)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def _weights(model: torch.nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def resume(line: Connection, place: Place, strategy: str) -> None:
    """Some steps, a checkpoint, some more; the same from the checkpoint in another run; and what all end with."""
    with joined(place, strategy):
        model = build(torch.float32)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        syncline.prepare(model, optimizer)
        _steps(model, optimizer, range(STEPS))
        state, learnt = syncline.state_dict(), copy.deepcopy(optimizer.state_dict())
        _steps(model, optimizer, range(STEPS, 2 * STEPS))
        before = _weights(model)
        syncline.consolidate()
        found = [before, _weights(model)]
    with joined(place, strategy):
        model = build(torch.float32)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        syncline.prepare(model, optimizer)
        optimizer.load_state_dict(learnt)
        syncline.load_state_dict(state)
        _steps(model, optimizer, range(STEPS, 2 * STEPS))
        line.send([*found, _weights(model)])


def leave_early(line: Connection, place: Place, strategy: str) -> None:
    """One rank has fewer batches than the others."""
    del line
    with joined(place, strategy):
        model = build(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        syncline.prepare(model, optimizer)
        _steps(model, optimizer, range(2 if place[0] == 1 else 8))
