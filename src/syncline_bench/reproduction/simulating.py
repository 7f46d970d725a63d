"""Runs the simulator for the chapters: collectives by name, and iterations under the text of a strategy.

Plans and iterations are those of ``predict``. The systems of the papers differ from Syncline in two habits: their
workers do not agree on a step beforehand, and some run one exchange at a time.
"""

from __future__ import annotations

from functools import lru_cache

from syncline.costs import plans
from syncline.costs.cluster import Cluster
from syncline.nouns import Group
from syncline.plans.plan import COPY, REDUCE, Plan
from syncline.strategy.strategy import Strategy

from ..predict import settings
from ..predict.iterations import simulate
from ..predict.settings import Habits, setting_of

THEIRS = Habits(tickets=False)
"""Systems whose workers exchange no tickets before a step."""

ONE_BY_ONE = Habits(in_flight=1, tickets=False)
"""Systems that also wait for each exchange before the next."""

FLAT_AND_TREE, TREE = "flat in, tree out", "tree in, tree out"
"""Two ways of one server: it gathers gradients directly or along a tree, and broadcasts weights along a tree."""


def collective_s(algorithm: str, nbytes: float, workers: int, cluster: Cluster, per_host: int = 1) -> float:
    """The seconds of a single collective: an architecture's plan, or one of a server's two ways."""
    plan, placement = _plan(algorithm, workers, per_host)
    return plans.plan_s(plan, nbytes, cluster, placement)


@lru_cache(maxsize=128)
def _plan(algorithm: str, workers: int, per_host: int) -> tuple[Plan, plans.ProcessPlacement]:
    if algorithm == TREE:
        return _plan("tree", workers, per_host)
    if algorithm == FLAT_AND_TREE:
        return _flat_and_tree(workers)
    strategy = Strategy.parse(algorithm)
    nodes = tuple(worker // per_host for worker in range(workers)) if per_host > 1 else ()
    group = Group(workers, strategy.servers, nodes)
    return strategy.plan(group), plans.ProcessPlacement(group, per_host)


def _flat_and_tree(workers: int) -> tuple[Plan, plans.ProcessPlacement]:
    """A plan in which rank 0 receives from all other ranks one by one, and broadcasts along a tree."""
    tree, placement = _plan("tree", workers, 1)
    gathers = [(0, rank, 0, 0, tree.chunks, REDUCE) for rank in range(1, workers)]
    back = tree.rows[tree.op == COPY]
    rows = [*gathers, *((row[0] + 1, *row[1:]) for row in back.tolist())]
    return Plan.of(FLAT_AND_TREE, workers, tree.chunks, rows), placement


def iteration(
    text: str,
    cluster: Cluster,
    workers: int,
    model: settings.Model,
    habits: Habits = THEIRS,
    per_host: int | None = None,
) -> settings.Iteration:
    """Simulate a model under a strategy. Returns the mean iteration."""
    return simulate(setting_of(Strategy.parse(text), cluster, workers, per_host), model, habits)


def efficiency(text: str, cluster: Cluster, workers: int, model: settings.Model, habits: Habits = THEIRS) -> float:
    """The scaling efficiency: throughput relative to that of the same workers without any exchange."""
    return model.computing_s / iteration(text, cluster, workers, model, habits).iteration_s
