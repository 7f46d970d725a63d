"""Algorithms make plans from groups: one file per idea, pure arithmetic on ranks.

An algorithm is a function registered with the goal of its plan (``allreduce``, ``reduce_scatter``, ``all_gather`` or
``broadcast``). It takes a Group, and keyword-only options that a strategy text may give. ``plans.check`` proves its
plans in the tests, for many groups; the simulator tells how fast they are on a network. Algorithms know no bytes, no
transports and no clocks.

In the costs: n bytes, N workers, a s per message, b s per byte, g s per byte reduced, one full-duplex port per rank, lg
= ceil(log2 N).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

from ..nouns import Group
from ..plans.plan import COPY, REDUCE, Plan


@dataclass(frozen=True)
class Roles:
    """The roles of an architecture in which some processes, the owners, each own a part of the sums.

    An algorithm declares them with ``roles=``, a function of its arguments. ``owners`` is the number of owners:
    dedicated processes after the workers if ``apart``, else workers (``spread``). Owners that hold the weights also
    apply the update; others only sum, and every worker updates by itself. ``halves`` makes the plans of push and pull
    for a group; ``beside`` is the algorithm for values that the workers reduce among themselves. ``local`` says that
    the workers of a host make one push out of theirs. With ``replicas`` a second process, the follower, also gets the
    sums of each owner and makes the same updates.
    """

    owners: int
    apart: bool
    holds_weights: bool
    halves: Callable[[Group], tuple[Plan, Plan]]
    beside: str = "ring"
    local: bool = False
    replicas: int = 0

    @property
    def servers(self) -> int:
        """The number of dedicated server processes."""
        return self.owners if self.apart else 0

    def places(self, group: Group) -> tuple[int, ...]:
        """The processes that own a part, in part order."""
        if self.apart:
            return tuple(range(group.workers, group.workers + self.owners))
        return spread(group, self.owners)

    def followers(self, group: Group) -> tuple[int, ...]:
        """The processes that follow the owners, in part order; empty without replicas, and if there is no second one.

        Server processes follow each other, and workers follow workers. Followers of different owners differ. They stand
        on other hosts than their owners where one turn of the owners allows that.
        """
        if not self.replicas or (self.owners if self.apart else group.workers) == 1:
            return ()
        seats = places = self.places(group)
        if self.apart:
            return (*places[1:], places[0])
        if len(places) == 1:
            seats = (*places, *(worker for worker in range(group.workers) if worker != places[0]))
        turns = [tuple(seats[(part + k) % len(seats)] for part in range(len(places))) for k in range(1, len(seats))]
        node = {worker: number for number, ranks in enumerate(group.members_by_node()) for worker in ranks}
        apart = (turn for turn in turns if all(node[a] != node[b] for a, b in zip(places, turn, strict=True)))
        return next(apart, turns[0])

    def halves_of(self, group: Group, worker: int) -> tuple[Plan, Plan]:
        """The plans of push and pull for one worker alone. The part that it owns itself does not travel to the owner.

        Messages start with the owner after the worker's own number, so that not all workers address the same owner
        first. Owners send a push on to their followers.
        """
        places = self.places(group)
        parts = [(worker + k) % self.owners for k in range(self.owners)]
        others = [part for part in parts if places[part] != worker]
        pushes = [(0, worker, places[part], part, 1, REDUCE) for part in others]
        followed = [(part, follower) for part, follower in enumerate(self.followers(group)) if follower != worker]
        pushes += [(1, places[part], follower, part, 1, COPY) for part, follower in followed]
        pulls = [(0, places[part], worker, part, 1, COPY) for part in others]
        what = f"rank {worker}'s"
        return (
            Plan.of(f"{what} push", group, self.owners, pushes, goal="reduce_scatter", members=[worker], owners=places),
            Plan.of(f"{what} pull", group, self.owners, pulls, goal="all_gather", members=[worker], owners=places),
        )


def spread(group: Group, owners: int) -> tuple[int, ...]:
    """Choose ``owners`` workers that own a part each, in rank order, spread over the nodes, whose links they load.

    If there are fewer workers than ``owners``, the result is 0 to ``owners`` - 1.
    """
    turns = zip_longest(*group.members_by_node())
    order = [worker for turn in turns for worker in turn if worker is not None]
    return tuple(sorted(order[:owners] if owners <= len(order) else range(owners)))
