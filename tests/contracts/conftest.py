"""What the contracts of transports share: ranks under mpirun end with a file's tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from ends import worlds


@pytest.fixture(scope="module", autouse=True)
def _end_of_worlds() -> Iterator[None]:
    yield
    while worlds:
        worlds.popitem()[1].close()


@pytest.fixture(scope="module")
def no_old_garbage() -> None:
    """Searches for garbage are of what a file's tests leave, not of all that was imported and run before."""
    gc.collect()
    gc.freeze()
