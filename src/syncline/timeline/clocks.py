"""Converts the clocks of all processes to rank 0's, from measured offsets.

Processes of one kernel share CLOCK_MONOTONIC, unless they are in different time namespaces (``identity``): they need no
measurement and have no error. Any other process asks rank 0 for its time and assigns the answer to the middle of the
round trip. The error is at most half the round trip, however it is divided between the two directions, so the exchange
with the shortest round trip is the most accurate. Clocks drift, so the offset is measured at the start and at the end.
It is interpolated linearly in between and constant outside. This module does not communicate.

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
    """Rank 0's clock was ``offset_s`` ahead of this process's when the latter showed ``at_s``, within the error."""

    at_s: float
    offset_s: float
    round_trip_s: float

    @classmethod
    def of(cls, asked_s: float, there_s: float, heard_s: float) -> Reading:
        """From a round trip that left and returned at times of this clock, while rank 0's showed ``there_s``."""
        middle_s = (asked_s + heard_s) / 2
        return cls(middle_s, there_s - middle_s, heard_s - asked_s)

    @property
    def error_s(self) -> float:
        """The bound of the error."""
        return self.round_trip_s / 2


def best(readings: Iterable[Reading]) -> Reading:
    """The reading with the shortest round trip."""
    return min(readings, key=lambda reading: reading.round_trip_s)


@dataclass(frozen=True)
class Offset:
    """How far rank 0's clock is ahead of a process's, from readings in order of time; none if they share a clock."""

    readings: tuple[Reading, ...] = ()

    @property
    def error_s(self) -> float:
        """The bound of the error at the readings, and between them if clocks drift evenly."""
        return max((reading.error_s for reading in self.readings), default=0.0)

    def there(self, at_s: float) -> float:
        """The time of rank 0's clock when this process's showed ``at_s``."""
        if not self.readings:
            return at_s
        first, last = self.readings[0], self.readings[-1]
        passed_s = last.at_s - first.at_s
        drift = (last.offset_s - first.offset_s) / passed_s if passed_s > 0 else 0.0
        # extrapolation would amplify the errors of two close readings
        between_s = min(max(at_s, first.at_s), last.at_s)
        return at_s + first.offset_s + drift * (between_s - first.at_s)


def offset_of(notes: Mapping[str, Any]) -> Offset:
    """The offset that a process has recorded. Raises ValueError for notes that no process of this version writes."""
    found = notes.get("clock", [])
    if not isinstance(found, list) or len(found) > 2:
        raise ValueError("its clock is none")
    readings = [Reading(*(float(number) for number in one)) for one in found if isinstance(one, list) and len(one) == 3]
    if len(readings) < len(found) or not all(math.isfinite(sum(vars(reading).values())) for reading in readings):
        raise ValueError("its clock is none")
    return Offset(tuple(readings))


def identity() -> str:
    """A text that is equal for processes that share a clock."""
    found = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):  # a kernel without time namespaces
        found += f" {Path('/proc/self/ns/time').readlink()}"
    return found
