"""Where the processes of a comparison run: on this machine as it is, or each on a host of its own in a lab.

Owns making and removing the lab of a comparison and measuring its link before the first row; what a lab is made of is
``lab``'s matter, which is imported only where one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..nouns import Rate
from ..strategy.grammar import write_value


@dataclass(frozen=True)
class Site:
    """What rows have to know of the place: how to start there, and what its links can do.

    ``options`` are given to LocalRun; ``rate`` is bits/s and ``goodput_bytes_per_s`` what one stream got of it, both
    None where nothing limits the links; ``name`` is the rate as a result file shows it.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    rate: Rate | None = None
    goodput_bytes_per_s: float | None = None

    @property
    def name(self) -> str | None:
        """The rate as text, such as ``1Gbit``."""
        return None if self.rate is None else write_value(self.rate, Rate)


HERE = Site()
"""This machine as it is: shared memory and loopback, as fast as they are."""


@contextmanager
def site_of(hosts: int, rate: Rate | None, say: Callable[[str], None]) -> Iterator[Site]:
    """This machine, or for a ``rate`` a lab of so many hosts that lives as long as the context.

    ``say`` is told what takes its time. Raises UsageError where a lab cannot be made.
    """
    if rate is None:
        yield HERE
        return
    from ..lab import Lab

    with Lab(hosts=hosts, rate=rate) as lab:
        goodput = float(lab.goodput()) if hosts > 1 else None
        site = Site({"place": lab.placement}, rate, goodput)
        if goodput is not None:
            say(f"lab: {hosts} hosts, links of {site.name}, goodput {goodput * 8 / 1e6:,.0f} Mbit/s")
        yield site
