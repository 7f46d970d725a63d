"""Who gets how much of links that several flows use at once: max-min fair rates.

Owns the rates; does not know when flows begin, or what they carry.

Theory. Rates are max-min fair when none can grow without that of a flow that has no more shrinking. They are found by
filling: all rates grow alike until a link is full, the flows through it keep what they have, and the others go on
(Bertsekas, Gallager, "Data Networks", 1992, 6.5.2). TCP's flows over one link come close to it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

_FULL = 1e-12
"""What is left of a link that is full, relative to its capacity, but for rounding."""


def max_min_rates(flows: Sequence[Sequence[Hashable]], capacity: Mapping[Hashable, float]) -> list[float]:
    """The rate of each flow, which goes through links of so much ``capacity``; infinite for one that uses none.

    Cost: flows times links, at most, for each time that a link gets full.
    """
    rates = [0.0] * len(flows)
    left = {link: capacity[link] for links in flows for link in links}
    using = {link: [flow for flow, links in enumerate(flows) if link in links] for link in left}
    growing = {flow for flow, links in enumerate(flows) if links}
    rates = [0.0 if flow in growing else float("inf") for flow in range(len(flows))]
    while growing:
        counts = {link: sum(flow in growing for flow in users) for link, users in using.items()}
        step = min(left[link] / count for link, count in counts.items() if count)
        for flow in growing:
            rates[flow] += step
        full = []
        for link, count in counts.items():
            left[link] -= step * count
            if count and left[link] <= _FULL * capacity[link]:
                full.append(link)
        growing -= {flow for link in full for flow in using[link]}
    return rates


def shared_s(alone_s: Sequence[float]) -> list[float]:
    """When exchanges that begin together on one link are done, each of which alone takes so long and all of the link.

    They share it fairly: every one that is under way gets as much as every other.
    """
    order = sorted(range(len(alone_s)), key=alone_s.__getitem__)
    ends, now, served = [0.0] * len(alone_s), 0.0, 0.0
    for done, which in enumerate(order):
        now += (alone_s[which] - served) * (len(order) - done)
        served = alone_s[which]
        ends[which] = now
    return ends
