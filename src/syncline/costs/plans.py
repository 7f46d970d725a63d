"""What a plan costs on a network, at two fidelities.

``plan_load`` is the quick answer: what a plan's messages put on whoever is busiest. A step begins when the one before
it has ended everywhere, which is what happens where all ranks have as much to do. Run-time choices and simulated
trainings, which ask for thousands of exchanges, of payloads too, take it. ``plan_time`` is the exact answer: the clocks
of all ranks and ports. Collectives alone are answered by it, since by loads double trees come out up to 1.7 times as
slow, and messages that meet on links inside the network up to a quarter faster or slower. Neither knows a schedule,
another exchange under way, or how arrays are cut into segments that flow one behind the other. Both are held to the
formulas of the literature.

**Loads.** An ``Outline`` is what is left of messages when places that have the same to do count as one, and steps that
are the same as well: a ring of 512 ranks has one place and one step, 1022 times. It holds for arrays of any size and
for all constants, so that it is made once and asked often; what it says is what all messages one by one would.

**Clocks.** A message of a step begins when what it carries is there, when the sender's port has sent what it sent
before, and when the receiver's port is free and its rank has added what came before; it occupies both ports for what
the link says, and arrives a flight later. What is reduced is then added, which keeps a rank from receiving more. These
are maxima and sums, so clocks of all ranks are propagated as arrays (Baccelli, Cohen, Olsder, Quadrat, "Synchronization
and Linearity", 1992): no step waits for ranks that it does not concern, so late starts spread only as far as messages
carry them. Where a port has several messages in a step they queue, at the sender's port and then at the receiver's,
whoever is ready first being first; the network between keeps what a port cannot take yet. A link inside the network
that would be busy in a step for longer than the ports of the messages on it makes these take as much longer (as max-min
fair sharing gives it for messages that are alike). Processors bound the whole: where cores are counted, it is no
shorter than what messages, bytes and adding cost them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compression.reducers import Flows
from ..nouns import Group
from ..plans.plan import Plan
from .cluster import Cluster, Constant, Floats, Ints, LinkCost, Switch, Topology

_SHORTEST_S = 1e-12
"""What no clock tells from nothing."""


@dataclass(frozen=True)
class LinearCost:
    """Seconds of an exchange by its bytes: A + B n."""

    base_s: float
    per_byte_s: float

    def __call__(self, nbytes: float) -> float:
        """The seconds of an exchange of that size."""
        return self.base_s + self.per_byte_s * nbytes

    def __add__(self, other: LinearCost) -> LinearCost:
        """The cost of one exchange behind another of the same size."""
        return LinearCost(self.base_s + other.base_s, self.per_byte_s + other.per_byte_s)


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> LinearCost | None:
    """The line that is nearest to measured times of sizes in bytes, by relative distance; None where none shows.

    Neither number is negative: where noise would make one so, the other alone says most.
    """
    x, y = np.array(sizes, float), np.array(seconds, float)
    x, y = x[y > _SHORTEST_S], y[y > _SHORTEST_S]
    if not len(y):
        return None
    rows = np.stack([1 / y, x / y], axis=1)
    base, slope = (float(number) for number in np.linalg.lstsq(rows, np.ones(len(y)), rcond=None)[0])
    if base >= 0 and slope >= 0:
        return LinearCost(base, slope)
    column = rows[:, 0] if slope < 0 else rows[:, 1]
    alone = float(column.sum() / (column @ column)) if column.any() else 0.0
    return LinearCost(alone, 0.0) if slope < 0 else LinearCost(0.0, alone)


def fit_ring(workers: int, small: tuple[int, float], large: tuple[int, float], reduced: tuple[int, float]) -> Cluster:
    """The cluster on which a ring's halves took these times, given as (bytes, seconds).

    ``small`` and ``large`` are all-gathers of different sizes, ``reduced`` a reduce-scatter. An all-gather takes
    (N-1) a + (N-1)/N n b; a reduce-scatter (N-1)/N n g more. Noise can make a difference negative: such a number is 0,
    and alpha, below which no time can be told apart, a nanosecond.
    """
    steps, share = workers - 1, (workers - 1) / workers
    beta = max(0.0, (large[1] - small[1]) / (share * (large[0] - small[0])))
    alpha = max(1e-9, (small[1] - share * small[0] * beta) / steps)
    gamma = max(0.0, (reduced[1] - steps * alpha - share * reduced[0] * beta) / (share * reduced[0]))
    constants = {"between.alpha": alpha, "between.beta": beta, "gamma": gamma}
    return Cluster("as measured", {name: Constant(value, measured=True) for name, value in constants.items()})


Column = NDArray[Any]


class Load(NamedTuple):
    """Seconds of the busiest port, inside the busiest host, of steps and of flights; and the rest of one rank.

    ``port_s`` are those of whichever port has the most to do in all steps together. Steps wait for each other, and
    where the busiest port of each step is another one they take ``turns_s`` longer: ports are then free for other
    exchanges, as those of a tree's leaves are while its root goes on. ``inside_s`` are those inside of one step after
    the other; where messages go between hosts and inside in one step it is what the latter take longer.
    ``added_bytes`` are what it adds, ``moved_bytes`` what it sends and receives in so many ``messages``; ``sent_bytes``
    are what a worker sends, in the mean over all.
    """

    port_s: float = 0.0
    inside_s: float = 0.0
    flight_s: float = 0.0
    added_bytes: float = 0.0
    moved_bytes: float = 0.0
    messages: float = 0.0
    sent_bytes: float = 0.0
    turns_s: float = 0.0

    def then(self, other: Load) -> Load:
        """One behind the other."""
        return Load(*(mine + its for mine, its in zip(self, other, strict=True)))


@dataclass(frozen=True)
class ProcessPlacement:
    """The processes of a run on hosts: workers ``per_host`` to a host, servers of their own on hosts of their own."""

    group: Group
    per_host: int = 1

    @cached_property
    def hosts(self) -> NDArray[np.int64]:
        """The host of every process."""
        workers = np.arange(self.group.workers) // self.per_host
        return np.concatenate([workers, workers[-1] + 1 + np.arange(self.group.servers)])

    @property
    def count(self) -> int:
        """How many hosts there are."""
        return int(self.hosts[-1]) + 1


class ClusterShape(NamedTuple):
    """What of a cluster outlines depend on."""

    topology: Topology
    ports_per_host: int
    has_inside: bool
    starts: tuple[tuple[float, ...], ...]
    """From which sizes on links have other constants: between hosts, and inside."""

    @classmethod
    def of(cls, cluster: Cluster) -> ClusterShape:
        """That of a cluster."""
        links = (cluster.between, cluster.inside or cluster.between)
        starts = tuple(tuple(piece.from_bytes for piece in link.pieces) for link in links)
        return cls(cluster.topology, cluster.ports_per_host, cluster.inside is not None, starts)


class Places(NamedTuple):
    """Places that are in use in a step, each once that differs from the others; the step happens ``times`` times.

    A row is a place, a column a kind of messages: ``messages`` of it pass through the place, with so many ``units`` of
    bytes together. What the place carries at once is its ``capacity``.
    """

    times: int
    messages: Floats
    units: Floats
    capacity: Floats

    def busy_s(self, fixed_s: Floats, per_unit_s: Floats) -> float:
        """Seconds of the busiest, where these are those of a message and of a unit, by kind."""
        busy: Floats = (self.messages @ fixed_s + self.units @ per_unit_s) / self.capacity
        return self.times * float(busy.max())


class Side(NamedTuple):
    """The messages between hosts, or those inside: kinds by the largest message of each, and places.

    ``steps`` are those of each step, ``whole`` is one of all steps together.
    """

    largest: Floats
    steps: tuple[Places, ...]
    whole: tuple[Places, ...]

    def busy_s(self, link: LinkCost | None, unit_bytes: float) -> float:
        """Seconds of the busiest place, step after step."""
        return self._sum_s(self.steps, link, unit_bytes)

    def busiest_s(self, link: LinkCost | None, unit_bytes: float) -> float:
        """Seconds of the place that is the busiest of all in all steps together."""
        return self._sum_s(self.whole, link, unit_bytes)

    def _sum_s(self, steps: tuple[Places, ...], link: LinkCost | None, unit_bytes: float) -> float:
        if link is None or not steps:
            return 0.0
        fixed_s, per_byte_s = link.constants(self.largest * unit_bytes)
        return sum(places.busy_s(fixed_s, per_byte_s * unit_bytes) for places in steps)


_NOBODY = Side(np.empty(0), (), ())


class Outline(NamedTuple):
    """What messages put on places: those between hosts, those inside, and those inside ``beside`` others between hosts.

    ``together`` are those between hosts in such steps, once more. ``flights`` are steps with messages between hosts
    only, inside only, and of both. What is added, moved and sent is in units, which are bytes of reducers' messages and
    chunks of plans.
    """

    between: Side = _NOBODY
    inside: Side = _NOBODY
    beside: Side = _NOBODY
    together: Side = _NOBODY
    flights: tuple[int, int, int] = (0, 0, 0)
    added: float = 0.0
    moved: float = 0.0
    messages: float = 0.0
    sent: float = 0.0

    def load(self, cluster: Cluster, unit_bytes: float = 1.0) -> Load:
        """The load where a unit is so many bytes, on a cluster of the shape that the outline is for."""
        far_s = cluster.between.flight_s
        near_s = 0.0 if cluster.inside is None else cluster.inside.flight_s
        far, near, both = self.flights
        steps_s = self.between.busy_s(cluster.between, unit_bytes)
        port_s = min(steps_s, self.between.busiest_s(cluster.between, unit_bytes))
        together_s = self.together.busy_s(cluster.between, unit_bytes)
        beside_s = self.beside.busy_s(cluster.inside, unit_bytes) - together_s
        return Load(
            port_s,
            self.inside.busy_s(cluster.inside, unit_bytes) + max(0.0, beside_s),
            far * far_s + near * near_s + both * max(far_s, near_s),
            self.added * unit_bytes,
            self.moved * unit_bytes,
            self.messages,
            self.sent * unit_bytes,
            steps_s - port_s,
        )


def plan_s(plan: Plan, nbytes: float, cluster: Cluster, placement: ProcessPlacement | None = None) -> float:
    """Seconds of a plan by itself, by its load; without ``placement`` every process has a host of its own."""
    load = plan_load(cluster, placement or ProcessPlacement(Group(plan.world)), plan, nbytes)
    passing_s = load.port_s + load.turns_s + load.inside_s + load.flight_s
    return passing_s + load.added_bytes * cluster.gamma_s_per_byte


def plan_load(cluster: Cluster, placement: ProcessPlacement, plan: Plan, nbytes: float) -> Load:
    """A plan for an array of so many bytes; cost: linear in its transfers."""
    return plan_outline(cluster, placement, plan).load(cluster, nbytes / plan.chunks)


def plan_outline(cluster: Cluster, placement: ProcessPlacement, plan: Plan) -> Outline:
    """The outline of a plan, in chunks: messages of as many are a kind. Cost: linear in the plan's transfers, once."""
    return _plan_outline(ClusterShape.of(cluster), placement, plan)


@lru_cache(maxsize=64)
def _plan_outline(shape: ClusterShape, placement: ProcessPlacement, plan: Plan) -> Outline:
    if not len(plan):
        return Outline()
    step = np.cumsum(np.diff(plan.step, prepend=plan.step[0]) != 0)
    kind = np.unique(plan.count, return_inverse=True)[1]
    found = _outline(shape, placement, _Table(step, plan.src, plan.dst, plan.count.astype(np.float64)), (kind, kind))
    reduces = plan.additions
    if reduces.any():
        cells = step[reduces] * plan.world + plan.dst[reduces]
        added = np.bincount(cells, plan.count[reduces], (int(step[-1]) + 1) * plan.world).reshape(-1, plan.world)
        found = found._replace(added=float(added.max(axis=1).sum()))
    return found


def flows_outline(shape: ClusterShape, placement: ProcessPlacement, flows: Flows) -> Outline:
    """The outline of messages that travel at the same time, in bytes: those of a piece of a link are a kind."""
    if not len(flows.src):
        return Outline()
    size = flows.nbytes.astype(np.float64)
    kinds = tuple(np.searchsorted(starts, size, side="right") for starts in shape.starts)
    table = _Table(np.zeros(len(size), np.int64), flows.src, flows.dst, size)
    return _outline(shape, placement, table, kinds)


class _Table(NamedTuple):
    """Messages as columns; ``size`` is in units."""

    step: Column
    src: Column
    dst: Column
    size: Floats

    def of(self, chosen: Column) -> _Table:
        return _Table(*(column[chosen] for column in self))


def _outline(shape: ClusterShape, placement: ProcessPlacement, table: _Table, kinds: Sequence[Column]) -> Outline:
    hosts, steps, group = placement.hosts, int(table.step[-1]) + 1, placement.group
    near = (hosts[table.src] == hosts[table.dst]) & shape.has_inside
    far_steps, near_steps = (np.bincount(table.step[side], minlength=steps) > 0 for side in (~near, near))
    mixed = (far_steps & near_steps)[table.step]

    def side(chosen: Column, *, between: bool) -> Side:
        if not chosen.any():
            return _NOBODY
        its = table.of(chosen)
        if between:
            its = its._replace(src=hosts[its.src], dst=hosts[its.dst])
        return _side(shape, placement, its, kinds[not between][chosen], between=between)

    sides = side(~near, between=True), side(near & ~mixed, between=False)
    mixed_sides = side(near & mixed, between=False), side(~near & mixed, between=True)
    only = (far_steps & ~near_steps, near_steps & ~far_steps, far_steps & near_steps)
    flights = (int(only[0].sum()), int(only[1].sum()), int(only[2].sum()))
    both = np.concatenate([table.src, table.dst])
    moved = np.bincount(both, np.concatenate([table.size, table.size])).max()
    sent = table.size[table.src < group.workers].sum() / group.workers
    messages = np.bincount(both).max()
    return Outline(*sides, *mixed_sides, flights, 0.0, float(moved), float(messages), float(sent))


def _side(shape: ClusterShape, placement: ProcessPlacement, table: _Table, kind: Column, *, between: bool) -> Side:
    """What places have to do, in each step and in all together."""
    _, kind = np.unique(kind, return_inverse=True)
    largest = np.zeros(int(kind.max()) + 1)
    np.maximum.at(largest, kind, table.size)
    steps = _alike(*_in_use(shape, placement, table, kind, between=between))
    if not table.step.any():
        return Side(largest, steps, steps)
    at_once = table._replace(step=np.zeros_like(table.step))
    return Side(largest, steps, _alike(*_in_use(shape, placement, at_once, kind, between=between)))


def _in_use(
    shape: ClusterShape, placement: ProcessPlacement, table: _Table, kind: Column, *, between: bool
) -> tuple[Column, Floats]:
    """Ports and links in use, as ``_used`` has them."""
    places = placement.count if between else placement.group.processes
    ports = shape.ports_per_host if between else 1
    kinds, found = int(kind.max()) + 1, []
    for ends in (table.src, table.dst):
        found.append(_used(table.step, ends, table.size, kind, kinds, places, ports))
    if ports > 1:  # several ports carry no message faster
        found.append(_used(table.step, np.arange(len(kind)), table.size, kind, kinds, len(kind), 1))
    if between:
        used, links = shape.topology.crossings(table.src, table.dst, placement.count)
        if len(links):
            names, link = np.unique(links, return_inverse=True)
            capacity = np.array([shape.topology.capacity(int(name)) for name in names])
            step, rows = _used(table.step[used], link, table.size[used], kind[used], kinds, len(names), capacity)
            rows[:, :kinds] = 0.0  # what a message itself takes is the ports'
            found.append((step, rows))
    step, rows = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return step, rows


def _alike(step: Column, rows: Floats) -> tuple[Places, ...]:
    """Places with the same to do as one, and steps with the same places as one."""
    distinct, code = _coded(rows)
    present = np.zeros((int(step.max()) + 1, len(distinct)), bool)
    present[step, code] = True
    alike = Counter(line.tobytes() for line in present if line.any())
    steps = []
    for line, times in alike.items():
        its = distinct[np.frombuffer(line, bool)]
        messages, units = np.split(its[:, :-1], 2, axis=1)
        steps.append(Places(times, messages, units, its[:, -1]))
    return tuple(steps)


def _used(
    step: Column, place: Column, size: Floats, kind: Column, kinds: int, places: int, capacity: float | Floats
) -> tuple[Column, Floats]:
    """The steps of places in use and a row for each: messages by kind, units by kind, capacity."""
    cells, cell = np.unique(step * places + place, return_inverse=True)
    at = cell * kinds + kind
    messages, units = (np.bincount(at, weights, len(cells) * kinds).reshape(-1, kinds) for weights in (None, size))
    capacities = np.broadcast_to(capacity, places)[cells % places]
    return cells // places, np.column_stack([messages, units, capacities]).astype(np.float64)


def _coded(rows: Floats) -> tuple[Floats, Column]:
    """The distinct rows, and which of them every row is."""
    code = np.zeros(len(rows), np.int64)
    for column in rows.T:
        if column.min() < column.max():
            values, value = np.unique(column, return_inverse=True)
            _, code = np.unique(code * len(values) + value, return_inverse=True)
    _, first = np.unique(code, return_index=True)
    return rows[first], code


Numbers = NDArray[np.integer[Any]]


class PlanTime(NamedTuple):
    """When a plan is done: all of it, and each rank, without what processors add to the whole."""

    whole_s: float
    ends_s: Floats


def plan_time(
    plan: Plan, nbytes: float, cluster: Cluster, hosts: Ints | None = None, starts_s: Floats | None = None
) -> PlanTime:
    """The time of a plan for an array of ``nbytes``; ``hosts`` are the ranks', by default one each.

    ``starts_s`` are when ranks come to it, by default 0. Cost: linear in the chunks that are moved, memory for ranks
    times chunks.
    """
    places = np.arange(plan.world) if hosts is None else np.asarray(hosts)
    messages = _Messages(plan, nbytes, cluster, places)
    clocks = _Clocks(plan, messages, np.zeros(plan.world) if starts_s is None else np.asarray(starts_s, np.float64))
    edges = np.flatnonzero(np.diff(plan.step, prepend=-1, append=np.iinfo(np.int32).max))
    for low, high in pairwise(edges.tolist()):
        messages.share(slice(low, high))
        clocks.step(slice(low, high))
    whole_s = float(clocks.ends_s.max())
    if cluster.cores is not None:
        whole_s = max(whole_s, _processor_s(plan, cluster, places, messages) / cluster.cores)
    return PlanTime(whole_s, clocks.ends_s)


class _Messages:
    """Of every transfer its size, the port that sends and the one that receives, for how long, and what follows."""

    def __init__(self, plan: Plan, nbytes: float, cluster: Cluster, hosts: Ints) -> None:
        self._plan, self._cluster, self._hosts = plan, cluster, hosts
        self._host_count = int(hosts.max()) + 1
        ports = self._host_count * cluster.ports_per_host
        self.ports = ports + plan.world
        port = (hosts * cluster.ports_per_host + _number_in(hosts) % cluster.ports_per_host).astype(np.int32)
        self.out, self.into = port[plan.src], port[plan.dst]
        self.size: Floats = plan.count.astype(np.float64) * (nbytes / plan.chunks)
        self.busy_s = cluster.between.busy_s(self.size)
        self.flight_s = np.full(len(plan), cluster.between.flight_s)
        self._near = np.zeros(len(plan), np.bool_)
        if cluster.inside is not None:
            self._near = hosts[plan.src] == hosts[plan.dst]
            near = np.flatnonzero(self._near)
            self.out[near], self.into[near] = ports + plan.src[near], ports + plan.dst[near]
            self.busy_s[near], self.flight_s[near] = cluster.inside.busy_s(self.size[near]), cluster.inside.flight_s
        self.add_s = np.where(plan.additions, self.size * cluster.gamma_s_per_byte, 0.0)

    def share(self, rows: slice) -> None:
        """Let the messages of a step between hosts take as long as links in the network do that they share."""
        topology = self._cluster.topology
        if isinstance(topology, Switch):
            return
        far = np.flatnonzero(~self._near[rows]) + rows.start
        src, dst = self._hosts[self._plan.src[far]], self._hosts[self._plan.dst[far]]
        which, links = topology.crossings(src, dst, self._host_count)
        if not len(links):
            return
        bytes_s, out, into = self._cluster.between.bytes_s(self.size[far]), self.out[far], self.into[far]
        names, place = np.unique(links, return_inverse=True)
        load_s = np.bincount(place, bytes_s[which]) / np.array([topology.capacity(int(link)) for link in names])
        port_s = np.zeros(len(names))  # of the busiest port that has messages on the link
        of_ports_s = np.maximum(np.bincount(out, bytes_s)[out], np.bincount(into, bytes_s)[into])
        np.maximum.at(port_s, place, of_ports_s[which])
        stretch = np.ones(len(far))
        np.maximum.at(stretch, which, (load_s / np.where(port_s > 0, port_s, np.inf))[place])
        self.busy_s[far] += (stretch - 1) * bytes_s


class _Clocks:
    """What every port, rank and chunk is ready for, when."""

    def __init__(self, plan: Plan, messages: _Messages, starts_s: Floats) -> None:
        self._plan, self._messages = plan, messages
        self._chunk_s = np.repeat(starts_s[:, None], plan.chunks, axis=1)
        self._rank_s = starts_s.copy()
        """Until when a rank adds."""
        self.ends_s = starts_s.copy()
        self.sends_s, self.receives_s = np.zeros(messages.ports), np.zeros(messages.ports)
        """Until when ports have been busy."""

    def step(self, rows: slice) -> None:
        """The transfers of one step, which all read what was there before it."""
        src, dst = self._plan.src[rows], self._plan.dst[rows]
        chunks = _Chunks.of(self._plan.chunk[rows], self._plan.count[rows])
        held_s = self._chunk_s[src[chunks.transfer], chunks.chunk]
        ready_s = held_s if chunks.single else np.maximum.reduceat(held_s, chunks.starts)
        alone = all(_distinct(ends) for ends in (src, dst, self._messages.out[rows], self._messages.into[rows]))
        sent_s, done_s = (self._met if alone else self._queued)(rows, ready_s)
        np.maximum.at(self.ends_s, src, sent_s)
        np.maximum.at(self.ends_s, dst, done_s)
        np.maximum.at(self._chunk_s, (dst[chunks.transfer], chunks.chunk), done_s[chunks.transfer])

    def _met(self, rows: slice, ready_s: Floats) -> tuple[Floats, Floats]:
        """Messages that have their ports for themselves: when they are sent, and when there and added."""
        messages, dst = self._messages, self._plan.dst[rows]
        out, into = messages.out[rows], messages.into[rows]
        begin_s = np.maximum(np.maximum(ready_s, self._rank_s[dst]), self.sends_s[out])
        np.maximum(begin_s, self.receives_s[into], out=begin_s)
        sent_s: Floats = begin_s + messages.busy_s[rows]
        self.sends_s[out] = self.receives_s[into] = sent_s
        added_s: Floats = sent_s + messages.add_s[rows]
        self._rank_s[dst] = np.maximum(self._rank_s[dst], np.where(messages.add_s[rows] > 0, added_s, 0.0))
        return sent_s, added_s + messages.flight_s[rows]

    def _queued(self, rows: slice, ready_s: Floats) -> tuple[Floats, Floats]:
        """The same for messages of which some have a port in common: they queue at each of their ports."""
        messages, dst = self._messages, self._plan.dst[rows]
        busy_s, add_s = messages.busy_s[rows], messages.add_s[rows]
        sent_s = _queue(ready_s, busy_s, messages.out[rows], self.sends_s)
        begun_s = np.maximum(sent_s - busy_s, self._rank_s[dst])
        got_s = _queue(begun_s, busy_s, messages.into[rows], self.receives_s)
        if add_s.any():
            got_s = _queue(got_s - busy_s, busy_s + add_s, dst, self._rank_s)
        return sent_s, got_s + messages.flight_s[rows]


def _processor_s(plan: Plan, cluster: Cluster, hosts: Ints, messages: _Messages) -> float:
    """What the cores of the busiest host, or of all that share some, need for messages, bytes and adding."""
    software_s = cluster.message_s + messages.size * cluster.byte_cpu_s
    of_ranks_s = np.bincount(plan.dst, messages.add_s + software_s, plan.world)
    of_ranks_s += np.bincount(plan.src, software_s, plan.world)
    of_hosts_s = np.bincount(hosts, of_ranks_s)
    return float(of_hosts_s.sum() if cluster.one_machine else of_hosts_s.max())


@dataclass(frozen=True)
class _Chunks:
    """The chunks that transfers carry, one entry each: of which transfer, and which; ``starts`` are the transfers'."""

    transfer: Numbers
    chunk: Numbers
    starts: Numbers
    single: bool

    @classmethod
    def of(cls, first: Numbers, count: Numbers) -> _Chunks:
        """Those of transfers of ``count`` chunks from ``first`` on."""
        if not (count > 1).any():
            every = np.arange(len(count))
            return cls(every, first, every, True)
        starts = np.cumsum(count) - count
        transfer = np.repeat(np.arange(len(count)), count)
        return cls(transfer, np.arange(len(transfer)) + (first - starts)[transfer], starts, False)


def _distinct(numbers: Numbers) -> bool:
    return bool(np.bincount(numbers).max() == 1)


def _queue(ready_s: Floats, busy_s: Floats, places: Numbers, free_s: Floats) -> Floats:
    """When each is done of those that occupy a place for so long, in the order in which they are ready.

    ``free_s`` says from when on places are free, and is brought up to date.
    """
    order = np.lexsort((ready_s, places))
    place, first_s, work_s = places[order], ready_s[order], np.cumsum(busy_s[order])
    heads = np.flatnonzero(np.diff(place, prepend=place[:1] - 1))
    before_s = np.repeat(work_s[heads] - busy_s[order[heads]], np.diff(heads, append=len(place)))
    # The k-th is done when the work from some j on, and that j was ready, is: the latest of those.
    slack_s = np.maximum(first_s, free_s[place]) - (work_s - busy_s[order] - before_s)
    # Lifted so that the latest of one place is below all of the next.
    lift_s = np.repeat(np.arange(len(heads)) * 2 * np.ptp(slack_s), np.diff(heads, append=len(place)))
    done_s = np.maximum.accumulate(slack_s + lift_s) - lift_s + (work_s - before_s)
    tails = np.append(heads[1:], len(place)) - 1
    free_s[place[tails]] = done_s[tails]
    found = np.empty(len(order))
    found[order] = done_s
    return found


def _number_in(groups: Numbers) -> Ints:
    """Of every entry how many equal ones stand before it."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    first = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    found = np.empty(len(groups), np.int64)
    found[order] = np.arange(len(groups)) - np.repeat(first, np.diff(first, append=len(groups)))
    return found
