"""What the contracts of transports share: they run for every kind, and ranks under mpirun end with a file's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ends import KINDS, worlds


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def _end_of_worlds() -> Iterator[None]:
    yield
    while worlds:
        worlds.popitem()[1].close()
