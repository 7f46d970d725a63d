"""What begins and ends with a test of process groups: the groups of all ranks, each rank a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def groups(group: Any) -> Callable[..., list[Any]]:
    """Run a body on every rank's process group."""
    from process_groups import WORLD, of

    def run(body: Callable[[Any], Any], strategy: str = "direct", world: int = WORLD) -> list[Any]:
        return group(strategy, world, lambda session: body(of(session)))

    return run
