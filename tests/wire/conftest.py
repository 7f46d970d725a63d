"""What begins and ends with a test of connections: watchers of a group, and meetings that are served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from served import Serve, Served
from watching import Table


@pytest.fixture
def table() -> Iterator[Table]:
    found = Table()
    yield found
    for seat in found.seats:
        seat.watcher.close()
    for sock in found.raw:
        sock.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    served: list[Served] = []

    def start(world: int, **options: Any) -> Served:
        served.append(Served(world, **options))
        return served[-1]

    yield start
    for one in served:
        one.close()
