"""Priority of runs on every transport: what is urgent overtakes a large array between its segments.

Shown by the order in which things are done, not by clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest
from ends import KINDS, MESSAGE_KINDS, MPI_KINDS, network

from recorded import Recorder
from syncline import registry
from syncline.engine.exchange import Exchange, Run
from syncline.nouns import Group
from syncline.plans.messages import compile_program

LIMIT = 20_000
"""Turns."""

OWN = [kind for kind in KINDS if kind not in ("torch", *MESSAGE_KINDS, *MPI_KINDS)]
SEGMENTS, ELEMENTS = 16, 50_000
"""Of the large run, and of eight bytes in a segment; the urgent one has a single segment."""


def race(kind: str, priorities: Sequence[float]) -> list[list[int]]:
    """Start a large run on two ranks, and then a small one; whose segments have ended on each rank, in order."""
    plan = registry.get("algorithms", "ring").target(Group(2))
    ticks = count()
    recorders = [Recorder(lambda: float(next(ticks))) for _ in range(2)]
    with network(kind, 2) as net:
        exchanges = [
            Exchange(end, ELEMENTS * 8, SEGMENTS, observer=recorder)
            for end, recorder in zip(net.ends, recorders, strict=True)
        ]
        runs = [
            Run(compile_program(plan, rank), np.full(segments * ELEMENTS, rank + 1.0), key, f"{key}", priorities[key])
            for key, segments in enumerate((SEGMENTS, 1))
            for rank in range(2)
        ]
        for run in runs:
            exchanges[run.program.rank].start(run)
        for _ in range(LIMIT):
            if all(run.done for run in runs):
                break
            for exchange in exchanges:
                exchange.progress(0.0005)
        assert all(run.done and (run.array == 3.0).all() for run in runs)
    return [
        [int(event.span.label) for event in recorder.events if event.ends and event.span.kind == "segment"]
        for recorder in recorders
    ]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "shm"])  # in mapped memory: engine/test_urgency
def test_an_urgent_run_overtakes_a_large_one_that_is_under_way(kind: str) -> None:
    """Its segment, which stands behind all those of the large one where priorities are equal."""
    for ended in race(kind, (5.0, 2.0)):
        assert sorted(ended) == [0] * SEGMENTS + [1]
        if kind in OWN:  # what a library moves fast enough has nothing to overtake
            assert ended.index(1) <= SEGMENTS // 2


@pytest.mark.parametrize("kind", ["inproc", "auto-near", "tcp"])
@pytest.mark.parametrize("priority", [0.0, 5.0, -2.0])
def test_equal_priorities_keep_the_order_of_handing_over(kind: str, priority: float) -> None:
    for ended in race(kind, (priority, priority)):
        assert ended == [0] * SEGMENTS + [1]
