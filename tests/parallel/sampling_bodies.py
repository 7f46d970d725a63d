"""What ranks of the pool do with batches from one pool."""

from __future__ import annotations

from multiprocessing.connection import Connection

import numpy as np
from push_bodies import Descent
from rank_bodies import Place, joined

import syncline


def train_unevenly(line: Connection, place: Place, strategy: str, samples: int) -> None:
    """Two epochs of asynchronous steps, of which rank 1 makes one and then waits for the test; what each had."""
    with joined(place, strategy):
        weights, optimizer = syncline.prepare({"w": np.zeros(samples)}, Descent())
        sampler = syncline.sampler(samples, batch_size=2)
        found: list[int] = []
        for epoch in range(2):
            for batch in sampler:
                gradient = np.zeros(samples)
                gradient[batch] = -1.0
                optimizer.step({"w": gradient})
                found += [samples * epoch + index for index in batch]
                if place[0] == 1 and len(found) == 2:
                    line.send("has begun")
                    line.recv()
            if epoch == 0 and place[0] == 0:
                line.send("all is handed out")
        syncline.barrier()
        optimizer.step({"w": np.zeros(samples)})
        line.send((found, weights["w"].copy()))


def leave_early(line: Connection, place: Place, strategy: str, samples: int) -> None:
    """Rank 0, which keeps the pool, trains on one sample and leaves; what each has trained on."""
    with joined(place, strategy):
        _, optimizer = syncline.prepare({"w": np.zeros(samples)}, Descent())
        found: list[int] = []
        for (index,) in syncline.sampler(samples, batch_size=1):
            optimizer.step({"w": np.zeros(samples)})
            found.append(index)
            if place[0] == 0:
                break
        line.send(found)
