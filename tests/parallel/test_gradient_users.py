"""Scripts that keep gradients find in them, bit for bit, what DistributedDataParallel leaves there."""

from __future__ import annotations

from collections.abc import Callable

import gradient_users
import pytest

from pool import Pool


@pytest.fixture(scope="module")
def wanted(pool: Pool, addresses: Callable[[], str]) -> list[dict[str, list[int]]]:
    address = addresses()
    with pool.start(gradient_users.ddp, [[[index, 2, address]] for index in range(2)]) as group:
        results: list[dict[str, list[int]]] = group.results()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring schedule=fixed(bucket=1KiB)", "ring"])
def test_what_is_kept_of_gradients_is_as_with_ddp(
    pool: Pool, address: str, wanted: list[dict[str, list[int]]], strategy: str
) -> None:
    """Two ranks, whose halves have one sum in whatever order."""
    case = f"{strategy} transport=shm"
    with pool.start(gradient_users.prepared, [[[index, 2, address], case] for index in range(2)]) as group:
        found = group.results()
    for mine, theirs in zip(found, wanted, strict=True):
        different = [name for name, bits in theirs.items() if mine[name] != bits]
        assert not different, "\n".join(different)
