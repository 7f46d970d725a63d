"""Keeps the ranks of a machine from waiting for each other on one core while another core has none of them.

A rank that waits offers its core to others, and is woken where the one that it waited for runs: so a kernel that sees
threads by turns at one core finds nothing to balance, and two ranks may stay there for seconds, at half their speed or
less. Each rank shows on its board (``kernels.board``) where it waits. One that has often found the rank it waits for on
its own core goes to one that no rank has shown. Nothing is bound: the thread may run where it might before.

On a busy machine ranks stay together: there a core that is offered goes to the other rank, elsewhere to whoever else
computes, for milliseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

OFTEN = 8
"""How many waits in succession have to have been for a rank on the same core."""
_PAUSE_S, _STAY_S = 0.005, 0.02
"""How long nothing is looked at after a move, and where staying was right."""
_NODES = Path("/sys/devices/system/node")
_LOAD = Path("/proc/loadavg")


class Cores:
    """Moves the thread that drives.

    ``shown`` gives the cores on which the ranks of this machine were seen, the own one first, counted from 1.
    """

    def __init__(self, shown: Callable[[], Sequence[int]]) -> None:
        self._shown = shown
        self._next_s = 0.0

    def part(self) -> bool:
        """Go to a core near this one that no rank has shown, where there is one; whether that was done."""
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
            os.sched_setaffinity(0, free)
            os.sched_setaffinity(0, allowed)
        except OSError:  # a core that went offline, or a sandbox that refuses: stay
            return False
        self._next_s = now + _PAUSE_S
        return True


def running() -> int:
    """How many threads of the machine run, or wait for a core; 0 where the kernel does not tell."""
    try:
        return int(_LOAD.read_text().split()[3].partition("/")[0])
    except (OSError, IndexError, ValueError):
        return 0


def near(core: int) -> set[int]:
    """The cores with the same memory as this one; all that there are, where the kernel does not tell."""
    for node in _NODES.glob("node[0-9]*"):
        if core in (these := _listed((node / "cpulist").read_text())):
            return these
    return set(range(os.cpu_count() or 1))


def _listed(text: str) -> set[int]:
    """The numbers in a list like 0-3,8."""
    found = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return found
