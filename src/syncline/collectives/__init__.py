"""Collectives that a message library runs itself, one file each: architectures without a plan.

The library decides what it sends, so there is no plan to check, draw or cut into segments. The exchange passes the
whole array to the transport. A library runs its collectives in the order of the calls, which must be the same on all
ranks. No collective can overtake another (``priority=False``), so schedules with urgent buckets are refused.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """A library's collective. ``goal`` is ``"allreduce"``: the sum over all ranks, in place."""

    goal: str
