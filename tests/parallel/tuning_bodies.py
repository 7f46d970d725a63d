"""What ranks do whose algorithms are chosen by measuring."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import rank_bodies as bodies
import torch
from host_bodies import pretend

import syncline
from syncline import api, registry
from syncline.nouns import Group
from syncline.plans.plan import COPY, REDUCE, Plan
from syncline.tuning import algorithm_choice


def starts(line: Connection, place: bodies.Place, nodes: list[int], strategy: str, budget_s: float) -> None:
    """What was chosen, whether it was measured, and whether sums of all sizes are right."""
    pretend(nodes[place[0]])
    measured: list[str] = []
    real = algorithm_choice.Measuring.times

    def times(self: algorithm_choice.Measuring) -> dict[str, list[float]]:
        measured.append("measured")
        self._budget_s = budget_s
        return real(self)

    algorithm_choice.Measuring.times = times  # type: ignore[method-assign]
    with bodies.joined(place, strategy):
        right = []
        for elements in (1, 1000, 100_000, 1_000_000):
            array = np.full(elements, place[0] + 1, np.float32)
            syncline.allreduce(array, op="sum")
            right.append(bool((array == sum(range(1, place[1] + 1))).all()))
        stats = syncline.stats()
        line.send([measured, stats.strategy, sorted(stats.algorithms.items()), all(right), stats.blocked_s])


def dies(line: Connection, place: bodies.Place, victim: int) -> None:
    """One process is gone in the middle of the measuring."""
    real = algorithm_choice.Measuring._run

    def run(self: algorithm_choice.Measuring, *arguments: Any) -> list[float]:
        if place[0] == victim and arguments[1] >= 1 << 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *arguments)

    algorithm_choice.Measuring._run = run  # type: ignore[method-assign]
    line.send("starting")
    with bodies.joined(place, "auto"):
        pass


def resumes(line: Connection, place: bodies.Place, recorded: list[Any]) -> None:
    """Train with a state whose table is ``recorded``; the plans of the buckets and the table of the next state."""
    with bodies.joined(place, "auto"):
        model = bodies.build(torch.float32)
        optimizer = bodies.OPTIMIZERS["sgd"](model.parameters())
        syncline.prepare(model, optimizer)
        state = {**syncline.state_dict(), "algorithms": recorded}
        syncline.load_state_dict(state)
        x, y = bodies.batch(0, torch.float32)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        chosen = api.session().bucket_plan(4096).name
        line.send([chosen, syncline.state_dict()["algorithms"], float(next(model.parameters()).sum())])


def foreign(line: Connection, place: bodies.Place, how: str) -> None:
    """What was chosen where one more algorithm is installed, which rank 1 lacks, has another of, or which is wrong."""

    def theirs(group: Group) -> Plan:
        last = group.workers - 1
        up = [(rank, rank, rank + 1, 0, 1, REDUCE) for rank in range(last)]
        down = [(last + step, last - step, last - step - 1, 0, 1, COPY) for step in range(last)]
        if how == "another" and place[0] == 1:
            up = [(0, rank, last, 0, 1, REDUCE) for rank in range(last)]
        return Plan.of("theirs", group, 1, up + (down[:-1] if how == "wrong" else down))

    if how != "lacks" or place[0] != 1:
        registry.register("algorithms", "theirs", goal="allreduce")(theirs)
    with bodies.joined(place, "transport=tcp"):
        line.send(sorted(syncline.stats().algorithms.items()))
