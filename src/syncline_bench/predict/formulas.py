"""Closed formulas: the time and the load of an exchange without its plan, for numbers of workers that no plan fits.

Owns the formulas of the literature, the conditions under which they hold, and the number of messages from which a plan
is too large to simulate. ``collectives`` asks for seconds, the simulation of a training for a ``Load``. A formula holds
for one switch, and for messages that pass a port one after the other. Tests compare both with plans (``costs.plans``).

Theory. Of N ranks with an array of n bytes, a s per message, b s per byte, g s per byte reduced, lg = ceil(log2 N):

    ring                    2(N-1) a + 2(N-1)/N n b + (N-1)/N n g        (Patarasuk, Yuan 2009)
    recursive_doubling      lg (a + n b + n g), N a power of two; otherwise one step more before, one after (Thakur,
                            Rabenseifner, Gropp 2005)
    halving_doubling        2 lg a + 2(N-1)/N n b + (N-1)/N n g, likewise, with all around them (Rabenseifner 2004)
    tree                    2 lg (a + n b) + lg n g
    direct                  2(N-1) a + 2(N-1)/N n b + (N-1)/N n g
    hierarchical            on m hosts of p: a ring's halves inside, a ring of n/p across (Cho et al. 2019)
    ps(servers=S)           2 (max(N, S) a + max(N/S, 1) n b) + (N-1)/S n g: pull follows push (Li et al. 2014)
    ps(on=workers), S = N   as direct
    ps_flat_tree            N (a + n b) + lg (a + n b): to one server one by one, back along a tree
    ps_tree                 as tree: to one server along a tree and back
    reduce_scatter, all_gather, broadcast, and the direct halves: one half of the above

The formulas are sums over messages, so links may be piecewise linear and may have flights. A ring over hosts with
several ranks each has the pace of the link between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from syncline.costs.cluster import Cluster, Switch
from syncline.costs.plans import Load
from syncline.errors import UsageError
from syncline.strategy.grammar import Part


class Sent(NamedTuple):
    """A number of messages in sequence, each with the same share of the array."""

    messages: float
    share: float
    inside: bool = False
    flights: float | None = None
    """The number of flights in sequence (messages that wait for an arrival); None: one per message."""
    abreast: int = 1
    """The messages that a host sends at the same time, over its ports."""

    @property
    def in_sequence(self) -> float:
        """The number of flights."""
        return self.messages if self.flights is None else self.flights


@dataclass(frozen=True)
class Formula:
    """The work of the busiest rank: its messages, and the share of the array that it adds.

    With ``duplex`` a rank sends and receives the messages at the same time; otherwise each half has one direction.
    ``mean`` is the share of the array that a worker sends in the mean; None if all send as much as the busiest one.
    """

    sent: tuple[Sent, ...]
    added: float
    duplex: bool = True
    mean: float | None = None
    halves: tuple[Formula, Formula] | None = None

    @property
    def messages(self) -> float:
        """The number of messages that its port carries."""
        return sum(one.messages for one in self.sent)

    def seconds(self, nbytes: float, cluster: Cluster) -> float:
        """The time for an array of ``nbytes``."""
        load = self.load(nbytes, cluster)
        passing_s = load.port_s + load.turns_s + load.inside_s + load.flight_s
        return passing_s + load.added_bytes * cluster.gamma_s_per_byte

    def load(self, nbytes: float, cluster: Cluster) -> Load:
        """The load that the plan of an array of ``nbytes`` would have."""
        if self.halves is not None and not self.duplex:
            first, second = (half.load(nbytes, cluster) for half in self.halves)
            both = first.then(second)
            port_s = max(first.port_s, second.port_s)
            return both._replace(port_s=port_s, turns_s=both.turns_s + both.port_s - port_s)
        port_s = turns_s = inside_s = flight_s = 0.0
        for one in self.sent:
            link = cluster.inside if one.inside and cluster.inside is not None else cluster.between
            lasting_s, shared = one.messages * link.busy_s(one.share * nbytes), one.abreast / cluster.ports_per_host
            flight_s += one.in_sequence * link.flight_s
            if link is not cluster.between:
                inside_s += lasting_s
            else:  # a single message uses one port only, and others are free meanwhile
                port_s += shared * lasting_s
                turns_s += max(0.0, 1 - shared) * lasting_s
        share, ways = sum(one.messages * one.share for one in self.sent), 1 + self.duplex
        return Load(
            port_s=port_s,
            inside_s=inside_s,
            flight_s=flight_s,
            turns_s=turns_s,
            added_bytes=self.added * nbytes,
            moved_bytes=ways * share * nbytes,
            messages=ways * self.messages,
            sent_bytes=(share if self.mean is None else self.mean) * nbytes,
        )

    def changed(self, change: Callable[[Sent], Sent]) -> Formula:
        """The formula with other messages."""
        halves = None
        if self.halves is not None:
            first, second = self.halves
            halves = first.changed(change), second.changed(change)
        return replace(self, sent=tuple(map(change, self.sent)), halves=halves)


class Size(NamedTuple):
    """The numbers of workers, of workers per host, and of servers."""

    workers: int
    per_host: int = 1
    servers: int = 1

    @property
    def lg(self) -> int:
        """The depth of a binary tree of the workers."""
        return (self.workers - 1).bit_length()

    @property
    def folded(self) -> tuple[int, bool]:
        """The logarithm of the largest power of two up to the number of workers, and whether workers remain."""
        lg = self.workers.bit_length() - 1
        return lg, self.workers != 1 << lg


def closed_s(algorithm: str, nbytes: float, size: Size, cluster: Cluster) -> float:
    """Seconds of an algorithm from its formula. Raises UsageError, with the remedy, if there is none."""
    return formula_of(algorithm, size, cluster).seconds(nbytes, cluster)


def formula_of(algorithm: str, size: Size, cluster: Cluster) -> Formula:
    """The formula of an algorithm on a cluster. Raises UsageError, with the remedy, if there is none."""
    fault = _without(algorithm, size, cluster)
    if fault is not None:
        raise UsageError(f"{algorithm} has no closed formula {fault}: predict it with few enough workers for its plan")
    if size.workers == 1:
        return Formula((), 0.0)
    return _on_shared_ports(FORMULAS[algorithm](size), algorithm, size, cluster)


def has_formula(algorithm: str, size: Size, cluster: Cluster) -> bool:
    """Whether an algorithm has a formula for this size and cluster."""
    return algorithm in FORMULAS and _without(algorithm, size, cluster) is None


MOST, MOST_WORKERS = 10_000_000, 8192
"""The most messages of a plan that is simulated; the most workers if the number of messages is not known before."""


def name_of(part: Part, size: Size) -> str:
    """The name of the formula of a bound algorithm; empty if it has none, whatever the size."""
    served = part.arguments.get("on") == "workers"
    if part.arguments.get("local") or part.arguments.get("inside") == "native":
        return ""
    return "direct" if served and size.servers == size.workers else "" if served else part.name


def messages_of(part: Part, size: Size) -> float | None:
    """The approximate number of messages of an algorithm's plan; None if unknown."""
    name = name_of(part, size)
    if name not in FORMULAS:
        return None
    if name == "ps":
        return 2.0 * size.workers * size.servers
    return FORMULAS[name](size).messages * size.workers if size.workers > 1 else 0.0


def is_too_large(part: Part, size: Size) -> bool:
    """Whether a plan is too large to simulate."""
    messages = messages_of(part, size)
    return size.workers > MOST_WORKERS if messages is None else messages > MOST


def too_many(part: Part, size: Size) -> str:
    """The number that makes a plan too large, in words."""
    messages = messages_of(part, size)
    return f"about {messages:,.0f} messages" if messages is not None else f"{size.workers:,} workers"


_RINGS = ("ring", "reduce_scatter", "all_gather")


def _without(algorithm: str, size: Size, cluster: Cluster) -> str | None:
    """The reason why there is no formula, or None."""
    if algorithm not in FORMULAS:
        return f"here (algorithms that have one: {', '.join(FORMULAS)})"
    if not isinstance(cluster.topology, Switch) and size.workers > 1:
        return f"on {cluster.topology}"
    if size.per_host > 1 and algorithm not in (*_RINGS, "hierarchical"):
        return "with several workers on a host"
    if algorithm == "hierarchical" and size.workers % size.per_host:
        return "on hosts of unequal size"
    if algorithm == "hierarchical" and size.per_host > 1 and cluster.inside is None:
        return "where links inside hosts are not known"
    shared = algorithm == "hierarchical" or (algorithm in _RINGS and cluster.inside is None)
    if cluster.ports_per_host > 1 and (
        cluster.ports_per_host != size.per_host > 1 if shared else algorithm not in _RINGS
    ):
        return f"with {cluster.ports_per_host} ports for {size.per_host} workers"
    return None


def _on_shared_ports(formula: Formula, algorithm: str, size: Size, cluster: Cluster) -> Formula:
    """The formula for several workers per host, some of whose messages share a port or stay inside.

    In a ring one worker of a host sends to the next host. Without links inside, all messages pass the host's ports.
    """
    if size.per_host == 1:
        return formula
    if algorithm == "hierarchical":
        return formula.changed(lambda one: one if one.inside else one._replace(abreast=size.per_host))
    if cluster.inside is None:
        return formula.changed(lambda one: one._replace(abreast=size.per_host))
    return formula.changed(lambda one: one._replace(inside=size.workers <= size.per_host))


def _whole(first: Formula, second: Formula) -> Formula:
    """One half after the other."""
    added, duplex = first.added + second.added, first.duplex and second.duplex
    means = first.mean, second.mean
    mean = None if means[0] is None or means[1] is None else means[0] + means[1]
    return Formula((*first.sent, *second.sent), added, duplex, mean, (first, second))


def _half(size: Size, added: bool) -> Formula:
    share = 1 / size.workers
    return Formula((Sent(size.workers - 1, share),), (size.workers - 1) * share if added else 0.0)


def _direct_half(size: Size, added: bool) -> Formula:
    return Formula((Sent(size.workers - 1, 1 / size.workers, flights=1),), _half(size, added).added)


def _tree_half(size: Size, added: bool) -> Formula:
    """Up to the root or down from it: all workers but the root send the array once, or receive it once."""
    mean = 1 - 1 / size.workers
    return Formula((Sent(size.lg, 1.0),), float(size.lg) if added else 0.0, duplex=False, mean=mean)


def _doubling(size: Size) -> Formula:
    """A worker without a partner sends its array to another one before, and gets the sum after the other steps."""
    lg, folded = size.folded
    mean = ((1 << lg) * lg + 2 * (size.workers - (1 << lg))) / size.workers
    return Formula((Sent(lg + 2 * folded, 1.0),), float(lg + folded), mean=mean)


def _halving(size: Size) -> Formula:
    lg, folded = size.folded
    halves = [Sent(2, 0.5**step) for step in range(1, lg + 1)]
    around = [Sent(2, 1.0)] if folded else []
    mean = (2 * ((1 << lg) - 1) + 2 * (size.workers - (1 << lg))) / size.workers
    return Formula((*halves, *around), 1 - 0.5**lg + folded, mean=mean)


def _two_levels(size: Size) -> Formula:
    """Reduced inside and across hosts, then gathered across and inside."""
    inside, hosts = size.per_host, size.workers // size.per_host
    levels = Sent(inside - 1, 1 / inside, inside=True), Sent(hosts - 1, 1 / size.workers)
    sent = tuple(one for one in levels if one.messages)
    added = (inside - 1) / inside + (hosts - 1) / hosts / inside
    return _whole(Formula(sent, added), Formula(sent, 0.0))


def _served_half(size: Size, push: bool) -> Formula:
    """All workers to all servers, or back: only pushes are sent by workers."""
    share = 1 / size.servers
    busiest = Sent(max(size.workers, size.servers), share, flights=1)
    return Formula((busiest,), (size.workers - 1) * share if push else 0.0, duplex=False, mean=float(push))


FORMULAS: Mapping[str, Callable[[Size], Formula]] = {
    "ring": lambda size: _whole(_half(size, True), _half(size, False)),
    "recursive_doubling": _doubling,
    "halving_doubling": _halving,
    "tree": lambda size: _whole(_tree_half(size, True), _tree_half(size, False)),
    "direct": lambda size: _whole(_direct_half(size, True), _direct_half(size, False)),
    "hierarchical": _two_levels,
    "ps": lambda size: _whole(_served_half(size, True), _served_half(size, False)),
    "ps_flat_tree": lambda size: Formula((Sent(size.workers, 1.0, flights=1), Sent(size.lg, 1.0)), size.workers - 1.0),
    "ps_tree": lambda size: _whole(_tree_half(size, True), _tree_half(size, False)),
    "reduce_scatter": lambda size: _half(size, True),
    "all_gather": lambda size: _half(size, False),
    "direct_reduce_scatter": lambda size: _direct_half(size, True),
    "direct_all_gather": lambda size: _direct_half(size, False),
    "broadcast": lambda size: _tree_half(size, False),
}
"""The formulas by name. ``ps_flat_tree`` and ``ps_tree`` are ways of a parameter server that have no plan here."""
