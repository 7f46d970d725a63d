"""Algorithms: group -> plan, one file per idea, pure arithmetic on ranks.

An algorithm is a function registered with the goal of its plan (``allreduce``, ``reduce_scatter``, ``all_gather`` or
``broadcast``) that takes a Group, and keyword-only options that a strategy text may give. Whether its plan is right is
proved by ``plans.check`` for every group the tests can think of; how fast it is on which network is the simulator's
question. Nothing here knows about bytes, transports or clocks.

In the costs: n bytes, N workers, a s per message, b s per byte, g s per byte reduced, one full-duplex port per rank,
lg = ceil(log2 N).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

from ..nouns import Group
from ..plans.plan import COPY, REDUCE, Plan


@dataclass(frozen=True)
class Roles:
    """Who does what in an architecture in which some processes own the sums, one part each, and the workers ask them.

    An algorithm declares them with ``roles=``, a function of its arguments. ``owners`` is how many there are: processes
    of their own, after the workers, where ``apart``, else workers (``spread``). Where they hold the weights they apply
    the update too; otherwise they only sum, and every worker updates by itself. ``halves`` gives the plans of push and
    pull of a group, ``beside`` is the algorithm for what the workers reduce among themselves.
    """

    owners: int
    apart: bool
    holds_weights: bool
    halves: Callable[[Group], tuple[Plan, Plan]]
    beside: str = "ring"

    @property
    def servers(self) -> int:
        """How many processes there are beside the workers."""
        return self.owners if self.apart else 0

    def places(self, group: Group) -> tuple[int, ...]:
        """The processes that own a part, in the order of parts."""
        if self.apart:
            return tuple(range(group.workers, group.workers + self.owners))
        return spread(group, self.owners)

    def halves_of(self, group: Group, worker: int) -> tuple[Plan, Plan]:
        """The plans of push and pull of one worker by itself: what it owns, if anything, stays where it is.

        The k-th message goes to the k-th owner after the worker's own number, so that not all turn to the same one.
        """
        places = self.places(group)
        parts = [(worker + k) % self.owners for k in range(self.owners)]
        others = [part for part in parts if places[part] != worker]
        pushes = [(0, worker, places[part], part, 1, REDUCE) for part in others]
        pulls = [(0, places[part], worker, part, 1, COPY) for part in others]
        what = f"rank {worker}'s"
        return (
            Plan.of(f"{what} push", group, self.owners, pushes, goal="reduce_scatter", members=[worker], owners=places),
            Plan.of(f"{what} pull", group, self.owners, pulls, goal="all_gather", members=[worker], owners=places),
        )


def spread(group: Group, owners: int) -> tuple[int, ...]:
    """So many workers that own a part each, in rank order: the nodes take turns, since what one owns its link carries.

    Without as many workers the first ones that there would be.
    """
    turns = zip_longest(*group.members_by_node())
    order = [worker for turn in turns for worker in turn if worker is not None]
    return tuple(sorted(order[:owners] if owners <= len(order) else range(owners)))
