"""Mixing of weights: matrices that keep the mean and bring what each worker has to all, and faults that are named."""

from __future__ import annotations

import numpy as np
import pytest

from syncline.errors import PlanError, StrategyError, UsageError
from syncline.plans.check import check, check_mixing, mixing_matrix
from syncline.plans.plan import COPY, REDUCE, Plan
from syncline.strategy.strategy import Strategy
from syncline.sync import mixes_of
from syncline.sync.gossip import Gossip, Graph

GRAPHS: list[Graph] = ["ring", "exponential"]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("workers", [*range(1, 66)])
def test_every_world_has_matrices_that_are_doubly_stochastic_and_connected(graph: Graph, workers: int) -> None:
    plans = mixes_of(Gossip(graph), workers)
    check_mixing(plans)
    together = np.eye(workers)
    for plan in plans:
        matrix = mixing_matrix(plan)
        assert np.allclose(matrix.sum(axis=0), 1)
        assert np.allclose(matrix.sum(axis=1), 1)
        assert (matrix.diagonal() > 0).all()
        degree = min(2 if graph == "ring" else 1, workers - 1)
        assert ((matrix > 0).sum(axis=1) == 1 + degree).all()
        together = matrix @ together
    ways = np.linalg.matrix_power(together, 4 * workers * workers)
    assert np.allclose(ways, 1 / workers, atol=1e-3)


@pytest.mark.parametrize("workers", [2, 4, 8, 64])
def test_a_period_of_the_exponential_graph_makes_a_power_of_two_equal(workers: int) -> None:
    together = np.eye(workers)
    for plan in mixes_of(Gossip("exponential"), workers):
        together = mixing_matrix(plan) @ together
    assert np.array_equal(together, np.full((workers, workers), 1 / workers))


def test_distances_come_in_turn_after_every_period_of_steps() -> None:
    names = [Gossip("exponential", 2).mix(8, step).name[-1] for step in range(1, 16, 2)]
    assert names == ["1", "2", "4", "1", "2", "4", "1", "2"]
    assert Gossip("ring", 3).averages(2)
    assert not Gossip("ring", 3).averages(3)


def mix(rows: list[tuple[int, ...]], sums: list[list[int]]) -> Plan:
    return Plan.of("mine", len(sums), 1, rows, goal="mix", sums=sums)


PAIR = [(0, 0, 1, 0, 1, REDUCE), (0, 1, 0, 0, 1, REDUCE)]


@pytest.mark.parametrize(
    ("rows", "sums", "says"),
    [
        (PAIR, [[0], [0, 1]], "rank 0 does not hold the result of chunk 0: the contribution of rank 1 not wanted"),
        (PAIR[:1], [[0, 1], [0, 1]], "rank 0 does not hold the result .* of rank 1 missing"),
        ([*PAIR, PAIR[0]], [[0, 1], [0, 1]], "the contribution of rank 0 added twice to chunk 0 of rank 1"),
        ([(0, 0, 1, 0, 1, COPY), PAIR[1]], [[0, 1], [0, 1]], "destroys"),
    ],
)
def test_a_plan_that_is_no_mix_is_found(rows: list[tuple[int, ...]], sums: list[list[int]], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        check(mix(rows, sums))


@pytest.mark.parametrize(
    ("sums", "says"),
    [
        ([[0, 1]], "mix takes 2 sums, one per member or none, not 1"),
        ([[1], [0, 1]], "the sum of rank 0 must contain its own contribution, and each rank once"),
        ([[0, 0], [1]], "the sum of rank 0 must contain its own contribution, and each rank once"),
        ([[0, 2], [1]], "ranks are 0 to 1"),
    ],
)
def test_sums_that_make_no_sense_are_refused(sums: list[list[int]], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan.of("mine", 2, 1, PAIR, goal="mix", sums=sums)
    with pytest.raises(PlanError, match="allreduce takes 0 sums"):
        Plan.of("mine", 2, 1, PAIR, sums=[[0, 1], [0, 1]])


def test_mixes_that_lose_the_mean_or_leave_workers_apart_are_found() -> None:
    with pytest.raises(PlanError, match=r"changes the mean: the weights of rank 0's array sum to 1\.5"):
        check_mixing([mix([PAIR[0]], [[0], [0, 1]])])
    with pytest.raises(PlanError, match="the array of rank 0 never reaches rank 2, however often"):
        check_mixing([mix(PAIR, [[0, 1], [0, 1], [2]])])


def test_between_other_numbers_a_mix_is_the_same() -> None:
    plan = Gossip("ring").mix(4, 0).among([7, 3, 5, 0])
    check(plan)
    assert np.array_equal(mixing_matrix(plan), mixing_matrix(Gossip("ring").mix(4, 0)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ring sync=gossip(steps=0)", "steps=0 of gossip: workers exchange weights after 1 step or more"),
        ("ring sync=gossip(graph=star)", "graph of gossip must be ring or exponential, got 'star'"),
        (
            "ring sync=gossip codec=int8",
            "of some workers uncompressed.* nearest that works is 'ring sync=gossip'",
        ),
        ("ring sync=gossip codec=auto", "nearest that works is 'ring sync=gossip'"),
        ("ps(servers=1, update=worker) sync=gossip", "in which servers take no part; .* is 'sync=gossip'"),
        ("ps(servers=1) sync=gossip", "owners hold the weights"),
        ("native transport=torch(backend=nccl) sync=gossip", "with tags, which NCCL does not support"),
    ],
)
def test_what_does_not_go_with_gossip_is_refused(text: str, says: str) -> None:
    with pytest.raises((StrategyError, UsageError), match=says):
        Strategy.parse(text)
