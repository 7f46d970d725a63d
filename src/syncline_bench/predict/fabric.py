"""Messages on ports and links that they share, one by one, on a virtual clock.

Of the messages that want a port, or a link inside the network, the more urgent go first, those of an operation that
began before, and those of an earlier step; what is equally urgent shares it max-min fairly. A message needs its port
for a + n b seconds, and is there a flight later.

Rates are max-min fair when none can grow without that of a flow that has no more shrinking. They are found by filling:
all rates grow alike until a link is full, the flows through it keep what they have, and the others go on (Bertsekas,
Gallager, "Data Networks", 1992, 6.5.2). TCP's flows over one link come close to it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count

from syncline.costs.clock import Call, Clock
from syncline.costs.cluster import Cluster, route
from syncline.costs.plans import ProcessPlacement

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
        for link, growers in counts.items():
            left[link] -= step * growers
            if growers and left[link] <= _FULL * capacity[link]:
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


Urgency = tuple[float, int, int]
"""Of a message: its operation's priority, which operation it is, and the step of the plan; the least goes first."""

_LEFT_S = 1e-12
"""What is left of a message that has been sent, but for rounding."""


class _Flow:
    """A message under way: port seconds that are left, at which rate they pass, and what it uses."""

    __slots__ = ("done", "left_s", "links", "rate", "urgency")

    def __init__(self, left_s: float, urgency: Urgency, links: tuple[Hashable, ...], done: Call) -> None:
        self.left_s, self.urgency, self.links, self.done, self.rate = left_s, urgency, links, done, 0.0


class Fabric:
    """The ports of hosts and the links between them; ``sent_s`` are the port seconds of each host's messages."""

    def __init__(self, clock: Clock, cluster: Cluster, placement: ProcessPlacement) -> None:
        self._clock, self._cluster, self._placement = clock, cluster, placement
        self._flows: list[_Flow] = []
        self._since_s = 0.0
        self._turn = 0
        self._stale = False
        self._capacity: dict[Hashable, float] = {}
        self._serial = count()
        self._narrow: dict[int, float] = {}
        self.sent_s = [0.0] * placement.count

    def narrow(self, hosts: Iterable[int], times: float) -> None:
        """Let the ports of some hosts carry so many times less: what else they have to carry is as much as that."""
        self._narrow.update(dict.fromkeys(hosts, times))

    def send(self, src: int, dst: int, nbytes: float, urgency: Urgency, done: Call) -> None:
        """Begin to send; ``done`` is called when it has come."""
        hosts = self._placement.hosts
        near = self._cluster.inside is not None and hosts[src] == hosts[dst]
        link = self._cluster.inside if near else self._cluster.between
        assert link is not None
        links = self._inside(src, dst) if near else self._between(int(hosts[src]), int(hosts[dst]))
        if not near:
            self.sent_s[int(hosts[src])] += link.busy_s(nbytes)
        come = partial(self._clock.after, link.flight_s, done)
        self._pass()
        self._flows.append(_Flow(link.busy_s(nbytes), urgency, links, come))
        self._change()

    def _inside(self, src: int, dst: int) -> tuple[Hashable, ...]:
        links: tuple[Hashable, ...] = (("from", src), ("to", dst))
        for link in links:
            self._capacity[link] = 1.0
        return links

    def _between(self, src: int, dst: int) -> tuple[Hashable, ...]:
        own = ("message", next(self._serial))  # one message is never faster than one port
        links: tuple[Hashable, ...] = (("out", src), ("in", dst), own)
        self._capacity[own] = 1.0
        for host, link in zip((src, dst), links, strict=False):
            self._capacity[link] = self._cluster.ports_per_host / self._narrow.get(host, 1.0)
        topology = self._cluster.topology
        for number in route(topology, src, dst, self._placement.count):
            self._capacity["link", number] = topology.capacity(number)
            links += (("link", number),)
        return links

    def _pass(self) -> None:
        """Send up to now."""
        passed_s = self._clock.now_s - self._since_s
        self._since_s = self._clock.now_s
        for flow in self._flows:
            flow.left_s -= passed_s * flow.rate

    def _change(self) -> None:
        """Share anew, once for all that happens at the same time."""
        if not self._stale:
            self._stale = True
            self._clock.at(self._clock.now_s, self._share)

    def _share(self) -> None:
        self._stale = False
        self._turn += 1
        left = dict(self._capacity)
        for urgency in sorted({flow.urgency for flow in self._flows}):
            flows = [flow for flow in self._flows if flow.urgency == urgency]
            rates = max_min_rates([flow.links for flow in flows], left)
            for flow, rate in zip(flows, rates, strict=True):
                flow.rate = rate
                for link in flow.links:
                    left[link] = max(0.0, left[link] - rate)
        moving = [flow.left_s / flow.rate for flow in self._flows if flow.rate > 0]
        if moving:
            self._clock.after(max(0.0, min(moving)), partial(self._end, self._turn))

    def _end(self, turn: int) -> None:
        """The next message, or several, have been sent."""
        if turn != self._turn:
            return
        self._pass()
        over = [flow for flow in self._flows if flow.left_s <= _LEFT_S]
        self._flows = [flow for flow in self._flows if flow.left_s > _LEFT_S]
        for flow in over:
            for link in flow.links:
                if link[0] == "message":  # type: ignore[index]
                    del self._capacity[link]
        self._change()
        for flow in over:
            flow.done()
