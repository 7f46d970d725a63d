"""Simulates single messages on shared ports and links, on a virtual clock.

Messages that compete for a port, or for a link inside the network, go in the order of their urgency: by priority, then
the earlier operation, then the earlier step. Equally urgent messages share it max-min fairly. A message of n bytes
occupies its port for a + n b seconds and arrives one flight later.

Theory. Rates are max-min fair if no rate can grow unless the rate of a flow that has no more shrinks. Progressive
filling finds them: all rates grow equally until a link is full; the flows through it keep their rates, and the others
continue (Bertsekas, Gallager, "Data Networks", 1992, 6.5.2). TCP flows over one link come close to fair rates.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count

from syncline.costs.clock import Call, Clock
from syncline.costs.cluster import Cluster, route
from syncline.costs.plans import ProcessPlacement

_FULL = 1e-12
"""The remaining capacity below which a link counts as full, relative to its capacity (rounding errors)."""


def max_min_rates(flows: Sequence[Sequence[Hashable]], capacity: Mapping[Hashable, float]) -> list[float]:
    """The max-min fair rate of each flow, given as its links, whose capacities are ``capacity``.

    A flow without links has an infinite rate. Each link that fills costs at most flows times links.
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
    """The ends of exchanges that start together and share a link fairly; ``alone_s`` are their times alone."""
    order = sorted(range(len(alone_s)), key=alone_s.__getitem__)
    ends, now, served = [0.0] * len(alone_s), 0.0, 0.0
    for done, which in enumerate(order):
        now += (alone_s[which] - served) * (len(order) - done)
        served = alone_s[which]
        ends[which] = now
    return ends


Urgency = tuple[float, int, int]
"""The urgency of a message: its operation's priority, the operation's number, and the step. The least goes first."""

_LEFT_S = 1e-12
"""The remaining port seconds below which a message counts as sent (rounding errors)."""


class _Flow:
    """A message in flight: its remaining port seconds, its rate and its links."""

    __slots__ = ("done", "left_s", "links", "rate", "urgency")

    def __init__(self, left_s: float, urgency: Urgency, links: tuple[Hashable, ...], done: Call) -> None:
        self.left_s, self.urgency, self.links, self.done, self.rate = left_s, urgency, links, done, 0.0


class Fabric:
    """The hosts' ports and the links between them. ``sent_s`` are the port seconds of each host's sent messages."""

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
        """Divide the port capacity of these hosts by ``times``, because each message stands for several."""
        self._narrow.update(dict.fromkeys(hosts, times))

    def send(self, src: int, dst: int, nbytes: float, urgency: Urgency, done: Call) -> None:
        """Start to send a message. ``done`` is called when it has arrived."""
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
        """Advance all messages to the present time."""
        passed_s = self._clock.now_s - self._since_s
        self._since_s = self._clock.now_s
        for flow in self._flows:
            flow.left_s -= passed_s * flow.rate

    def _change(self) -> None:
        """Schedule a new division of the rates, once for all events of the same time."""
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
        """Remove the messages whose sending has ended."""
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
