"""Collectives that a message library runs by itself, one file each: architectures without a plan.

What such a library sends is its own affair: there is nothing to check, draw or cut into segments. The exchange hands
the whole array over to the transport. A library runs its collectives in the order of the calls, which has to be the
same on all ranks: nothing can overtake there (``priority=False``), and schedules with urgent buckets are refused.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """What to hand over: ``goal`` is ``"allreduce"``, the sum over all ranks, in place."""

    goal: str
