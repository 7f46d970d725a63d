"""The time of a plan on a cluster: the clocks of all ranks and ports, step after step, all transfers of a step at once.

Owns when messages of one plan begin and end. Knows no schedule, no other exchange that is under way, and nothing of how
arrays are cut into segments that flow one behind the other.

Theory. A message of a step begins when what it carries is there, when the sender's port has sent what it sent before,
and when the receiver's port is free and its rank has added what came before; it occupies both ports for what the link
says, and arrives a flight later. What is reduced is then added, which keeps a rank from receiving more. These are
maxima and sums, so clocks of all ranks are propagated as arrays (Baccelli, Cohen, Olsder, Quadrat, "Synchronization and
Linearity", 1992): no step waits for ranks that it does not concern, so late starts spread only as far as messages carry
them. Where a port has several messages in a step they queue, at the sender's port and then at the receiver's, whoever
is ready first being first; the network between keeps what a port cannot take yet.

Links inside the network that messages share are shared in every step: where a link would be busy for longer than the
ports of the messages on it, these take as much longer (as max-min fair sharing gives it for messages that are alike).
Processors bound the whole: where cores are counted, it is no shorter than what messages, bytes and adding cost them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.plans.plan import Plan

from .cluster import Cluster
from .links import Floats
from .topology import Ints, Switch

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
