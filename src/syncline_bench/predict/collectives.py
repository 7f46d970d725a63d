"""Predicts the times of collectives alone: from their plans, or from closed formulas if the plans are too large.

Owns the checks of the question, the choice between plan and formula (``formulas``), and the interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from syncline import registry
from syncline.costs.cluster import Cluster, End, Switch
from syncline.costs.plans import ProcessPlacement, plan_time
from syncline.errors import UsageError
from syncline.nouns import Group
from syncline.plans.plan import Plan
from syncline.strategy.grammar import Part, nearest, read_part
from syncline.strategy.words import bind, build, roles_of, write

from ..report.files import STANDARD_OUTPUT, result_paths
from ..report.predictions import CollectivePrediction, CollectiveRow, render_collectives
from .formulas import FORMULAS, Size, closed_s, formula_of, has_formula, is_too_large, messages_of, name_of, too_many
from .networks import WITHOUT_NATIVE, load_network

_QUICK = 1_000_000
"""The most messages of a plan that is timed if a formula is known."""


@dataclass(frozen=True)
class Asked:
    """An algorithm with its arguments, size and placement; ``part`` is None for a formula without a plan."""

    text: str
    part: Part | None
    size: Size
    placement: ProcessPlacement

    @property
    def formula(self) -> str:
        """The name of its formula; empty if it has none."""
        return self.text if self.part is None else name_of(self.part, self.size)

    @property
    def native(self) -> bool:
        """Whether a message library sums inside hosts."""
        return self.part is not None and self.part.arguments.get("inside") == "native"


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
    if asked.part is None:
        formula_of(asked.formula, asked.size, cluster)  # raises, with the reason, if there is none
        return "formula"
    known = has_formula(asked.formula, asked.size, cluster)
    if not is_too_large(asked.part, asked.size) and not (known and (messages_of(asked.part, asked.size) or 0) > _QUICK):
        return "plan"
    if known:
        return "formula"
    raise UsageError(
        f"the plan of {asked.text} with {too_many(asked.part, asked.size)} is too large to simulate, and there is no"
        f" closed formula for {cluster.topology} with {asked.size.per_host} workers on a host: predict fewer workers"
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
    if cluster.native is None and any(one.native and one.size.per_host > 1 for one in asked):
        notes.append(f"Network {cluster.name} {WITHOUT_NATIVE}")
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
