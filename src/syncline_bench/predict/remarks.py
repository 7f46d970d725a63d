"""What a reader has to know of a prediction: what it assumes, and what it cannot depend on although it was varied.

Owns the sentences, and the simulations that show whether something matters: what was given is changed, and a
prediction that does not move by ``NOTHING`` of itself is said not to depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.strategy.parts import write
from syncline.strategy.words import NONE

from ..report.forecast_rows import Predicted
from .asked import Question
from .cluster import Cluster
from .holdout import USUAL, Holdout
from .topology import Switch
from .vary import SHARED, Varied, unranged

NOTHING = 0.001
"""The share of an iteration below which a change of it is none."""

Cases = Sequence[tuple[Predicted, Varied]]


def remarks(asked: Question, cases: Cases, held_out: Sequence[Holdout | None]) -> list[str]:
    """All of them, those on what was varied in vain first."""
    found = [*_alike_networks(asked, cases), *_alike_strategies(cases)]
    for cluster, holdout in zip(asked.clusters, held_out, strict=True):
        its = [(row, varied) for row, varied in cases if row.network == cluster.name]
        found += _in_vain(cluster, its)
        found += _hosts(asked, cluster, its)
        found += _assumed(cluster, its)
        found.append(_error(cluster, holdout))
    return found


def _alike_networks(asked: Question, cases: Cases) -> Iterator[str]:
    names = [cluster.name for cluster in asked.clusters]
    for at, first in enumerate(names):
        for second in names[at + 1 :]:
            if _times(cases, "network", first) == _times(cases, "network", second):
                yield f"{first} and {second} are predicted alike: nothing here depends on what they differ by."


def _alike_strategies(cases: Cases) -> Iterator[str]:
    names = list(dict.fromkeys(row.requested for row, _ in cases))
    for at, first in enumerate(names):
        for second in names[at + 1 :]:
            if _times(cases, "requested", first) == _times(cases, "requested", second):
                yield f"{first} and {second} are predicted alike: the model knows no difference between them here."


def _times(cases: Cases, what: str, name: str) -> list[str]:
    return [f"{row.iteration_s:.9g}" for row, _ in cases if getattr(row, what) == name]


def _in_vain(cluster: Cluster, cases: Cases) -> Iterator[str]:
    """Constants that were given, or a topology, on which nothing depends."""
    given = [name for name, one in cluster.constants.items() if one.source == "given" and one.value > 0]
    idle = [name for name in given if not any(_matters(varied, name) for _, varied in cases)]
    if idle:
        yield (
            f"{cluster.name}: no row depends on {', '.join(idle)}: twice as much changes no iteration by"
            f" {100 * NOTHING:g} %."
        )
    if not isinstance(cluster.topology, Switch) and not any(
        varied.would_save_s.get(SHARED, 0.0) > NOTHING * row.iteration_s for row, varied in cases
    ):
        yield f"{cluster.name}: no row depends on the topology {cluster.topology}: ports are busier than its links."


def _matters(varied: Varied, name: str) -> bool:
    cluster, nominal_s = varied.setting.cluster, varied.nominal.iteration_s
    if not varied.uses(name):
        return False
    twice = cluster.replaced({name: 2 * cluster.constants[name].value})
    return abs(varied.seconds(twice) - nominal_s) > NOTHING * nominal_s


def _hosts(asked: Question, cluster: Cluster, cases: Cases) -> Iterator[str]:
    if cluster.inside is None and any(row.per_node > 1 for row, _ in cases):
        yield (
            f"{cluster.name} has no constants of links inside hosts: ranks of one host are predicted to talk over its"
            " port, as if they were on others; give inside.alpha and inside.beta."
        )
    if asked.per_node is None and cluster.per_host > 1:
        yield f"{cluster.name} has {cluster.per_host} workers on each host, unless --per-node says otherwise."


def _assumed(cluster: Cluster, cases: Cases) -> Iterator[str]:
    codecs = {varied.setting.strategy.codec for _, varied in cases} - {NONE}
    free = sorted(text for codec in codecs if (text := write("codecs", codec)) not in cluster.codecs)
    if free:
        yield (
            f"{cluster.name} does not say what {', '.join(free)} cost: encoding and decoding are assumed to take no"
            " time, so these rows are the least they can be; `syncline bench-codecs` measures them."
        )
    if not cluster.constants.get("update"):
        yield f"{cluster.name} does not say what an update costs: it is assumed to take no time."
    assumed = [name for name, one in cluster.constants.items() if not one.measured and one.source != "given"]
    if assumed:
        yield f"{cluster.name}: assumed and not measured: {', '.join(assumed)}."
    if bare := unranged(cluster):
        yield f"{cluster.name}: intervals know nothing of what {', '.join(bare)} may be: no range is known."


def _error(cluster: Cluster, holdout: Holdout | None) -> str:
    if holdout is None:
        return (
            f"{cluster.name}: no measurements of this network to hold the model against; intervals have the"
            " constants' ranges only."
        )
    fitted = f"; constants were fitted on {holdout.fitted}" if holdout.fitted else ""
    return (
        f"{cluster.name}: on {holdout.count} measurements that nothing was fitted on the model is off by"
        f" {100 * holdout.mean:.1f} % in the mean and {100 * holdout.worst:.1f} % at worst ({holdout.source},"
        f" {holdout.date}{fitted}); intervals are wider by the {100 * holdout.usual:.1f} % that {100 * USUAL:g} % of"
        " them keep to."
    )
