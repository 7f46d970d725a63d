"""One clock for all processes: rank 0's, from which the others' are told by exchanges of readings.

Processes of one kernel share its CLOCK_MONOTONIC, unless they are in other time namespaces (``identity``): nothing is
measured there, and nothing can be wrong. Elsewhere a process asks rank 0 for its time and takes it for that in the
middle of the round trip. That is wrong by half the round trip at most, whichever way took how long of it, so that the
exchange with the shortest one says most. Clocks drift: it is measured at the start and at the end, and between the two
the offset is taken to have changed evenly, beyond them not at all. Nothing here sends or receives.

Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989; Mills, "Internet time synchronization:
the network time protocol", IEEE Transactions on Communications 39, 1991.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Reading:
    """Rank 0's clock was ``offset_s`` ahead of this process's when that showed ``at_s``, give or take the error."""

    at_s: float
    offset_s: float
    round_trip_s: float

    @classmethod
    def of(cls, asked_s: float, there_s: float, heard_s: float) -> Reading:
        """Asked and heard at times of this clock; rank 0's showed ``there_s`` in between."""
        middle_s = (asked_s + heard_s) / 2
        return cls(middle_s, there_s - middle_s, heard_s - asked_s)

    @property
    def error_s(self) -> float:
        """By how much the offset may be wrong."""
        return self.round_trip_s / 2


def best(readings: Iterable[Reading]) -> Reading:
    """The one with the shortest round trip."""
    return min(readings, key=lambda reading: reading.round_trip_s)


@dataclass(frozen=True)
class Offset:
    """How far rank 0's clock is ahead of a process's, from none, one or several readings in order of time."""

    readings: tuple[Reading, ...] = ()

    @property
    def error_s(self) -> float:
        """By how much it may be wrong at the readings, and between them where clocks drift evenly."""
        return max((reading.error_s for reading in self.readings), default=0.0)

    def there(self, at_s: float) -> float:
        """What rank 0's clock showed when this process's showed ``at_s``."""
        if not self.readings:
            return at_s
        first, last = self.readings[0], self.readings[-1]
        passed_s = last.at_s - first.at_s
        drift = (last.offset_s - first.offset_s) / passed_s if passed_s > 0 else 0.0
        between_s = min(max(at_s, first.at_s), last.at_s)  # beyond them errors of two close readings would grow
        return at_s + first.offset_s + drift * (between_s - first.at_s)


def offset_of(notes: Mapping[str, Any]) -> Offset:
    """That of a process, as it has noted it; raises ValueError for what no process of this version notes."""
    found = notes.get("clock", [])
    if not isinstance(found, list) or len(found) > 2:
        raise ValueError("its clock is none")
    readings = [Reading(*(float(number) for number in one)) for one in found if isinstance(one, list) and len(one) == 3]
    if len(readings) < len(found) or not all(math.isfinite(sum(vars(reading).values())) for reading in readings):
        raise ValueError("its clock is none")
    return Offset(tuple(readings))


def identity() -> str:
    """What is equal for processes that share a clock."""
    found = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):  # a kernel without time namespaces
        found += f" {Path('/proc/self/ns/time').readlink()}"
    return found
