"""What ranks of the pool do that have different numbers of batches, with a GradScaler and clipping."""

from __future__ import annotations

from multiprocessing.connection import Connection

import numpy as np
import torch
from rank_bodies import BATCH, Place, batch, build, joined

import syncline

COUNTS = (2, 5, 4)
OVERFLOW = (1, 3)
"""The rank and step of a gradient that is not finite."""


def train(line: Connection, place: Place, strategy: str) -> None:
    """The weights, the norms that clipping gave, and the scaler's last scale; None on a server."""
    with joined(place, strategy):
        model = build(torch.float64)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        try:
            syncline.prepare(model, optimizer)
        except SystemExit:
            line.send(None)
            return
        scaler, norms = torch.amp.GradScaler("cpu", init_scale=2.0**10), []
        with syncline.join():
            for step in range(COUNTS[syncline.rank()]):
                x, y = batch(step, torch.float64)
                mine = slice(BATCH * syncline.rank() // 3, BATCH * (syncline.rank() + 1) // 3)
                factor = float("inf") if (syncline.rank(), step) == OVERFLOW else 1.0
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x[mine]), y[mine])
                scaler.scale(loss * factor).backward()
                norms.append(float(syncline.clip_grad_norm_(model, 0.2, scaler=scaler)))
                scaler.step(optimizer)
                scaler.update()
        weights = {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}
        line.send((weights, np.array(norms), scaler.get_scale()))
