"""Training in ranks whose models live on a device, for which the CPU stands in."""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection

import host_bodies
import rank_bodies as bodies
import torch

from host_copier import HostCopier
from syncline.engine.engine import Engine
from syncline.frameworks.torch import replica
from syncline.frameworks.torch.staging import staging_for
from syncline.training.memory import Staging


def train(line: Connection, place: bodies.Place, nodes: list[int], strategy: str, cases: list[list[str]]) -> None:
    """As ``rank_bodies.train``, staged, and with every process on its node."""

    def stage(device: torch.device, engine: Engine, fail: object, copier: object) -> Staging:
        assert copier is None
        return partial(staging_for, copier=HostCopier())(device, engine, fail)  # type: ignore[arg-type]

    host_bodies.pretend(nodes[place[0]])
    replica.staging_for = stage
    bodies.train(line, place, strategy, cases)


def train_on_gpu(line: Connection, place: bodies.Place, strategy: str, count: int) -> None:
    """Steps on a GPU that the ranks share; the weights."""
    import syncline

    with bodies.joined(place, strategy):
        model = bodies.build(torch.float64).cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        syncline.prepare(model, optimizer)
        for step in range(count):
            x, y = bodies.batch(step, torch.float64)
            mine = slice(bodies.BATCH * place[0] // place[1], bodies.BATCH * (place[0] + 1) // place[1])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[mine].cuda()), y[mine].cuda()).backward()
            optimizer.step()
        total = syncline.allreduce(torch.full((5,), float(place[0] + 1), device="cuda"), op="sum")
        assert (total == sum(range(1, place[1] + 1))).all()
        line.send([tensor.cpu().numpy() for tensor in model.state_dict().values()])
