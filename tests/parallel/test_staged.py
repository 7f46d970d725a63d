"""Models on a device between real processes: staged through the memory of each transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import staging_bodies
import torch
from rank_bodies import steps
from trained import check_trained_as_one

from pool import Pool

CASES = [["momentum", "float64"], ["adam", "float32"], ["adam", "float32"]]


def everyone(world: int, address: str, *case: Any) -> list[list[Any]]:
    return [[[index, world, address], *case] for index in range(world)]


@pytest.mark.parametrize(
    ("strategy", "nodes", "workers"),
    [
        ("direct transport=shm", [0, 0, 0], 3),
        pytest.param("ring schedule=wait_free", [0, 0, 1], 3, marks=pytest.mark.slow),
        ("ps(servers=2, on=workers) transport=tcp", [0, 0], 2),
    ],
)
def test_staged_processes_train_as_one(pool: Pool, address: str, strategy: str, nodes: list[int], workers: int) -> None:
    with pool.start(staging_bodies.train, everyone(len(nodes), address, nodes, strategy, CASES)) as group:
        results = group.results()[:workers]
    check_trained_as_one(results, CASES)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch is built without CUDA")
@pytest.mark.parametrize("strategy", ["ring transport=shm", "ring transport=tcp", "direct(on=device) transport=shm"])
def test_processes_that_share_a_gpu_train_as_one(pool: Pool, address: str, strategy: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    case = everyone(2, address, strategy, 4)
    with pool.start(staging_bodies.train_on_gpu, case) as group:
        one, two = group.results()
    wanted = steps("adam", "float64", 4)
    assert wanted is not None
    for mine, theirs, tensor in zip(one, two, wanted.values(), strict=True):
        assert mine.tobytes() == theirs.tobytes()
        assert np.linalg.norm(mine - tensor) <= 1e-7 * np.linalg.norm(tensor)
