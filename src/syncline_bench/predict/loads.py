"""What messages put on whoever is busiest: seconds of ports, inside hosts and on links, bytes added and moved.

Owns the sums over columns of messages, of plans and of reducers alike. Knows no order but steps: a step begins when the
one before it has ended everywhere, which is what happens where all ranks have as much to do.
``plan_times`` has the clocks of every rank instead: it is what collectives alone are answered by, since here double
trees come out up to 1.7 times as slow, and messages that meet on links inside the network up to a quarter faster or
slower. But a simulated training asks for thousands of exchanges, of payloads too, and shares resources among them.

An ``Outline`` is what is left of messages when places that have the same to do count as one, and steps that are the
same as well: a ring of 512 ranks has one place and one step, 1022 times. It holds for arrays of any size and for all
constants, so that it is made once and asked often; what it says is what all messages one by one would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.compression.reducers import Flows
from syncline.nouns import Group
from syncline.plans.plan import Plan

from .cluster import Cluster
from .links import Floats, Link
from .topology import Topology

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

    @property
    def passing_s(self) -> float:
        """Until all has come, where nothing else is under way."""
        return self.port_s + self.turns_s + self.inside_s + self.flight_s

    def then(self, other: Load) -> Load:
        """One behind the other."""
        return Load(*(mine + its for mine, its in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Placement:
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


class Shape(NamedTuple):
    """What of a cluster outlines depend on."""

    topology: Topology
    ports_per_host: int
    has_inside: bool
    starts: tuple[tuple[float, ...], ...]
    """From which sizes on links have other constants: between hosts, and inside."""

    @classmethod
    def of(cls, cluster: Cluster) -> Shape:
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

    def busy_s(self, link: Link | None, unit_bytes: float) -> float:
        """Seconds of the busiest place, step after step."""
        return self._sum_s(self.steps, link, unit_bytes)

    def busiest_s(self, link: Link | None, unit_bytes: float) -> float:
        """Seconds of the place that is the busiest of all in all steps together."""
        return self._sum_s(self.whole, link, unit_bytes)

    def _sum_s(self, steps: tuple[Places, ...], link: Link | None, unit_bytes: float) -> float:
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


def plan_load(cluster: Cluster, placement: Placement, plan: Plan, nbytes: float) -> Load:
    """A plan for an array of so many bytes; cost: linear in its transfers."""
    return plan_outline(cluster, placement, plan).load(cluster, nbytes / plan.chunks)


def plan_outline(cluster: Cluster, placement: Placement, plan: Plan) -> Outline:
    """The outline of a plan, in chunks: messages of as many are a kind. Cost: linear in the plan's transfers, once."""
    return _plan_outline(Shape.of(cluster), placement, plan)


@lru_cache(maxsize=64)
def _plan_outline(shape: Shape, placement: Placement, plan: Plan) -> Outline:
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


def flows_outline(shape: Shape, placement: Placement, flows: Flows) -> Outline:
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


def _outline(shape: Shape, placement: Placement, table: _Table, kinds: Sequence[Column]) -> Outline:
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


def _side(shape: Shape, placement: Placement, table: _Table, kind: Column, *, between: bool) -> Side:
    """What places have to do, in each step and in all together."""
    _, kind = np.unique(kind, return_inverse=True)
    largest = np.zeros(int(kind.max()) + 1)
    np.maximum.at(largest, kind, table.size)
    steps = _alike(*_in_use(shape, placement, table, kind, between=between))
    if not table.step.any():
        return Side(largest, steps, steps)
    at_once = table._replace(step=np.zeros_like(table.step))
    return Side(largest, steps, _alike(*_in_use(shape, placement, at_once, kind, between=between)))


def _in_use(shape: Shape, placement: Placement, table: _Table, kind: Column, *, between: bool) -> tuple[Column, Floats]:
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
