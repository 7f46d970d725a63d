"""What tests of the progress thread share: two engines in this process, connected over inproc."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from syncline import registry
from syncline.engine.engine import Engine
from syncline.errors import ClosedError
from syncline.nouns import Group
from syncline.plans.messages import Program, compile_program
from syncline.transports.inproc import Hub

LIMIT_S = 30.0
_RING = registry.get("algorithms", "ring").target(Group(2))


def ring(rank: int) -> Program:
    return compile_program(_RING, rank)


@contextlib.contextmanager
def engines(**options: Any) -> Iterator[list[Engine]]:
    """Two connected engines, closed at the end; options are the first one's."""
    hub = Hub(2)
    made = [Engine(hub.transport(0), **options), Engine(hub.transport(1))]
    try:
        yield made
    finally:
        for engine in made:
            if engine.error is None:
                engine.fail(ClosedError("the test is over"))
            engine.close()
            assert not engine._thread.is_alive()
