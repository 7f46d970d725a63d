"""The cost of a plan on a network, at two fidelities.

``plan_load`` is the quick model: the load that a plan's messages put on the busiest places. It assumes that a step
begins when the one before it has ended everywhere, which holds if all ranks have equal work. Choices at run time and
simulated trainings use it, because they ask for thousands of exchanges, including exchanges of payloads. ``plan_time``
is the precise model: the clocks of all ranks and ports. Predictions of single collectives use it, because loads make
double trees up to 1.7 times too slow, and messages that meet on links inside the network up to a quarter too fast or
too slow. Neither model knows a schedule, another exchange in progress, or the segments into which arrays are cut for
pipelining. Tests compare both with the formulas of the literature.

**Loads.** An ``Outline`` is a compressed form of a plan's messages: places with equal work count as one, and so do
equal steps. A ring of 512 ranks has one place and one step, 1022 times. An outline is valid for arrays of any size and
for all constants, so it is computed once and evaluated often, with the same result as message by message.

**Clocks.** A message of a step begins when its data has arrived, the sender's port has sent its earlier messages, and
the receiver's port is free and its rank has added earlier ones. It occupies both ports for the link's time and arrives
a flight later. Reduced data is then added, and meanwhile the rank receives no more. All of this is maxima and sums, so
the clocks of all ranks are propagated as arrays (Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity",
1992): a step waits only for ranks that concern it, and late starts spread only as far as messages carry them. Several
messages at one port in a step are queued at the sender's port and then at the receiver's, first come first served; the
network between buffers what a port cannot accept yet. If a link inside the network would be busy in a step for longer
than the ports of its messages, these messages take proportionally longer, as under max-min fairness for equal messages.
Processors give a lower bound: where cores are counted, the plan takes at least the processor time of its messages,
bytes and additions.

**Libraries.** If a message library carries out the transfers inside hosts (``Plan.native``), its reduce-scatter and its
all-gather take half of the cluster's ``native`` seconds each, at all ranks of a host together. If the cluster has no
such constants, these transfers count as messages.
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
from ..plans.plan import COPY, REDUCE, Plan
from .cluster import Cluster, Constant, Floats, Ints, LinkCost, Switch, Topology

_SHORTEST_S = 1e-12
"""Times below this count as 0."""


@dataclass(frozen=True)
class LinearCost:
    """The seconds of an exchange by its bytes: A + B n."""

    base_s: float
    per_byte_s: float

    def __call__(self, nbytes: float) -> float:
        """The seconds of an exchange of that size."""
        return self.base_s + self.per_byte_s * nbytes

    def __add__(self, other: LinearCost) -> LinearCost:
        """The cost of two exchanges of the same size, one after the other."""
        return LinearCost(self.base_s + other.base_s, self.per_byte_s + other.per_byte_s)


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> LinearCost | None:
    """The line nearest to measured times, by relative error; ``sizes`` in bytes. None if no time was measurable.

    Neither coefficient is negative: if noise made one negative, the fit uses the other alone.
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
    """The cluster on which the halves of a ring took these times, given as (bytes, seconds).

    ``small`` and ``large`` are all-gathers of different sizes, ``reduced`` a reduce-scatter. An all-gather takes (N-1)
    a + (N-1)/N n b; a reduce-scatter takes (N-1)/N n g more. Noise can make a difference negative; the constant is then
    0, and alpha at least a nanosecond, the resolution of the clock.
    """
    steps, share = workers - 1, (workers - 1) / workers
    beta = max(0.0, (large[1] - small[1]) / (share * (large[0] - small[0])))
    alpha = max(1e-9, (small[1] - share * small[0] * beta) / steps)
    gamma = max(0.0, (reduced[1] - steps * alpha - share * reduced[0] * beta) / (share * reduced[0]))
    constants = {"between.alpha": alpha, "between.beta": beta, "gamma": gamma}
    return Cluster("as measured", {name: Constant(value, measured=True) for name, value in constants.items()})


Column = NDArray[Any]


class Load(NamedTuple):
    """Seconds of the busiest port, of the busiest host's inside, of steps and flights; and the work of one rank.

    ``port_s`` is the time of the port with the most work over all steps. Steps wait for each other; if another port is
    the busiest in each step, the plan takes ``turns_s`` longer. Ports are then free for other exchanges, like those of
    a tree's leaves while its root works. ``inside_s`` is the time within hosts, step after step; for a step that also
    has messages between hosts, it is only the additional time of the messages inside. ``added_bytes`` are the bytes
    that a rank adds, ``moved_bytes`` the bytes that it sends and receives in ``messages`` messages, ``sent_bytes`` the
    bytes that a worker sends, as the mean over all.
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
        """The load of one exchange after the other."""
        return Load(*(mine + its for mine, its in zip(self, other, strict=True)))


@dataclass(frozen=True)
class ProcessPlacement:
    """The processes of a run on hosts: ``per_host`` workers to a host, and a host for each server."""

    group: Group
    per_host: int = 1

    @cached_property
    def hosts(self) -> NDArray[np.int64]:
        """The host of every process."""
        workers = np.arange(self.group.workers) // self.per_host
        return np.concatenate([workers, workers[-1] + 1 + np.arange(self.group.servers)])

    @property
    def count(self) -> int:
        """The number of hosts."""
        return int(self.hosts[-1]) + 1


class ClusterShape(NamedTuple):
    """The properties of a cluster that outlines depend on."""

    topology: Topology
    ports_per_host: int
    has_inside: bool
    has_native: bool
    starts: tuple[tuple[float, ...], ...]
    """The sizes from which other constants apply: between hosts, and inside."""

    @classmethod
    def of(cls, cluster: Cluster) -> ClusterShape:
        """The shape of a cluster."""
        links = (cluster.between, cluster.inside or cluster.between)
        starts = tuple(tuple(piece.from_bytes for piece in link.pieces) for link in links)
        known = cluster.inside is not None, cluster.native is not None
        return cls(cluster.topology, cluster.ports_per_host, *known, starts)


class Places(NamedTuple):
    """The places in use in a step that happens ``times`` times; places with equal work are listed once.

    A row is a place, a column a kind of messages: ``messages`` of that kind pass through the place, with ``units``
    bytes together, relative to the place's ``capacity``.
    """

    times: int
    messages: Floats
    units: Floats
    capacity: Floats

    def busy_s(self, fixed_s: Floats, per_unit_s: Floats) -> float:
        """Seconds of the busiest place, given the seconds of a message and of a unit for each kind."""
        busy: Floats = (self.messages @ fixed_s + self.units @ per_unit_s) / self.capacity
        return self.times * float(busy.max())


class Side(NamedTuple):
    """The messages between hosts, or those inside: the largest size of each kind, and places.

    ``steps`` has the places of each step, ``whole`` those of all steps together.
    """

    largest: Floats
    steps: tuple[Places, ...]
    whole: tuple[Places, ...]

    def busy_s(self, link: LinkCost | None, unit_bytes: float) -> float:
        """Seconds of the busiest place of each step, summed over the steps."""
        return self._sum_s(self.steps, link, unit_bytes)

    def busiest_s(self, link: LinkCost | None, unit_bytes: float) -> float:
        """Seconds of the place that has the most work over all steps together."""
        return self._sum_s(self.whole, link, unit_bytes)

    def _sum_s(self, steps: tuple[Places, ...], link: LinkCost | None, unit_bytes: float) -> float:
        if link is None or not steps:
            return 0.0
        fixed_s, per_byte_s = link.constants(self.largest * unit_bytes)
        return sum(places.busy_s(fixed_s, per_byte_s * unit_bytes) for places in steps)


_NOBODY = Side(np.empty(0), (), ())


class Outline(NamedTuple):
    """The work that messages give to places: between hosts, inside, and inside ``beside`` messages between hosts.

    ``together`` repeats the messages between hosts of such mixed steps. ``flights`` counts the steps with messages only
    between hosts, only inside, and of both. Amounts are in units: bytes for reducers' messages, chunks for plans.
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
        """The load with units of ``unit_bytes``, on a cluster of the shape that the outline was made for."""
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
    """Seconds of a plan alone, by its load; without ``placement`` every process has a host of its own."""
    load = plan_load(cluster, placement or ProcessPlacement(Group(plan.world)), plan, nbytes)
    passing_s = load.port_s + load.turns_s + load.inside_s + load.flight_s
    return passing_s + load.added_bytes * cluster.gamma_s_per_byte


def plan_load(cluster: Cluster, placement: ProcessPlacement, plan: Plan, nbytes: float) -> Load:
    """The load of a plan for an array of ``nbytes``. Cost: linear in its transfers, once per plan."""
    load = plan_outline(cluster, placement, plan).load(cluster, nbytes / plan.chunks)
    before_s, after_s = _library_s(plan, nbytes, cluster)
    return load._replace(inside_s=load.inside_s + before_s + after_s) if before_s or after_s else load


def native_s(cluster: Cluster, nbytes: float) -> float:
    """Seconds of a message library's reduce-scatter and all-gather inside a host; 0 if unknown."""
    return 0.0 if cluster.native is None else cluster.native.busy_s(nbytes)


def _library_s(plan: Plan, nbytes: float, cluster: Cluster) -> tuple[float, float]:
    """Seconds of the library's reduce-scatter before a plan's other transfers, and of its all-gather after them."""
    if not plan.native:
        return 0.0, 0.0
    half_s, ops = native_s(cluster, nbytes) / 2, plan.op[plan.natively]
    return half_s * bool((ops == REDUCE).any()), half_s * bool((ops == COPY).any())


def plan_outline(cluster: Cluster, placement: ProcessPlacement, plan: Plan) -> Outline:
    """The outline of a plan, in chunks; messages of equal size are a kind. Cost: linear in its transfers, once."""
    return _plan_outline(ClusterShape.of(cluster), placement, plan)


@lru_cache(maxsize=64)
def _plan_outline(shape: ClusterShape, placement: ProcessPlacement, plan: Plan) -> Outline:
    if shape.has_native and plan.native:
        plan = plan.across
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
    """The outline of messages that travel at the same time, in bytes; those of one piece of a link are a kind."""
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
    """The work of places, in each step and in all together."""
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
    """The ports and links in use, in the form of ``_used``."""
    places = placement.count if between else placement.group.processes
    ports = shape.ports_per_host if between else 1
    kinds, found = int(kind.max()) + 1, []
    for ends in (table.src, table.dst):
        found.append(_used(table.step, ends, table.size, kind, kinds, places, ports))
    if ports > 1:  # a single message uses one port only
        found.append(_used(table.step, np.arange(len(kind)), table.size, kind, kinds, len(kind), 1))
    if between:
        used, links = shape.topology.crossings(table.src, table.dst, placement.count)
        if len(links):
            names, link = np.unique(links, return_inverse=True)
            capacity = np.array([shape.topology.capacity(int(name)) for name in names])
            step, rows = _used(table.step[used], link, table.size[used], kind[used], kinds, len(names), capacity)
            rows[:, :kinds] = 0.0  # the fixed cost of a message occupies ports, not links
            found.append((step, rows))
    step, rows = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return step, rows


def _alike(step: Column, rows: Floats) -> tuple[Places, ...]:
    """Merge places with equal work, and steps with equal places."""
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
    """The steps of places in use, with a row for each: messages by kind, units by kind, capacity."""
    cells, cell = np.unique(step * places + place, return_inverse=True)
    at = cell * kinds + kind
    messages, units = (np.bincount(at, weights, len(cells) * kinds).reshape(-1, kinds) for weights in (None, size))
    capacities = np.broadcast_to(capacity, places)[cells % places]
    return cells // places, np.column_stack([messages, units, capacities]).astype(np.float64)


def _coded(rows: Floats) -> tuple[Floats, Column]:
    """The distinct rows, and the index of each row among them."""
    code = np.zeros(len(rows), np.int64)
    for column in rows.T:
        if column.min() < column.max():
            values, value = np.unique(column, return_inverse=True)
            _, code = np.unique(code * len(values) + value, return_inverse=True)
    _, first = np.unique(code, return_index=True)
    return rows[first], code


Numbers = NDArray[np.integer[Any]]


class PlanTime(NamedTuple):
    """When a plan is done: the whole, and each rank without the bound by processors."""

    whole_s: float
    ends_s: Floats


def plan_time(
    plan: Plan, nbytes: float, cluster: Cluster, hosts: Ints | None = None, starts_s: Floats | None = None
) -> PlanTime:
    """The time of a plan for an array of ``nbytes``; ``hosts`` has the ranks' hosts, by default one each.

    ``starts_s`` are the times at which ranks begin, by default 0. Cost: linear in the chunks moved; memory for ranks
    times chunks.
    """
    places = np.arange(plan.world) if hosts is None else np.asarray(hosts)
    begins_s = np.zeros(plan.world) if starts_s is None else np.array(starts_s, np.float64)
    before_s, after_s = _library_s(plan, nbytes, cluster)
    groups = [list(ranks) for ranks in plan.native] if cluster.native is not None else []
    if groups:
        plan = plan.across
        _meet(begins_s, groups, before_s)
    messages = _Messages(plan, nbytes, cluster, places)
    clocks = _Clocks(plan, messages, begins_s)
    edges = np.flatnonzero(np.diff(plan.step, prepend=-1, append=np.iinfo(np.int32).max))
    for low, high in pairwise(edges.tolist()):
        messages.share(slice(low, high))
        clocks.step(slice(low, high))
    _meet(clocks.ends_s, groups, after_s)
    whole_s = float(clocks.ends_s.max())
    if cluster.cores is not None:
        whole_s = max(whole_s, _processor_s(plan, cluster, places, messages) / cluster.cores)
    return PlanTime(whole_s, clocks.ends_s)


def _meet(clocks_s: Floats, groups: Sequence[list[int]], takes_s: float) -> None:
    """Let the ranks of each group wait for each other, and then go on together."""
    for ranks in groups if takes_s else ():
        clocks_s[ranks] = clocks_s[ranks].max() + takes_s


class _Messages:
    """The size of every transfer, its two ports, how long it occupies them, its flight, and the time to add."""

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
        """Lengthen a step's messages between hosts where links in the network that they share are the bottleneck."""
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
        port_s = np.zeros(len(names))  # the busiest port with messages on each link
        of_ports_s = np.maximum(np.bincount(out, bytes_s)[out], np.bincount(into, bytes_s)[into])
        np.maximum.at(port_s, place, of_ports_s[which])
        stretch = np.ones(len(far))
        np.maximum.at(stretch, which, (load_s / np.where(port_s > 0, port_s, np.inf))[place])
        self.busy_s[far] += (stretch - 1) * bytes_s


class _Clocks:
    """When every port, rank and chunk is ready."""

    def __init__(self, plan: Plan, messages: _Messages, starts_s: Floats) -> None:
        self._plan, self._messages = plan, messages
        self._chunk_s = np.repeat(starts_s[:, None], plan.chunks, axis=1)
        self._rank_s = starts_s.copy()
        """When each rank will have finished adding."""
        self.ends_s = starts_s.copy()
        self.sends_s, self.receives_s = np.zeros(messages.ports), np.zeros(messages.ports)
        """When ports will be free."""

    def step(self, rows: slice) -> None:
        """Advance the clocks by the transfers of one step, which all read the data from before it."""
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
        """For messages with ports of their own: when each is sent, and when it has arrived and is added."""
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
        """As ``_met``, for messages that share ports: they queue at both of their ports."""
        messages, dst = self._messages, self._plan.dst[rows]
        busy_s, add_s = messages.busy_s[rows], messages.add_s[rows]
        sent_s = _queue(ready_s, busy_s, messages.out[rows], self.sends_s)
        begun_s = np.maximum(sent_s - busy_s, self._rank_s[dst])
        got_s = _queue(begun_s, busy_s, messages.into[rows], self.receives_s)
        if add_s.any():
            got_s = _queue(got_s - busy_s, busy_s + add_s, dst, self._rank_s)
        return sent_s, got_s + messages.flight_s[rows]


def _processor_s(plan: Plan, cluster: Cluster, hosts: Ints, messages: _Messages) -> float:
    """The processor time of the busiest host, or of all hosts that share cores."""
    software_s = cluster.message_s + messages.size * cluster.byte_cpu_s
    of_ranks_s = np.bincount(plan.dst, messages.add_s + software_s, plan.world)
    of_ranks_s += np.bincount(plan.src, software_s, plan.world)
    of_hosts_s = np.bincount(hosts, of_ranks_s)
    return float(of_hosts_s.sum() if cluster.one_machine else of_hosts_s.max())


@dataclass(frozen=True)
class _Chunks:
    """The chunks that transfers carry, with the transfer of each; ``starts`` has each transfer's first entry."""

    transfer: Numbers
    chunk: Numbers
    starts: Numbers
    single: bool

    @classmethod
    def of(cls, first: Numbers, count: Numbers) -> _Chunks:
        """The chunks of transfers with ``count`` chunks from ``first`` on."""
        if not (count > 1).any():
            every = np.arange(len(count))
            return cls(every, first, every, True)
        starts = np.cumsum(count) - count
        transfer = np.repeat(np.arange(len(count)), count)
        return cls(transfer, np.arange(len(transfer)) + (first - starts)[transfer], starts, False)


def _distinct(numbers: Numbers) -> bool:
    return bool(np.bincount(numbers).max() == 1)


def _queue(ready_s: Floats, busy_s: Floats, places: Numbers, free_s: Floats) -> Floats:
    """When each job ends that occupies one of ``places`` for ``busy_s``, first come first served.

    ``free_s`` has when places become free, and is updated.
    """
    order = np.lexsort((ready_s, places))
    place, first_s, work_s = places[order], ready_s[order], np.cumsum(busy_s[order])
    heads = np.flatnonzero(np.diff(place, prepend=place[:1] - 1))
    before_s = np.repeat(work_s[heads] - busy_s[order[heads]], np.diff(heads, append=len(place)))
    # The k-th job ends at the maximum over j <= k of j's ready time plus the work of jobs j to k.
    slack_s = np.maximum(first_s, free_s[place]) - (work_s - busy_s[order] - before_s)
    # Offsets between places keep the running maximum of one place below all values of the next.
    lift_s = np.repeat(np.arange(len(heads)) * 2 * np.ptp(slack_s), np.diff(heads, append=len(place)))
    done_s = np.maximum.accumulate(slack_s + lift_s) - lift_s + (work_s - before_s)
    tails = np.append(heads[1:], len(place)) - 1
    free_s[place[tails]] = done_s[tails]
    found = np.empty(len(order))
    found[order] = done_s
    return found


def _number_in(groups: Numbers) -> Ints:
    """For every entry, how many equal ones precede it."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    first = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    found = np.empty(len(groups), np.int64)
    found[order] = np.arange(len(groups)) - np.repeat(first, np.diff(first, append=len(groups)))
    return found
