"""What tests of exchanges share: cases of every algorithm, ranks that one thread drives, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from summing import Summing
from syncline import registry
from syncline.algorithms.hierarchical import hierarchical
from syncline.algorithms.ps import ps
from syncline.engine.exchange import Exchange, Run
from syncline.nouns import Group, numpy_dtype
from syncline.plans.check import phases
from syncline.plans.messages import chunk_edges, compile_program
from syncline.plans.plan import Plan
from syncline.transports import Handle, Transport
from syncline.transports._operations import Receive
from syncline.transports.inproc import Hub, InProc

ALGORITHMS = {entry.name: entry.target for entry in registry.entries("algorithms")}
DTYPES = ["float32", "float64", "int32", "int8", "float16", "bfloat16"]


class Copying(InProc):
    """Borrows are copies, as over a network: the sender goes on at once."""

    def lends_from(self, src: int) -> bool:  # noqa: ARG002
        return False

    def _deliver(self, receive: Receive, message: Any) -> None:
        handle = receive.handle
        if receive.into is None:
            super()._deliver(Receive(handle, np.empty(handle.nbytes, np.uint8)), message)
            handle.payload = message.data.copy()
        else:
            super()._deliver(receive, message)

    def release(self, handle: Handle) -> None:
        handle.payload = None


@dataclass(frozen=True)
class Case:
    """A plan, how its array is cut, and what is in it."""

    plan: Plan
    size: int
    dtype: str
    segment_bytes: int
    window: int
    copying: bool = False

    def inputs(self, seed: int = 0) -> list[NDArray[Any]]:
        """Small whole numbers, of which every type holds the sum exactly."""
        draw = np.random.default_rng(seed)
        return [draw.integers(-4, 5, self.size).astype(numpy_dtype(self.dtype)) for _ in range(self.plan.world)]


@st.composite
def cases(draw: Callable[..., Any], names: tuple[str, ...] = tuple(ALGORITHMS)) -> Case:
    name = draw(st.sampled_from(names))
    workers = draw(st.integers(1, 9))
    if name == "ps":
        servers, own = draw(st.integers(1, 3)), draw(st.booleans())
        servers = servers if own else min(servers, workers)
        group = Group(workers, servers if own else 0)
        plan = ps(group, servers=servers, on="ranks" if own else "workers")
    elif name == "broadcast":
        plan = ALGORITHMS[name](Group(workers), root=draw(st.integers(0, workers - 1)))
    else:
        plan = ALGORITHMS[name](Group(workers))
    return Case(
        plan,
        draw(st.integers(0, 200)),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([1, 7, 64, 256, 1 << 20])),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
    )


@st.composite
def native_cases(draw: Callable[..., Any]) -> Case:
    """Two levels, of which a message library carries out the inner one: the whole, or one of its halves."""
    nodes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
    plan = hierarchical(Group(len(nodes), nodes=tuple(nodes)), inside="native")
    plan = draw(st.sampled_from([plan, *phases(plan)]))
    numbers = draw(st.integers(0, 200)), draw(st.sampled_from(DTYPES)), draw(st.sampled_from([1, 7, 64, 1 << 20]))
    return Case(plan, *numbers, draw(st.integers(1, 3)), draw(st.booleans()))


def drive(
    case: Case, arrays: list[list[NDArray[Any]]], choose: Callable[[int], int], start_late: bool = False
) -> list[Exchange]:
    """Exchange ``arrays[rank]`` (several at once) from one thread; ``choose(n)`` says which of n ranks comes next."""
    hub = Hub(case.plan.world)
    exchanges = [Exchange(_end(case, hub, rank), case.segment_bytes, case.window) for rank in range(case.plan.world)]
    runs: list[list[Run]] = [
        [Run(compile_program(case.plan, rank), array, key, f"bucket {key}") for key, array in enumerate(mine)]
        for rank, mine in enumerate(arrays)
    ]
    waiting = list(range(case.plan.world))
    while waiting and start_late:
        rank = waiting.pop(choose(len(waiting)))
        for run in runs[rank]:
            exchanges[rank].start(run)
        exchanges[choose(case.plan.world)].progress(0.0)
    for rank in waiting:
        for run in runs[rank]:
            exchanges[rank].start(run)
    idle = 0
    while not all(run.done for mine in runs for run in mine):
        moved = exchanges[choose(case.plan.world)].progress(0.0)
        moved = moved or sum(exchange.progress(0.0) for exchange in exchanges) if idle > 50 else moved
        idle = 0 if moved else idle + 1
        assert idle < 500, "nothing moves any more"
    return exchanges


def _end(case: Case, hub: Hub, rank: int) -> Transport:
    """The end of a rank, with collectives in its group if the plan has some there."""
    if case.plan.native:
        return Summing(hub, rank, next((ranks for ranks in case.plan.native if rank in ranks), (rank,)))
    return Copying(hub, rank) if case.copying else hub.transport(rank)


def chooser(data: st.DataObject) -> Callable[[int], int]:
    """Hypothesis chooses a seed; thousands of single draws would be slow."""
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    return lambda count: int(draw.integers(count))


def wanted(case: Case, inputs: list[NDArray[Any]], rank: int) -> list[tuple[slice, NDArray[Any]]]:
    """What a rank must hold at the end: parts of the array and their values."""
    plan, total = case.plan, np.sum([inputs[member] for member in case.plan.members], axis=0, dtype=object)
    everything = slice(0, case.size)
    if plan.goal == "allreduce":
        return [(everything, total.astype(inputs[0].dtype))] if rank in plan.members else []
    if plan.goal == "broadcast":
        assert plan.root is not None
        return [(everything, inputs[plan.root])]
    edges = chunk_edges(case.size, plan.chunks)
    parts = [(owner, slice(edges[chunk], edges[chunk + 1])) for chunk, owner in enumerate(plan.owners)]
    if plan.goal == "reduce_scatter":
        return [(part, total[part].astype(inputs[0].dtype)) for owner, part in parts if owner == rank]
    return [(part, inputs[owner][part]) for owner, part in parts] if rank in plan.members else []


def check(case: Case, inputs: list[NDArray[Any]], outputs: list[NDArray[Any]]) -> None:
    for rank, output in enumerate(outputs):
        for part, values in wanted(case, inputs, rank):
            assert output[part].tobytes() == values.tobytes(), f"rank {rank}"
