"""Keeps the ranks of a machine from sharing one core while another core runs none of them.

A waiting rank yields its core and is woken on the core of the rank that it waited for. A kernel that sees two threads
take turns on one core finds nothing to balance, so both ranks may stay there for seconds, at half their speed or less.
Each rank therefore publishes on its board (``kernels.board``) the core on which it waits. A rank that has repeatedly
waited for a rank on its own core moves to a core that no rank has published. Nothing is pinned: afterwards the thread
may run on all cores that it could use before.

On a busy machine the ranks stay together. There a yielded core goes to the other rank, whereas on another core it would
go to an unrelated process for milliseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

OFTEN = 8
"""The number of successive waits for a rank on the same core before a move."""
_PAUSE_S, _STAY_S = 0.005, 0.02
"""The time without checks after a move, and after a decision to stay."""
_NODES = Path("/sys/devices/system/node")
_LOAD = Path("/proc/loadavg")


class Cores:
    """Moves the thread that drives the engine.

    ``shown`` returns the cores on which this machine's ranks waited last, this rank's first, counted from 1.
    """

    def __init__(self, shown: Callable[[], Sequence[int]]) -> None:
        self._shown = shown
        self._next_s = 0.0

    def part(self) -> bool:
        """Move to a nearby core that no rank has published. Returns whether the thread has moved."""
        now = time.monotonic()
        if now < self._next_s:
            return False
        self._next_s = now + _STAY_S
        shown, allowed = self._shown(), os.sched_getaffinity(0)
        if len(shown) > len(allowed) or running() > (os.cpu_count() or 1):
            return False
        if not (free := allowed.intersection(near(shown[0] - 1)).difference(core - 1 for core in shown)):
            return False
        try:
            # Setting the affinity moves the thread at once; restoring it leaves the thread where it is.
            os.sched_setaffinity(0, free)
            os.sched_setaffinity(0, allowed)
        except OSError:  # a core that went offline, or a sandbox that refuses: stay
            return False
        self._next_s = now + _PAUSE_S
        return True


def running() -> int:
    """The number of threads of the machine that run or wait for a core; 0 if the kernel does not tell."""
    try:
        return int(_LOAD.read_text().split()[3].partition("/")[0])
    except (OSError, IndexError, ValueError):
        return 0


def near(core: int) -> set[int]:
    """The cores on the same memory node as this one; all cores if the kernel does not tell."""
    for node in _NODES.glob("node[0-9]*"):
        if core in (these := _listed((node / "cpulist").read_text())):
            return these
    return set(range(os.cpu_count() or 1))


def _listed(text: str) -> set[int]:
    """The numbers in a kernel list such as ``0-3,8``."""
    found = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return found
