"""Two levels or one? Seconds of a compressed allreduce on hosts that have several ranks and one link each.

Owns the model and nothing else, as ``compression`` does for ranks that have a link each: what travels is what the
reducers say of themselves, what computing costs is handed in.

Theory. M hosts of p ranks exchange n elements over links of R bit/s, one full-duplex port per host, which its ranks
share. On one level every rank encodes all of its gradients, and what it sends to ranks of other hosts goes through the
port of its host; what it sends to its own does not count. On two levels the ranks of a host first add up a part each,
and in the end copy the parts of the others: (p-1)/p additions and as many copies, which are counted as additions. In
between a rank has 1/p of what one of M workers would compute and send. By owners, with payloads of b bits in all:

    levels    through a host's port    encodes         decodes    additions of dense arrays
    one       2(M-1)/M p b             1 + 1/Mp        2          none
    two       2(M-1)/M b               (1 + 1/M) / p   2/p        2(p-1)/p

So two levels never send more, and where p encodings and decodings cost more than two additions they compute less too.
That is so for most codecs, whose encoding with error feedback costs about an addition: two levels are then faster on
any link. What is gathered goes to every rank of another host on one level, p^2 times as much as on two; what is summed
takes 2(M-1)/M b on one level too, by a plan that knows hosts.

Not modelled: what overlaps, and ranks that share cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..compression.reducers import Flows
from ..compression.reducers.levels import traffic
from .compression import ANY_LINK_BIT_PER_S, CodedAllreduce


@dataclass(frozen=True)
class OnHosts:
    """A compressed allreduce on ``hosts`` hosts with ``per_host`` ranks each."""

    coded: CodedAllreduce
    hosts: int
    per_host: int

    def port_bits(self, levels: int) -> float:
        """Bits that the busiest host's port carries in one direction, one step after the other."""
        way, ranks = self.coded.way, self.hosts * self.per_host
        if way.carrier is None:
            return 8 * self.coded.nbytes * 2 * (self.hosts - 1) / self.hosts
        part = self.coded.part
        nodes = np.arange(ranks) // self.per_host
        if levels == 2:
            found = traffic([part], [tuple(np.flatnonzero(nodes == host)) for host in range(self.hosts)])
        else:
            found = way.traffic([part], ranks, range(ranks))
        steps = [step for one in found for step in one if isinstance(step, Flows)]
        return 8.0 * sum(_between(step, nodes).busiest_bytes() for step in steps)

    def computing_s(self, levels: int) -> float:
        """Seconds of encoding, decoding, adding and copying on one rank."""
        if levels == 1:
            return self.coded.computing_s(self.hosts * self.per_host)
        dense_s = 2 * (self.per_host - 1) / self.per_host * self.coded.add_s
        return self.coded.computing_s(self.hosts) / self.per_host + dense_s

    def allreduce_s(self, levels: int, bit_per_s: float) -> float:
        """Seconds of the whole allreduce on one or two levels, over links of that speed between hosts."""
        return self.port_bits(levels) / bit_per_s + self.computing_s(levels)

    def two_levels_pay_below_bit_per_s(self) -> float | None:
        """The speed of links between hosts below which two levels are faster than one; None when they are nowhere.

        Never more than ``ANY_LINK_BIT_PER_S``.
        """
        saved_bits = self.port_bits(1) - self.port_bits(2)
        extra_s = self.computing_s(2) - self.computing_s(1)
        if saved_bits <= 0:
            return None if extra_s >= 0 else ANY_LINK_BIT_PER_S
        return ANY_LINK_BIT_PER_S if extra_s * ANY_LINK_BIT_PER_S <= saved_bits else saved_bits / extra_s


def _between(step: Flows, nodes: np.ndarray) -> Flows:
    """What of a step goes from host to host, with hosts in the place of ranks."""
    src, dst = nodes[step.src], nodes[step.dst]
    away = src != dst
    return Flows(src[away], dst[away], step.nbytes[away], step.most_bytes[away])
