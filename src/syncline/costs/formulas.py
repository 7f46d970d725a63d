"""Closed formulas of collectives: what they take on a cluster of any size, at once.

They hold for one switch, and for as many messages at once as the ports carry one by one. The times of plans (``plans``)
are held to them, and they stand in where a plan would be too large to be timed.

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

The formulas are sums over messages, so that links may be piecewise and have flights. Rings of hosts with several ranks
go at the pace of the slower link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import UsageError
from .cluster import Cluster, Switch


class Sent(NamedTuple):
    """So many messages, one behind the other, each with that share of the array."""

    messages: float
    share: float
    inside: bool = False
    flights: float | None = None
    """How many of them wait for the flight of the one before; None: all."""


@dataclass(frozen=True)
class Formula:
    """What the busiest rank does: messages, and the share of the array that it adds."""

    sent: tuple[Sent, ...]
    added: float

    @property
    def messages(self) -> float:
        """How many messages its port carries."""
        return sum(one.messages for one in self.sent)

    def seconds(self, nbytes: float, cluster: Cluster) -> float:
        """The time for an array of so many bytes."""
        total = self.added * nbytes * cluster.gamma_s_per_byte
        for one in self.sent:
            link = cluster.inside if one.inside and cluster.inside is not None else cluster.between
            flights = one.messages if one.flights is None else one.flights
            total += one.messages * link.busy_s(one.share * nbytes) + flights * link.flight_s
        return total


class Size(NamedTuple):
    """So many workers, of which each host has ``per_host``, and servers."""

    workers: int
    per_host: int = 1
    servers: int = 1

    @property
    def lg(self) -> int:
        """The steps of a tree."""
        return (self.workers - 1).bit_length()

    @property
    def folded(self) -> tuple[int, bool]:
        """The steps of the largest power of two of workers, and whether some are left over."""
        lg = self.workers.bit_length() - 1
        return lg, self.workers != 1 << lg


def closed_s(algorithm: str, nbytes: float, size: Size, cluster: Cluster) -> float:
    """Seconds of an algorithm by its formula; raises UsageError, with the remedy, where there is none."""
    return formula_of(algorithm, size, cluster).seconds(nbytes, cluster)


def formula_of(algorithm: str, size: Size, cluster: Cluster) -> Formula:
    """The formula of an algorithm there; raises UsageError, with the remedy, where there is none."""
    fault = _without(algorithm, size, cluster)
    if fault is not None:
        raise UsageError(f"{algorithm} has no closed formula {fault}: ask for its plan, of fewer workers if need be")
    if size.workers == 1:
        return Formula((), 0.0)
    return _on_slower_links(FORMULAS[algorithm](size), algorithm, size, cluster)


def has_formula(algorithm: str, size: Size, cluster: Cluster) -> bool:
    """Whether there is one."""
    return algorithm in FORMULAS and _without(algorithm, size, cluster) is None


_RINGS = ("ring", "reduce_scatter", "all_gather")


def _without(algorithm: str, size: Size, cluster: Cluster) -> str | None:
    """Why there is no formula."""
    if algorithm not in FORMULAS:
        return f"here (those that have one are {', '.join(FORMULAS)})"
    if not isinstance(cluster.topology, Switch) and size.workers > 1:
        return f"on {cluster.topology}"
    if size.per_host > 1 and algorithm not in (*_RINGS, "hierarchical"):
        return "with several workers on a host"
    if algorithm == "hierarchical" and size.workers % size.per_host:
        return "on hosts of unequal size"
    if algorithm == "hierarchical" and size.per_host > 1 and cluster.inside is None:
        return "where links inside hosts are not known"
    if algorithm == "hierarchical" and cluster.ports_per_host not in (1, size.per_host):
        return f"with {cluster.ports_per_host} ports for {size.per_host} workers"
    return None


def _on_slower_links(formula: Formula, algorithm: str, size: Size, cluster: Cluster) -> Formula:
    """With what several workers on a host change: the link that a ring waits for, and ranks that share a port."""
    if size.per_host == 1:
        return formula
    if algorithm == "hierarchical":
        waits = 1 if cluster.ports_per_host >= size.per_host else size.per_host
        sent = (one if one.inside else one._replace(messages=waits * one.messages, flights=one.messages)
                for one in formula.sent)  # fmt: skip
        return Formula(tuple(sent), formula.added)
    within = cluster.inside is not None and size.workers <= size.per_host
    return Formula(tuple(one._replace(inside=within) for one in formula.sent), formula.added)


def _half(size: Size, added: bool) -> Formula:
    share = 1 / size.workers
    return Formula((Sent(size.workers - 1, share),), (size.workers - 1) * share if added else 0.0)


def _direct_half(size: Size, added: bool) -> Formula:
    return Formula((Sent(size.workers - 1, 1 / size.workers, flights=1),), _half(size, added).added)


def _both(first: Formula, second: Formula) -> Formula:
    return Formula((*first.sent, *second.sent), first.added + second.added)


def _doubling(size: Size) -> Formula:
    lg, folded = size.folded
    return Formula((Sent(lg + 2 * folded, 1.0),), float(lg + folded))


def _halving(size: Size) -> Formula:
    lg, folded = size.folded
    halves = [Sent(2, 0.5**step) for step in range(1, lg + 1)]
    around = [Sent(2, 1.0)] if folded else []
    return Formula((*halves, *around), 1 - 0.5**lg + folded)


def _two_levels(size: Size) -> Formula:
    inside, hosts = size.per_host, size.workers // size.per_host
    within = Sent(2 * (inside - 1), 1 / inside, inside=True)
    across = Sent(2 * (hosts - 1), 1 / size.workers)
    added = (inside - 1) / inside + (hosts - 1) / hosts / inside
    return Formula(tuple(one for one in (within, across) if one.messages), added)


def _servers(size: Size) -> Formula:
    share = 1 / size.servers
    busiest = Sent(2 * max(size.workers, size.servers), share, flights=2)
    return Formula((busiest,), (size.workers - 1) * share)


FORMULAS: Mapping[str, Callable[[Size], Formula]] = {
    "ring": lambda size: _both(_half(size, True), _half(size, False)),
    "recursive_doubling": _doubling,
    "halving_doubling": _halving,
    "tree": lambda size: Formula((Sent(2 * size.lg, 1.0),), float(size.lg)),
    "direct": lambda size: _both(_direct_half(size, True), _direct_half(size, False)),
    "hierarchical": _two_levels,
    "ps": _servers,
    "ps_flat_tree": lambda size: Formula((Sent(size.workers, 1.0, flights=1), Sent(size.lg, 1.0)), size.workers - 1.0),
    "ps_tree": lambda size: Formula((Sent(2 * size.lg, 1.0),), float(size.lg)),
    "reduce_scatter": lambda size: _half(size, True),
    "all_gather": lambda size: _half(size, False),
    "direct_reduce_scatter": lambda size: _direct_half(size, True),
    "direct_all_gather": lambda size: _direct_half(size, False),
    "broadcast": lambda size: Formula((Sent(size.lg, 1.0),), 0.0),
}
"""By the algorithm's name; those of parameter servers that no plan here has stand beside."""
