"""Elastic runs of workers that train alone between exchanges of weights: they end as one process computes it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import elastic_bodies as bodies
import numpy as np
import pytest
import torch
from test_elastic import LIMIT_S, lose, members_of_steps, replace, started

from pool import Pool
from syncline.global_batches import read_log, share
from syncline.strategy.strategy import Strategy
from syncline.sync import Agrees


def samples_of(strategy: str) -> int:
    """The samples of an epoch: gossip knows no weights, so all parts must be of one size."""
    return 4 * bodies.BATCH if "gossip" in strategy else bodies.SAMPLES


class Replica:
    """One worker's model in the process that computes all of them."""

    def __init__(self, samples: int) -> None:
        self.x, self.y, self.model, self.optimizer, self.scheduler = bodies.problem(samples)
        self.counted = 0.0

    def gradient(self, part: list[int]) -> list[torch.Tensor]:
        loss = torch.nn.functional.mse_loss(self.model(self.x[part]), self.y[part])
        self.counted += len(part)
        return list(torch.autograd.grad(loss, list(self.model.parameters())))

    def step(self, gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()
        self.scheduler.step()

    @property
    def weights(self) -> np.ndarray[Any, Any]:
        return np.concatenate([parameter.detach().numpy().reshape(-1) for parameter in self.model.parameters()])

    @weights.setter
    def weights(self, values: np.ndarray[Any, Any]) -> None:
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(torch.from_numpy(values.copy()), self.model.parameters())

    def take_over(self, other: Replica) -> None:
        self.weights = other.weights
        self.optimizer.load_state_dict(deepcopy(other.optimizer.state_dict()))
        self.scheduler.load_state_dict(other.scheduler.state_dict())


class Course:
    """The steps of a log, with a replica for every member."""

    def __init__(self, strategy: str) -> None:
        self.samples = samples_of(strategy)
        self.mode: Any = Strategy.parse(strategy).sync_mode()
        self.replicas: dict[int, Replica] = {}
        self.memory: np.ndarray[Any, Any] | None = None
        self.view = 0

    def begin(self, view: int, members: list[int]) -> None:
        """All go on from the agreed weights, with the optimizer of the first survivor; under gossip from their own."""
        old = sorted(self.replicas.keys() & set(members))
        alone = len(self.replicas) == 1
        for number in members:
            fresh = number not in self.replicas
            one = self.replicas.setdefault(number, Replica(self.samples))
            if old and (fresh or isinstance(self.mode, Agrees)):
                if isinstance(self.mode, Agrees) and self.mode.pull(2) < 1 and not alone:
                    self.replicas[old[0]].weights = self.agreed
                one.take_over(self.replicas[old[0]])
            one.counted = 0.0
        self.replicas = {number: self.replicas[number] for number in members}
        self.view = view
        self.agreed = self.replicas[members[0]].weights
        if self.memory is None or alone:
            self.memory = np.zeros_like(self.agreed)

    def step(self, number: int, samples: list[int]) -> None:
        each = list(self.replicas.values())
        parts = [share(np.array(samples), rank, len(each)).tolist() for rank in range(len(each))]
        gradients = [one.gradient(part) for one, part in zip(each, parts, strict=True)]
        if self.mode.due(number):
            sizes = np.array([len(part) for part in parts]) / sum(map(len, parts))
            mean = [sum(size * one[i] for size, one in zip(sizes, gradients, strict=True)) for i in range(2)]
            gradients = [mean] * len(each)
        for one, found in zip(each, gradients, strict=True):
            one.step(found)
        if self.mode.due(number):
            self.agreed = each[0].weights
            for one in each:
                one.counted = 0.0
        if self.mode.averages(number) and len(each) > 1:
            self.exchange(number, each)

    def exchange(self, number: int, each: list[Replica]) -> None:
        weights = [one.weights for one in each]
        if isinstance(self.mode, Agrees):
            pull, total = self.mode.pull(len(each)), sum(one.counted for one in each)
            moved = [mine - self.agreed for mine in weights]
            mean = np.sum([one.counted / total * by for one, by in zip(each, moved, strict=True)], axis=0)
            self.mode.agree(self.agreed, mean, self.memory if self.mode.remembers else None)
            for one, mine, by in zip(each, weights, moved, strict=True):
                one.weights = self.agreed if pull == 1 else mine - pull * by
        else:
            sums = self.mode.mix(len(each), number).sums
            for one, parts in zip(each, sums, strict=True):
                one.weights = np.mean([weights[part] for part in parts], axis=0)
        for one in each:
            one.counted = 0.0


def expected(log: Path, strategy: str) -> dict[int, np.ndarray[Any, Any]]:
    """The weights of each member at the end."""
    course = Course(strategy)
    for (epoch, step), line in sorted(read_log(str(log)).items()):
        if line["view"] != course.view:
            course.begin(line["view"], line["members"])
        course.step(epoch * bodies.STEPS + step, line["samples"])
    return {number: one.weights for number, one in course.replicas.items()}


@pytest.mark.parametrize(
    ("strategy", "happens", "goes_back"),
    [
        ("ring sync=local(steps=3)", {"1": ("before", 4)}, 3),
        pytest.param("sync=diloco(steps=3) transport=tcp", {"0": ("after", 8)}, 6, marks=pytest.mark.slow),
        ("sync=easgd(steps=2)", {"2": ("before", 5)}, 4),
        pytest.param("sync=gossip(steps=2) transport=tcp", {"0": ("before", 7)}, 6, marks=pytest.mark.slow),
        ("sync=post_local(after=4, steps=4)", {"1": ("before", 2), "2": ("before", 6)}, 4),
    ],
)
def test_survivors_go_back_to_the_last_exchange(
    pool: Pool, address: str, tmp_path: Path, strategy: str, happens: dict[str, Any], goes_back: int
) -> None:
    log = tmp_path / "samples.jsonl"
    plan = {"samples": str(log), "strategy": strategy, "even": samples_of(strategy), **happens}
    with started(pool, address, 3, **plan) as (group, relay):
        for rank in map(int, happens):
            lose(group, relay, rank)
        left = [rank for rank in range(3) if str(rank) not in happens]
        group.hear(1, among=left, timeout_s=LIMIT_S)
        weights = expected(log, strategy)
        for rank in left:
            np.testing.assert_allclose(group.ranks[rank].said[-1][0], weights[rank], rtol=1e-9, atol=1e-12)
        group.end(LIMIT_S, among=left)
    members = members_of_steps(log)
    assert len(members) == bodies.EPOCHS * bodies.STEPS
    assert members[goes_back:] == [left] * (len(members) - goes_back)
    assert len(members[goes_back - 1]) == len(left) + 1


@pytest.mark.parametrize("strategy", ["sync=diloco(steps=2)", "sync=gossip transport=tcp"])
def test_a_worker_joins_after_an_exchange(pool: Pool, address: str, tmp_path: Path, strategy: str) -> None:
    log = tmp_path / "samples.jsonl"
    plan: dict[str, Any] = {"samples": str(log), "most": 3, "strategy": strategy, "even": samples_of(strategy)}
    plan |= {"1": ("before", 3), "0": ("join", 5), "evaluates": "gossip" in strategy}
    with started(pool, address, 3, **plan) as (group, relay):
        lose(group, relay, 1)
        replace(group, relay, 0, address, 3, **plan)
        left = [0, 2, 3]
        group.hear(1, among=left, timeout_s=LIMIT_S)
        weights = expected(log, strategy)
        for rank in left:
            np.testing.assert_allclose(group.ranks[rank].said[-1][0], weights[rank], rtol=1e-9, atol=1e-12)
        group.end(LIMIT_S, among=left)
    members = members_of_steps(log)
    assert members[2:6] == [[0, 2]] * 4 if "diloco" in strategy else [[0, 2]] * 3
    assert members[-5:] == [left] * 5


def test_statistics_count_the_batch_of_a_broken_step_once(pool: Pool, address: str) -> None:
    with started(pool, address, 2, norm=True, **{"1": ("before", 5)}) as (group, relay):
        lose(group, relay, 1)
        group.hear(1, among=[0], timeout_s=LIMIT_S)
        group.end(LIMIT_S, among=[0])
        assert f"\n{bodies.EPOCHS * bodies.STEPS} batches" in f"\n{group.ranks[0].printed()}"
