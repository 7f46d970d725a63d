"""What tests of one-sided runs share: the ends of a group over real shared memory, all in this process."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline import registry
from syncline.engine.exchange import Exchange, Run
from syncline.nouns import Group
from syncline.plans.messages import compile_program
from syncline.plans.plan import Plan
from syncline.transports.shm import Shm

Array = NDArray[Any]


def make(world: int) -> list[Shm]:
    """The ends of a group, all in this process."""
    socks: list[dict[int, socket.socket]] = [{} for _ in range(world)]
    for low in range(world):
        for high in range(low + 1, world):
            socks[low][high], socks[high][low] = socket.socketpair()
    return [Shm(rank, mine) for rank, mine in enumerate(socks)]


@contextlib.contextmanager
def machine(world: int) -> Iterator[list[Shm]]:
    ends = make(world)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def plan_of(name: str, world: int) -> Plan:
    plan: Plan = registry.get("algorithms", name).target(Group(world))
    return plan


def placed(end: Shm, array: Array, shared: bool) -> Array:
    """A copy of an array, in the transport's memory or in the process's own."""
    if not shared:
        return array.copy()
    memory = end.allocate(array.nbytes).view(array.dtype)
    memory[...] = array
    return memory


def turn(exchanges: Sequence[Exchange], runs: Sequence[Run], choose: Callable[[int], int]) -> None:
    """Drive all until the runs are done; ``choose`` says who comes next."""
    idle = 0
    while not all(run.done for run in runs):
        moved = exchanges[choose(len(exchanges))].progress(0.0)
        moved = moved or sum(exchange.progress(0.0) for exchange in exchanges) if idle > 20 else moved
        idle = 0 if moved else idle + 1
        assert idle < 500, "nothing moves any more"


def anyone(seed: int = 0) -> Callable[[int], int]:
    """Chooses at random."""
    draw = np.random.default_rng(seed)
    return lambda count: int(draw.integers(count))


def run_of(plan: Plan, rank: int, array: Array, key: int = 0, **options: Any) -> Run:
    return Run(compile_program(plan, rank), array, key, f"bucket {key}", **options)
