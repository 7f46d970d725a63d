"""Real processes with different numbers of batches, a GradScaler and clipping: one result under every architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from uneven_bodies import COUNTS, OVERFLOW, train

from pool import Pool

CASES = [
    ("ps(servers=1)", 1, "tcp"),
    pytest.param("ps(servers=2, on=workers)", 0, "shm", marks=pytest.mark.slow),
    ("ps(servers=2, update=worker)", 2, "shm"),
]


def trained(pool: Pool, address: str, strategy: str, servers: int, transport: str) -> list[Any]:
    places = [[[index, 3 + servers, address], f"{strategy} transport={transport}"] for index in range(3 + servers)]
    with pool.start(train, places) as group:
        found: list[Any] = group.results()[:3]
    return found


@pytest.fixture(scope="module")
def by_a_ring(pool: Pool, addresses: Callable[[], str]) -> list[Any]:
    return trained(pool, addresses(), "ring", 0, "tcp")


@pytest.mark.parametrize(("strategy", "servers", "transport"), CASES)
def test_owners_give_what_a_ring_gives(
    pool: Pool, address: str, by_a_ring: list[Any], strategy: str, servers: int, transport: str
) -> None:
    found = trained(pool, address, strategy, servers, transport)
    for rank, ((weights, norms, scale), (wanted, wanted_norms, wanted_scale)) in enumerate(
        zip(found, by_a_ring, strict=True)
    ):
        assert len(norms) == COUNTS[rank]
        assert scale == wanted_scale == 2.0 ** (10 if COUNTS[rank] <= OVERFLOW[1] else 9)
        np.testing.assert_allclose(norms[np.isfinite(norms)], wanted_norms[np.isfinite(wanted_norms)], rtol=1e-9)
        for name, tensor in wanted.items():
            np.testing.assert_allclose(weights[name], tensor, rtol=1e-9, atol=1e-12)
            assert weights[name].tobytes() == found[0][0][name].tobytes()
