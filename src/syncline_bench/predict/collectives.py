"""Predicts the times of collectives alone: from their plans, or from closed formulas if the plans are too large.

Owns the checks of the question, the choice between plan and formula, and the interval. A formula holds for one switch,
and for messages that pass a port one after the other. Tests compare the times of plans (``costs.plans``) with them.

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
several ranks each has the pace of the slower link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from syncline import registry
from syncline.costs.cluster import Cluster, End, Switch
from syncline.costs.plans import ProcessPlacement, plan_time
from syncline.errors import UsageError
from syncline.nouns import Group
from syncline.plans.plan import Plan
from syncline.strategy.grammar import Part, nearest, read_part
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import AUTO, bind, build, roles_of, write

from ..report.files import STANDARD_OUTPUT, result_paths
from ..report.predictions import CollectivePrediction, CollectiveRow, render_collectives
from .networks import load_network


class Sent(NamedTuple):
    """A number of messages in sequence, each with the same share of the array."""

    messages: float
    share: float
    inside: bool = False
    flights: float | None = None
    """The number of flights in sequence (messages that wait for an arrival); None: one per message."""


@dataclass(frozen=True)
class Formula:
    """The work of the busiest rank: its messages, and the share of the array that it adds."""

    sent: tuple[Sent, ...]
    added: float

    @property
    def messages(self) -> float:
        """The number of messages that its port carries."""
        return sum(one.messages for one in self.sent)

    def seconds(self, nbytes: float, cluster: Cluster) -> float:
        """The time for an array of ``nbytes``."""
        total = self.added * nbytes * cluster.gamma_s_per_byte
        for one in self.sent:
            link = cluster.inside if one.inside and cluster.inside is not None else cluster.between
            flights = one.messages if one.flights is None else one.flights
            total += one.messages * link.busy_s(one.share * nbytes) + flights * link.flight_s
        return total


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
    return _on_slower_links(FORMULAS[algorithm](size), algorithm, size, cluster)


def has_formula(algorithm: str, size: Size, cluster: Cluster) -> bool:
    """Whether an algorithm has a formula for this size and cluster."""
    return algorithm in FORMULAS and _without(algorithm, size, cluster) is None


_RINGS = ("ring", "reduce_scatter", "all_gather")


def _without(algorithm: str, size: Size, cluster: Cluster) -> str | None:
    """The reason why there is no formula, or None."""
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
    """The formula for several workers per host: a ring's slower link, or the port that ranks share."""
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
"""The formulas by name. ``ps_flat_tree`` and ``ps_tree`` are ways of a parameter server that have no plan here."""


_QUICK, _MOST = 1_000_000, 10_000_000
"""The most messages of a plan that is timed: if a formula is known, and otherwise."""

_MOST_WORKERS = 8192
"""The most workers of a plan whose number of messages is unknown beforehand."""


@dataclass(frozen=True)
class Asked:
    """An algorithm with its arguments, size and placement; ``part`` is None for a formula without a plan."""

    text: str
    part: Part | None
    size: Size
    placement: ProcessPlacement

    @property
    def formula(self) -> str:
        """The name of its formula, if there is one."""
        if self.part is None:
            return self.text
        served = self.part.arguments.get("on") == "workers"
        if self.part.arguments.get("local"):
            return ""
        return "direct" if served and self.size.servers == self.size.workers else "" if served else self.part.name

    @property
    def messages(self) -> float | None:
        """The approximate number of messages of its plan; None if unknown."""
        if self.formula not in FORMULAS:
            return None
        return FORMULAS[self.formula](self.size).messages * self.size.workers if self.size.workers > 1 else 0.0


def predict_collectives(
    texts: Sequence[str], sizes: Sequence[int], workers: Sequence[int], cluster: Cluster, per_node: int | None = None
) -> CollectivePrediction:
    """Predict the times of algorithms for arrays of these sizes in bytes. Raises UsageError before the computation.

    Each host has ``per_node`` workers, by default the network's number. A plan of a million messages takes seconds.
    """
    _check(texts, sizes, workers, per_node)
    asked = [asked_of(text, count, cluster, per_node) for count in workers for text in texts]
    ways = [(one, answered_by(one, cluster)) for one in asked]
    rows = [row for one, way in ways for row in _rows(one, way, sizes, cluster)]
    rows.sort(key=lambda row: (workers.index(row.workers), sizes.index(row.bytes)))
    constants = {
        name: {item.name: getattr(constant, item.name) for item in fields(constant)}
        for name, constant in cluster.constants.items()
    }
    return CollectivePrediction(
        network=cluster.name,
        about=cluster.about,
        source=cluster.source,
        date=cluster.date,
        topology=str(cluster.topology),
        ports_per_host=cluster.ports_per_host,
        constants=constants,
        assumed=[name for name, constant in cluster.constants.items() if not constant.measured],
        notes=_notes(asked, cluster),
        rows=tuple(rows),
    )


def asked_of(text: str, workers: int, cluster: Cluster, per_node: int | None = None) -> Asked:
    """Parse a text such as ``ring`` or ``ps(servers=2)``. Raises UsageError, with the nearest name, if unknown."""
    part = read_part(text)
    part = Part(part.name.replace("-", "_"), part.args)  # as bench --collective writes them
    per_host = min(workers, per_node or cluster.per_host)
    plans = registry.names("algorithms")
    if part.name in FORMULAS and part.name not in plans and not part.args:
        return Asked(part.name, None, Size(workers, per_host), ProcessPlacement(Group(workers), per_host))
    if part.name not in plans:
        known = sorted({*plans, *FORMULAS})
        raise UsageError(
            f"unknown algorithm {text!r}{nearest(part.name, known) or '.'} Algorithms are {', '.join(known)}; the"
            " collectives of other libraries cannot be predicted"
        )
    part = bind("algorithms", part)
    roles = roles_of(part)
    nodes = tuple(worker // per_host for worker in range(workers)) if per_host > 1 else ()
    group = Group(workers, 0 if roles is None else roles.servers, nodes)
    size = Size(workers, per_host, 1 if roles is None else roles.owners)
    return Asked(write("algorithms", part), part, size, ProcessPlacement(group, per_host))


def answered_by(asked: Asked, cluster: Cluster) -> str:
    """``plan``, or ``formula`` if the plan would take too long. Raises UsageError if there is neither."""
    messages, known = asked.messages, has_formula(asked.formula, asked.size, cluster)
    if asked.part is None:
        formula_of(asked.formula, asked.size, cluster)  # raises, with the reason, if there is none
        return "formula"
    if asked.size.workers <= _MOST_WORKERS if messages is None else messages <= (_QUICK if known else _MOST):
        return "plan"
    if known:
        return "formula"
    many = f"about {messages:,.0f} messages" if messages is not None else f"{asked.size.workers:,} workers"
    raise UsageError(
        f"the plan of {asked.text} with {many} is too large to simulate, and there is no closed formula for"
        f" {cluster.topology} with {asked.size.per_host} workers on a host: predict fewer workers"
    )


def check_plan(strategy: Strategy, cluster: Cluster, workers: int, per_host: int | None = None) -> None:
    """Raise UsageError if a strategy's plan would be too large for a simulation, before the plan is made."""
    per_host = min(workers, per_host or cluster.per_host)
    part = strategy.architecture
    if part == AUTO:  # no candidate of auto has fewer messages than this
        part = Part("ring" if per_host in (1, workers) else "hierarchical")
    roles = roles_of(part)
    size = Size(workers, per_host, 1 if roles is None else roles.owners)
    asked = Asked(write("algorithms", part), part, size, ProcessPlacement(Group(workers), per_host))
    messages = asked.messages
    if workers <= _MOST_WORKERS if messages is None else messages <= _MOST:
        return
    many = f"about {messages:,.0f} messages" if messages is not None else f"{workers:,} workers"
    most = f"{_MOST:,} messages" if messages is not None else f"{_MOST_WORKERS:,} workers"
    raise UsageError(
        f"the plan of {asked.text} has {many}, and at most {most} are simulated: predict fewer workers, or the exchange"
        f" alone from a formula, with --collective {part.name}"
    )


def _rows(asked: Asked, way: str, sizes: Sequence[int], cluster: Cluster) -> list[CollectiveRow]:
    plan = None
    if way == "plan" and asked.part is not None:
        plan = build("algorithms", asked.part, asked.placement.group)
    ends: tuple[End | None, ...] = (None, "low", "high")
    clusters = [cluster if end is None else cluster.at(end) for end in ends]
    rows = []
    for size in sizes:
        comm_s, low_s, high_s = (_seconds(asked, plan, size, one) for one in clusters)
        rows.append(
            CollectiveRow(asked.text, size, asked.size.workers, comm_s, low_s, high_s, asked.size.per_host, way)
        )
    return rows


def _seconds(asked: Asked, plan: Plan | None, nbytes: int, cluster: Cluster) -> float:
    if plan is None:
        return closed_s(asked.formula, nbytes, asked.size, cluster)
    return plan_time(plan, nbytes, cluster, asked.placement.hosts).whole_s


def _check(texts: Sequence[str], sizes: Sequence[int], workers: Sequence[int], per_node: int | None) -> None:
    given: Mapping[str, Sequence[Any]] = {"--collective": texts, "--bytes": sizes, "--workers": workers}
    for option, values in given.items():
        if not values:
            raise UsageError(
                f"{option} is missing: predict --collective ring --bytes 60.97MB --workers 8 --network 10gbe"
            )
        if len(set(values)) < len(values):
            raise UsageError(f"{option} has a duplicate: {', '.join(map(str, values))}; leave it out")
    if min(workers) < 1:
        raise UsageError(f"--workers has to be 1 or more, got {min(workers)}")
    if per_node is not None and per_node < 1:
        raise UsageError(f"--per-node has to be 1 or more, got {per_node}")


def _notes(asked: Sequence[Asked], cluster: Cluster) -> list[str]:
    """Notes on properties of the network that do not affect the answer, although a reader may expect it."""
    notes = []
    if cluster.inside is None and any(one.size.per_host > 1 for one in asked):
        notes.append(
            f"Network {cluster.name} has no links inside hosts (inside.alpha and inside.beta): messages between ranks"
            " of one host are assumed to pass the host's port."
        )
    if not isinstance(cluster.topology, Switch) and all(one.size.workers <= one.size.per_host for one in asked):
        notes.append(f"All workers are on one host, so the topology {cluster.topology} has no effect.")
    if cluster.gamma_s_per_byte == 0:
        notes.append("Additions take no time on this network: gamma is 0.")
    return notes


def collectives(
    texts: Sequence[str],
    sizes: Sequence[int],
    workers: Sequence[int],
    network: str,
    *,
    origin: Mapping[str, Any],
    per_node: int | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> None:
    """Predict collectives, print the table and write the file. Raises UsageError before the computation.

    ``origin`` comes from ``machine.provenance`` and becomes part of the file.
    """
    (target,) = result_paths({"--json": json_path})
    console = console or Console(stderr=target == STANDARD_OUTPUT)
    result = replace(predict_collectives(texts, sizes, workers, load_network(network), per_node), **origin)
    if target is not None:
        result.save(target)
    console.print(render_collectives(result))
