"""Exchanges message by message: plans carried out by their programs on ports and links that messages share.

What ``exchanges`` says of an operation in a few numbers is simulated here as it happens: a rank sends when what it
sends is there, adds what has come, and goes on, each at its own time. It costs an event and more per message, and is
what the quick model is held to.

Theory. Of the messages that want a port, or a link inside the network, the more urgent go first, those of an operation
that began before, and those of an earlier step; what is equally urgent shares it max-min fairly. A message needs its
port for a + n b seconds, and is there a flight later. What a rank adds it adds one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache, partial
from itertools import count

from syncline.costs.virtual import Call, Clock, Resource
from syncline.engine.step import BucketPhase, Submit
from syncline.plans.messages import Program, compile_program
from syncline.plans.plan import Plan

from .cluster import Cluster
from .links import Link
from .loads import Placement
from .sharing import max_min_rates
from .topology import route

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

    def __init__(self, clock: Clock, cluster: Cluster, placement: Placement) -> None:
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
        come = partial(self._clock_at, link, done)
        self._pass()
        self._flows.append(_Flow(link.busy_s(nbytes), urgency, links, come))
        self._change()

    def _clock_at(self, link: Link, done: Call) -> None:
        self._clock.at(self._clock.now_s + link.flight_s, done)

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
            self._clock.at(self._clock.now_s + max(0.0, min(moving)), partial(self._end, self._turn))

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


@lru_cache(maxsize=512)
def _program(plan: Plan, rank: int) -> Program:
    return compile_program(plan, rank)


class PlanRuns:
    """Sets operations going that carry out a plan over a bucket, as ``costs.virtual.Begin`` has it.

    ``plan_of`` gives the plan of an operation, ``nbytes_of`` the bytes of its bucket. ``cores`` are where ranks add.
    """

    def __init__(
        self,
        clock: Clock,
        cluster: Cluster,
        placement: Placement,
        plan_of: Callable[[BucketPhase], Plan],
        nbytes_of: Callable[[BucketPhase], float],
    ) -> None:
        self._clock, self._gamma_s = clock, cluster.gamma_s_per_byte
        self.fabric = Fabric(clock, cluster, placement)
        self.cores = [Resource(clock) for _ in range(placement.group.processes)]
        self._plan_of, self._nbytes_of = plan_of, nbytes_of

    def __call__(self, submit: Submit, serial: int, ended: Call) -> None:
        """Begin on all ranks."""
        operation = submit.operation
        plan, nbytes = self._plan_of(operation), self._nbytes_of(operation)
        _PlanRun(self, plan, nbytes, submit.priority, serial, ended).begin()

    def add(self, rank: int, nbytes: float, priority: float, serial: int, done: Call) -> None:
        """Have a rank add so many bytes."""
        self.cores[rank].use(nbytes * self._gamma_s, done, priority=priority, serial=serial)


class _PlanRun:
    """One plan under way: what each rank's actions still wait for, and what has come too early."""

    def __init__(self, runs: PlanRuns, plan: Plan, nbytes: float, priority: float, serial: int, ended: Call) -> None:
        self._runs, self._priority, self._serial, self._ended = runs, priority, serial, ended
        self._chunk = nbytes / plan.chunks
        self._programs = [_program(plan, rank) for rank in range(plan.world)]
        self._waits = [list(program.waits) for program in self._programs]
        self._receives = {
            (action.peer, rank, action.index): i
            for rank, program in enumerate(self._programs)
            for i, action in enumerate(program.actions)
            if action.kind != "send"
        }
        self._came: set[tuple[int, int]] = set()
        self._left = sum(len(program.actions) for program in self._programs)

    def begin(self) -> None:
        """Start what waits for nothing."""
        if not self._left:
            self._ended()
            return
        ready = [(rank, i) for rank, waits in enumerate(self._waits) for i, left in enumerate(waits) if not left]
        for rank, i in ready:
            self._ready(rank, i)

    def _ready(self, rank: int, i: int) -> None:
        """What an action waited for has been done."""
        action = self._programs[rank].actions[i]
        if action.kind == "send":
            nbytes = (action.hi - action.lo) * self._chunk
            receive = action.peer, self._receives[rank, action.peer, action.index]
            sent = partial(self._sent, (rank, i), receive)
            urgency = self._priority, self._serial, action.step
            self._runs.fabric.send(rank, action.peer, nbytes, urgency, sent)
        elif (rank, i) in self._came:
            self._take(rank, i)

    def _sent(self, send: tuple[int, int], receive: tuple[int, int]) -> None:
        self._done(deque([send]))
        rank, i = receive
        self._came.add(receive)
        if not self._waits[rank][i]:
            self._take(rank, i)

    def _take(self, rank: int, i: int) -> None:
        """Apply what has come."""
        action = self._programs[rank].actions[i]
        done = partial(self._done, deque([(rank, i)]))
        if action.kind == "reduce":
            nbytes = (action.hi - action.lo) * self._chunk
            self._runs.add(rank, nbytes, self._priority, self._serial, done)
        else:
            done()

    def _done(self, over: deque[tuple[int, int]]) -> None:
        rank, i = over.popleft()
        self._left -= 1
        ready = []
        for j in self._programs[rank].unlocks[i]:
            self._waits[rank][j] -= 1
            if not self._waits[rank][j]:
                ready.append(j)
        for j in ready:
            self._ready(rank, j)
        if not self._left:
            self._left = -1
            self._ended()
