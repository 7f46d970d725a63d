"""Parameter server as a plan: push is a reduce to the servers, pull is a copy from them.

The plan does not know who applies the optimizer. With ``update=worker`` a training step runs it; with ``update=server``
the servers hold weights and run a protocol of their own, whose traffic has this shape.

Theory. Each of S servers holds one part of S. All workers push each part to its server and pull the result from it. A
server's port therefore carries N/S times the bytes of a worker's: the bottleneck with few servers, but with N or more
servers less traffic per worker than any allreduce. Li et al., "Scaling distributed machine learning with the parameter
server", OSDI 2014; Jiang et al., "A unified architecture for accelerating distributed DNN training in heterogeneous
GPU/CPU clusters" (BytePS), OSDI 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from ..errors import UsageError
from ..nouns import Group
from ..plans.plan import COPY, REDUCE, Plan
from ..registry import register
from . import Roles, spread


def _roles(servers: int, on: Literal["ranks", "workers"], update: Literal["server", "worker"]) -> Roles:
    halves = partial(push_and_pull, servers=servers, on=on)
    return Roles(servers, apart=on == "ranks", holds_weights=update == "server", halves=halves)


@register("algorithms", "ps", goal="allreduce", always_print=("servers",), roles=_roles)
def ps(
    group: Group,
    *,
    servers: int = 1,
    on: Literal["ranks", "workers"] = "ranks",
    update: Literal["server", "worker"] = "server",  # noqa: ARG001 - updates do not change which rank sends what
) -> Plan:
    """Parameter server: workers push gradients to servers of their own ranks, or to workers that serve, and pull back.

    Fewer serving workers than there are stand on different hosts, as far as these suffice.

    Cost: max(nb, Nnb/S) + latencies with push and pull overlapped, twice that when pull follows push; one server:
    2N(a + nb) (Li et al. 2014). Raises UsageError for fewer than one server, more serving workers than workers, and a
    group with other servers than those asked for.
    """
    pushes, pulls, _ = _transfers(group, servers, on)
    return Plan.of("ps", group, servers, pushes + pulls if group.workers > 1 else [])


def push_and_pull(group: Group, *, servers: int = 1, on: Literal["ranks", "workers"] = "ranks") -> tuple[Plan, Plan]:
    """The two halves of a server that holds the weights: gradients are reduced to it, weights are copied from it.

    With dedicated servers they have transfers even for one worker, unlike the whole plan.
    """
    pushes, pulls, places = _transfers(group, servers, on)
    return (
        Plan.of("ps push", group, servers, pushes, goal="reduce_scatter", owners=places),
        Plan.of("ps pull", group, servers, pulls, goal="all_gather", owners=places),
    )


_Rows = list[tuple[int, int, int, int, int, int]]


def _transfers(group: Group, servers: int, on: str) -> tuple[_Rows, _Rows, Sequence[int]]:
    """The rows of push and pull, and the server rank of each part."""
    workers = group.workers
    if servers < 1:
        raise UsageError(f"ps needs at least one server, got servers={servers}")
    own = servers if on == "ranks" else 0
    if group.servers != own:
        raise UsageError(
            f"ps(servers={servers}, on={on}) needs {own} server processes of their own, the group has {group.servers}"
        )
    if on == "workers" and servers > workers:
        raise UsageError(
            f"ps(on=workers) has {workers} workers to place {servers} servers on: ask for servers={workers}"
        )
    places = range(workers, workers + servers) if on == "ranks" else spread(group, servers)
    # Worker w starts with the server after its own number, and servers answer in the same order: no hot spot.
    turns = [(worker, (worker + k) % servers) for k in range(servers) for worker in range(workers)]
    pushes = [(0, worker, places[part], part, 1, REDUCE) for worker, part in turns if worker != places[part]]
    turns = [((part + k) % workers, part) for k in range(workers) for part in range(servers)]
    pulls = [(1, places[part], worker, part, 1, COPY) for worker, part in turns if worker != places[part]]
    return pushes, pulls, places
