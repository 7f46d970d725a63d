"""What an observer is told of a run, on every transport: exactly what its plan says, and every begin has its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import pytest
from ends import KINDS, MPI_KINDS, network

from recorded import Recorder
from syncline import registry
from syncline.engine.exchange import Exchange, Run
from syncline.engine.trace import Span
from syncline.nouns import Group
from syncline.plans.messages import chunk_edges, compile_program
from syncline.plans.plan import Plan

HERE = [kind for kind in KINDS if kind not in MPI_KINDS]
WORLD, SIZE, SEGMENT = 3, 1000, 400
"""Ranks, elements of eight bytes, and elements of a segment."""


def plan_of(name: str) -> Plan:
    plan: Plan = registry.get("algorithms", name).target(Group(WORLD))
    return plan


def observe(kind: str, plan: Plan) -> list[Recorder]:
    """Run a plan on all ranks; what each of them has told."""
    recorders = [Recorder(ticks()) for _ in range(WORLD)]
    with network(kind, WORLD) as net:
        exchanges = [
            Exchange(end, SEGMENT * 8, observer=recorder) for end, recorder in zip(net.ends, recorders, strict=True)
        ]
        runs = [Run(compile_program(plan, rank), np.ones(SIZE), 5, "bucket 5", 2.0) for rank in range(WORLD)]
        for exchange, run in zip(exchanges, runs, strict=True):
            exchange.start(run)
        for _ in range(100_000):
            if all(run.done for run in runs):
                break
            for exchange in exchanges:
                exchange.progress(0.0)
        assert all((run.array == WORLD).all() for run in runs)
    return recorders


def ticks() -> Callable[[], float]:
    """A clock that counts how often it is looked at."""
    looks = count()
    return lambda: float(next(looks))


def transfers(plan: Plan) -> Counter[tuple[int, int, int, int]]:
    """The transfers of all segments: segment, source, destination and bytes."""
    found: Counter[tuple[int, int, int, int]] = Counter()
    for number, first in enumerate(range(0, SIZE, SEGMENT)):
        edges = chunk_edges(min(SEGMENT, SIZE - first), plan.chunks)
        for src, dst, chunk, chunks in zip(plan.src, plan.dst, plan.chunk, plan.count, strict=True):
            found[number, int(src), int(dst), 8 * (edges[chunk + chunks] - edges[chunk])] += 1
    return found


def told(recorders: Sequence[Recorder], kind: str) -> Counter[tuple[int, int, int, int]]:
    """What all ranks said that they sent, or received."""
    return Counter(
        (span.segment, *((rank, span.peer) if kind == "send" else (span.peer, rank)), span.nbytes)
        for rank, recorder in enumerate(recorders)
        for span in recorder.spans("send", "receive")
        if span.kind == kind
    )


def check_nested(recorder: Recorder) -> None:
    """Every begin has its end, and lies within what it says it lies within."""
    begun: dict[Span, float] = {}
    ended: dict[Span, float] = {}
    for event in recorder.events:
        times = ended if event.ends else begun
        assert event.span not in times
        times[event.span] = event.at_s
    assert set(begun) == set(ended)
    for span, at_s in begun.items():
        assert at_s < ended[span]
        if span.within is not None:
            assert begun[span.within] < at_s
            assert ended[span] < ended[span.within]


@pytest.mark.parametrize("name", ["ring", "direct", "recursive_doubling"])
@pytest.mark.parametrize("kind", HERE)
def test_what_is_told_are_the_transfers_of_the_plan(kind: str, name: str) -> None:
    plan = plan_of(name)
    recorders = observe(kind, plan)
    sent, received = told(recorders, "send"), told(recorders, "receive")
    if kind == "shm":  # one of the two reads or writes the other's memory
        assert sent + received == transfers(plan)
    else:
        assert sent == received == transfers(plan)


@pytest.mark.parametrize("kind", HERE)
def test_every_begin_has_its_end_and_lies_within_another(kind: str) -> None:
    for recorder in observe(kind, plan_of("ring")):
        check_nested(recorder)
        (run,) = recorder.spans("run")
        assert (run.label, run.key, run.phase, run.priority, run.nbytes) == ("bucket 5", 5, "allreduce", 2.0, 8 * SIZE)
        assert run.within is None
        assert {span.priority for span in recorder.spans("run", "send", "receive", "reduce", "copy")} == {2.0}
        outer = {"shm": {"advance"}}.get(kind, {"segment"})
        assert {span.within.kind for span in recorder.spans("send", "receive") if span.within is not None} == outer


@pytest.mark.parametrize("kind", ["inproc", "shm", "torch"])
def test_what_has_come_is_added_or_copied_as_the_plan_says(kind: str) -> None:
    plan = plan_of("ring")
    for rank, recorder in enumerate(observe(kind, plan)):
        came = plan.dst == rank
        segments = -(-SIZE // SEGMENT)
        assert len(recorder.spans("reduce")) == segments * np.sum(came & (plan.op == 0))
        assert all(span.nbytes > 0 for span in recorder.spans("reduce"))
