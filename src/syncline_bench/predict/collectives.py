"""Collectives alone: what algorithms take on a network, by their plans or, where these are too large, by formulas.

Owns what may be asked, which of the two answers, and the interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from syncline import registry
from syncline.costs.cluster import Cluster, End, Switch
from syncline.costs.formulas import FORMULAS, Size, closed_s, formula_of, has_formula
from syncline.costs.plans import ProcessPlacement, plan_time
from syncline.errors import UsageError
from syncline.nouns import Group
from syncline.plans.plan import Plan
from syncline.strategy.grammar import Part, nearest, read_part
from syncline.strategy.parts import bind, build, roles_of, write
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import AUTO

from ..report import prediction_table
from ..report.files import STANDARD_OUTPUT, result_paths
from ..report.prediction_rows import CollectivePrediction, CollectiveRow
from .networks import load_network

_QUICK, _MOST = 1_000_000, 10_000_000
"""Messages of a plan that is timed though a formula is known, and of any that is."""

_MOST_WORKERS = 8192
"""Those of an algorithm of which nobody knows how many messages it has."""


@dataclass(frozen=True)
class Asked:
    """An algorithm, with its arguments, on so many workers; ``part`` is None for a formula that no plan has."""

    text: str
    part: Part | None
    size: Size
    placement: ProcessPlacement

    @property
    def formula(self) -> str:
        """The name of the formula that is its own, if there is one."""
        if self.part is None:
            return self.text
        served = self.part.arguments.get("on") == "workers"
        return "direct" if served and self.size.servers == self.size.workers else "" if served else self.part.name

    @property
    def messages(self) -> float | None:
        """About how many messages its plan has."""
        if self.formula not in FORMULAS:
            return None
        return FORMULAS[self.formula](self.size).messages * self.size.workers if self.size.workers > 1 else 0.0


def predict_collectives(
    texts: Sequence[str], sizes: Sequence[int], workers: Sequence[int], cluster: Cluster, per_node: int | None = None
) -> CollectivePrediction:
    """The times of algorithms for arrays of so many bytes; raises UsageError, with the remedy, before any is computed.

    ``per_node`` workers are on each host, by default as many as the network says. Takes seconds for plans of a million
    messages.
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
    """What a text such as ``ring`` or ``ps(servers=2)`` asks for; raises UsageError, naming the nearest, if nothing."""
    part = read_part(text)
    part = Part(part.name.replace("-", "_"), part.args)  # as bench --collective writes them
    per_host = min(workers, per_node or cluster.per_host)
    plans = registry.names("algorithms")
    if part.name in FORMULAS and part.name not in plans and not part.args:
        return Asked(part.name, None, Size(workers, per_host), ProcessPlacement(Group(workers), per_host))
    if part.name not in plans:
        known = sorted({*plans, *FORMULAS})
        raise UsageError(
            f"unknown algorithm {text!r}{nearest(part.name, known) or '.'} Algorithms are {', '.join(known)}; what a"
            " library does by itself has no plan"
        )
    part = bind("algorithms", part)
    roles = roles_of(part)
    nodes = tuple(worker // per_host for worker in range(workers)) if per_host > 1 else ()
    group = Group(workers, 0 if roles is None else roles.servers, nodes)
    size = Size(workers, per_host, 1 if roles is None else roles.owners)
    return Asked(write("algorithms", part), part, size, ProcessPlacement(group, per_host))


def answered_by(asked: Asked, cluster: Cluster) -> str:
    """``plan``, or ``formula`` where a plan would take long; raises UsageError where neither can be had."""
    messages, known = asked.messages, has_formula(asked.formula, asked.size, cluster)
    if asked.part is None:
        formula_of(asked.formula, asked.size, cluster)  # says why there is none
        return "formula"
    if asked.size.workers <= _MOST_WORKERS if messages is None else messages <= (_QUICK if known else _MOST):
        return "plan"
    if known:
        return "formula"
    many = f"about {messages:,.0f} messages" if messages is not None else f"{asked.size.workers:,} workers"
    raise UsageError(
        f"the plan of {asked.text} with {many} is too large to be timed, and there is no closed formula for it on"
        f" {cluster.topology} with {asked.size.per_host} workers on a host: ask for fewer workers"
    )


def check_plan(strategy: Strategy, cluster: Cluster, workers: int, per_host: int | None = None) -> None:
    """Raise UsageError, before the plan is made, for a strategy whose plan would be too large to be simulated."""
    per_host = min(workers, per_host or cluster.per_host)
    part = strategy.architecture
    if part == AUTO:  # what it becomes has no fewer messages than the first of these
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
        f"the plan of {asked.text} has {many}, and no more than {most} are simulated: ask for fewer workers, or for the"
        f" exchange alone by a formula, with --collective {part.name}"
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
            raise UsageError(f"{option} names one twice: {', '.join(map(str, values))}")
    if min(workers) < 1:
        raise UsageError(f"--workers has to be 1 or more, got {min(workers)}")
    if per_node is not None and per_node < 1:
        raise UsageError(f"--per-node has to be 1 or more, got {per_node}")


def _notes(asked: Sequence[Asked], cluster: Cluster) -> list[str]:
    """What the answer cannot depend on, though one might think it does."""
    notes = []
    if cluster.inside is None and any(one.size.per_host > 1 for one in asked):
        notes.append(
            f"Network {cluster.name} does not say how ranks of one host talk: their messages go through the host's port"
            " as all others do (inside.alpha and inside.beta would tell)."
        )
    if not isinstance(cluster.topology, Switch) and all(one.size.workers <= one.size.per_host for one in asked):
        notes.append(f"All workers are on one host: the topology {cluster.topology} makes no difference.")
    if cluster.gamma_s_per_byte == 0:
        notes.append("Adding takes no time on this network: gamma is 0.")
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
    """Predict collectives, print the table and write the file; raises UsageError before anything is computed.

    ``origin`` says in the file where, when and with which code it was made.
    """
    (target,) = result_paths({"--json": json_path})
    console = console or Console(stderr=target == STANDARD_OUTPUT)
    result = replace(predict_collectives(texts, sizes, workers, load_network(network), per_node), **origin)
    if target is not None:
        result.save(target)
    console.print(prediction_table.render(result, console.width))
