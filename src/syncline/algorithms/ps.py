"""Parameter server as a plan: push is a reduce to the servers, pull is a copy from them.

The plan does not know who applies the optimizer. With ``update=worker`` a training step runs it; with ``update=server``
the servers hold weights and run a protocol of their own, whose traffic has this shape.

Theory. Each of S servers holds one part of S. All workers push each part to its server and pull the result from it. A
server's port therefore carries N/S times the bytes of a worker's: the bottleneck with few servers, but with N or more
servers less traffic per worker than any allreduce. Li et al., "Scaling distributed machine learning with the parameter
server", OSDI 2014.

With ``local`` the workers of a host first add up their gradients among themselves. Each of them then pushes and pulls
its share for the whole host, so that an array crosses the host's port once in each direction, whatever the number of
workers behind it. The workers of a host push directly to one of them that serves. Jiang et al., "A unified
architecture for accelerating distributed DNN training in heterogeneous GPU/CPU clusters" (BytePS), OSDI 2020.

With ``replicas=1`` every server sends its sums on to a second one, the follower, which makes the same updates and so
has the same optimizer state, as in the chains of van Renesse and Schneider, "Chain replication", OSDI 2004.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import lcm
from typing import Literal

from ..errors import UsageError
from ..nouns import Group
from ..plans.plan import COPY, REDUCE, Plan
from ..registry import register
from . import Roles, spread

_MOST_CHUNKS = 1024
"""With more chunks the bookkeeping costs more than exactly equal shares gain."""


def _roles(
    servers: int,
    on: Literal["ranks", "workers"],
    update: Literal["server", "worker"],
    local: bool,
    replicas: Literal[0, 1],
) -> Roles:
    halves = partial(push_and_pull, servers=servers, on=on, local=local, replicas=replicas)
    holds = update == "server"
    return Roles(servers, apart=on == "ranks", holds_weights=holds, halves=halves, local=local, replicas=replicas)


@register("algorithms", "ps", goal="allreduce", always_print=("servers",), roles=_roles)
def ps(
    group: Group,
    *,
    servers: int = 1,
    on: Literal["ranks", "workers"] = "ranks",
    update: Literal["server", "worker"] = "server",  # noqa: ARG001 - updates do not change which rank sends what
    local: bool = False,
    replicas: Literal[0, 1] = 0,
) -> Plan:
    """Parameter server: workers push gradients to servers of their own ranks, or to workers that serve, and pull back.

    With ``local`` the workers of a host add up their gradients first, and the host pushes and pulls once. If not all
    workers serve, the serving workers are on different hosts as far as possible. With ``replicas=1`` a second
    server, or worker, follows each one that serves.

    Cost: max(nb, Nnb/S) + latencies with push and pull overlapped, twice that when pull follows push; one server: 2N(a
    + nb) (Li et al. 2014). With ``local``, N is the number of hosts on the network, and nb inside hosts is added.
    Raises UsageError for no server, more serving workers than workers, and a group of another number of servers.
    """
    chunks, pushes, pulls, _ = _transfers(group, servers, on, local, replicas)  # only a push has followers
    rows = pushes + pulls
    if on == "ranks" and (group.workers == 1 or (local and len(group.members_by_node()) == 1)):
        rows = [row for row in rows if max(row[1:3]) < group.workers]  # a single host knows its sum by itself
    return Plan.of("ps", group, chunks, rows)


def push_and_pull(
    group: Group,
    *,
    servers: int = 1,
    on: Literal["ranks", "workers"] = "ranks",
    local: bool = False,
    replicas: Literal[0, 1] = 0,
) -> tuple[Plan, Plan]:
    """The two halves of a server that holds the weights: gradients are reduced to it, weights are copied from it.

    With dedicated servers they have transfers even for one worker, unlike the whole plan. With ``replicas`` the first
    half ends with copies of the sums to the followers.
    """
    chunks, pushes, pulls, owners = _transfers(group, servers, on, local, replicas)
    followers = _roles(servers, on, "server", local, replicas).followers(group)
    shares = chunks // servers
    for part, follower in enumerate(followers):
        pushes.append((1 + int(local), owners[part * shares], follower, part * shares, shares, COPY))
    return (
        Plan.of("ps push", group, chunks, pushes, goal="reduce_scatter", owners=owners),
        Plan.of("ps pull", group, chunks, pulls, goal="all_gather", owners=owners),
    )


_Rows = list[tuple[int, ...]]
_Turns = Sequence[tuple[int, int]]
"""Workers and numbers of parts, in the order of the messages."""
_Legs = list[tuple[int, int, int, int]]
"""A worker, the rank at the other end, the first chunk, and the number of chunks."""


def _transfers(
    group: Group, servers: int, on: str, local: bool, replicas: int
) -> tuple[int, _Rows, _Rows, Sequence[int]]:
    """The number of chunks, the rows of push and pull, and the server rank of each chunk."""
    workers = group.workers
    if servers < 1:
        raise UsageError(f"ps needs at least one server, got servers={servers}")
    own = servers if on == "ranks" else 0
    if group.servers != own:
        raise UsageError(
            f"ps(servers={servers}, on={on}) needs {own} server processes of their own, but the group has"
            f" {group.servers}"
        )
    if on == "workers" and servers > workers:
        raise UsageError(f"ps(on=workers) cannot place {servers} servers on {workers} workers: use servers={workers}")
    places = range(workers, workers + servers) if on == "ranks" else spread(group, servers)
    hosts = group.members_by_node() if local else [(worker,) for worker in range(workers)]
    host_of = {worker: ranks for ranks in hosts for worker in ranks}
    shares = lcm(*map(len, hosts))
    if shares * servers > _MOST_CHUNKS:
        shares = max(map(len, hosts))

    ends = {ranks: [shares * end // len(ranks) for end in range(len(ranks) + 1)] for ranks in hosts}
    spans = {worker: span for ranks in hosts for worker, span in zip(ranks, pairwise(ends[ranks]), strict=True)}
    edges = sorted({edge for some in ends.values() for edge in some})

    def share(worker: int, part: int) -> tuple[int, int]:
        """The first chunk of a part that a worker exchanges with the part's server, and the number of chunks."""
        if places[part] in host_of[worker]:
            return part * shares, shares * (worker != places[part])
        low, high = spans[worker]
        return part * shares + low, high - low

    def outside(turns: _Turns) -> _Legs:
        """Between workers and servers, cut where the share of any host ends: a server already has contributions to all
        chunks of a message, or to none.
        """
        found = []
        for worker, part in turns:
            first, count = share(worker, part)
            low = first - part * shares
            within = edges[bisect_left(edges, low) : bisect_right(edges, low + count)]
            cuts = [part * shares + edge for edge in within]
            found += [(worker, places[part], low, high - low) for low, high in pairwise(cuts)]
        return found

    def inside(turns: _Turns) -> _Legs:
        """Between workers of a host without the part's server: one of them has the share, the other needs it."""
        found = []
        for worker, part in turns:
            if places[part] not in host_of[worker]:
                first, count = share(worker, part)
                found += [(worker, other, first, count) for other in host_of[worker] if other != worker and count]
        return found

    # Worker w starts with the server after its own number, and servers answer in the same order: no hot spot.
    turns = [(worker, (worker + k) % servers) for k in range(servers) for worker in range(workers)]
    if replicas and on == "ranks":  # every server adds in the order of the workers: the loss of one changes no sum
        turns.sort(key=lambda turn: turn[0])
    pushes = [(0, other, worker, *chunks, REDUCE) for worker, other, *chunks in inside(turns)]
    pushes += [(int(local), worker, place, *chunks, REDUCE) for worker, place, *chunks in outside(turns)]
    turns = [((part + k) % workers, part) for k in range(workers) for part in range(servers)]
    pulls = [(1 + int(local), place, worker, *chunks, COPY) for worker, place, *chunks in outside(turns)]
    pulls += [(3, worker, other, *chunks, COPY) for worker, other, *chunks in inside(turns)]
    return servers * shares, pushes, pulls, [place for place in places for _ in range(shares)]
