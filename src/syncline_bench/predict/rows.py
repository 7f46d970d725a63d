"""Makes the rows of a prediction: one per strategy, number of workers and network, each with an interval.

Owns the sequence of a prediction and its remarks: the number of workers where scaling ends, the fastest strategies, the
assumptions, and the inputs that have no effect. ``iterations`` simulates, ``vary`` does so with other constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from syncline.costs.cluster import SLOWDOWN, Cluster, Switch
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import NONE, write
from syncline.sync import Mixes

from ..report.files import STANDARD_OUTPUT, replace_text, result_paths
from ..report.predictions import Predicted, Prediction, Stated, render
from .asked import Asked, Question, Settled, question, settled, worker_counts
from .iterations import simulate
from .networks import USUAL, WITHOUT_NATIVE, Holdout, holdout_of
from .settings import Exchanges, Habits, Model, Setting, lay_out, setting_of
from .vary import SHARED, Found, Varied, break_even, unranged


def predict(asked: Question) -> Prediction:
    """Predict all rows. Each row takes some ten to thirty simulations, which need seconds."""
    single_s = {cluster.name: single_worker_s(asked.model, cluster) for cluster in asked.clusters}
    held_out = [holdout_of(cluster.name) if cluster.ready_made else None for cluster in asked.clusters]
    cases: list[tuple[Predicted, Varied]] = []
    for cluster, holdout in zip(asked.clusters, held_out, strict=True):
        for workers in asked.workers:
            for one in asked.asked:
                found = settled(one, cluster, workers, asked.per_node, asked.model)
                varied = Varied(found.setting, asked.model, found.iteration, one.habits)
                cases.append((_row(asked, one, found, varied, holdout, single_s[cluster.name]), varied))
    rows = tuple(row for row, _ in cases)
    return Prediction(
        workload=asked.workload,
        rows=rows,
        constants=_all_stated(asked.clusters),
        single_s=single_s,
        knees=knees(rows),
        winners=winners(rows),
        break_even=break_even(asked),
        holdout=tuple(asdict(one) for one in held_out if one is not None),
        warnings=tuple(remarks(asked, cases, held_out)),
        price=asked.price,
        epoch_images=asked.epoch_images,
    )


def single_worker_s(model: Model, cluster: Cluster) -> float:
    """The iteration time of a single worker, which exchanges nothing."""
    alone = cluster.replaced(dict.fromkeys(("bucket", "message"), 0.0))
    even = replace(model, speed=replace(model.speed, slow_rank=None, slowdown=1.0))
    setting = setting_of(Strategy.parse("ring schedule=fifo"), alone, 1)
    return simulate(setting, even, Habits(tickets=False)).iteration_s


def _row(
    asked: Question, one: Asked, found: Settled, varied: Varied, holdout: Holdout | None, single_s: float
) -> Predicted:
    setting, iteration, model = found.setting, found.iteration, asked.model
    low_s, high_s = varied.interval(0.0 if holdout is None else holdout.usual)
    name, remedy = varied.bottleneck()
    seconds, workers = iteration.iteration_s, setting.workers
    images_per_s = model.batch * workers / seconds
    epoch_s = None if asked.epoch_images is None else asked.epoch_images / images_per_s
    stages = ("loading_s", "h2d_s", "forward_s", "backward_s", "update_s", "other_s")
    return Predicted(
        strategy=str(setting.strategy),
        requested=one.name,
        network=setting.cluster.name,
        workers=workers,
        per_node=setting.placement.per_host,
        servers=setting.placement.group.servers,
        batch=model.batch * workers,
        iteration_s=seconds,
        low_s=low_s,
        high_s=high_s,
        images_per_s=images_per_s,
        scaling_efficiency=single_s / seconds,
        comm_s=max(iteration.busy_s.get(name, 0.0) for name in ("port", "back", "inside", "serving")),
        exposed_comm_s=iteration.exposed_s,
        bottleneck=name,
        remedy=remedy,
        would_save_s=dict(varied.would_save_s),
        bytes_sent_per_step=sent_bytes(setting, model),
        chosen=found.chosen,
        note=one.note,
        model="plan" if setting.formula is None or isinstance(setting.strategy.sync_mode(), Mixes) else "formula",
        epoch_s=epoch_s,
        price=None if asked.price is None or epoch_s is None else asked.price * workers * epoch_s / 3600,
        **{name: getattr(iteration, name) for name in stages},
    )


def sent_bytes(setting: Setting, model: Model) -> float | None:
    """The mean bytes that a worker sends per iteration; None if some steps do not exchange all gradients."""
    mode = setting.strategy.sync_mode()
    if setting.alone or not mode.merges or hasattr(mode, "averages"):
        return None
    buckets = lay_out(setting, model).buckets
    exchanges = Exchanges(setting, model.layers, buckets)
    return sum(exchanges.sent_bytes(bucket) for bucket in buckets)


def _all_stated(clusters: Sequence[Cluster]) -> tuple[Stated, ...]:
    return tuple(
        Stated(cluster.name, name, one.value, *one.range, one.measured, one.source)
        for cluster in clusters
        for name, one in cluster.constants.items()
    )


KNEE = 1.5
"""Scaling ends where a doubling of the workers multiplies the throughput by less than this."""


def knees(rows: Sequence[Predicted]) -> Found:
    """For each network and strategy, the number of workers where scaling ends: see ``KNEE``.

    Between numbers of workers that are not doublings, the factor is raised to the number of doublings. ``workers`` is
    None if scaling continues up to the largest predicted number.
    """
    found = []
    for (network, requested), its in _by(rows, lambda row: (row.network, row.requested)):
        ordered = sorted(its, key=lambda row: row.workers)
        if len(ordered) < 2:
            continue
        at = None
        for here, there in pairwise(ordered):
            doublings = math.log2(there.workers / here.workers)
            if there.images_per_s < here.images_per_s * KNEE**doublings:
                at = here.workers
                break
        found.append({"network": network, "strategy": requested, "workers": at})
    return tuple(found)


def winners(rows: Sequence[Predicted]) -> Found:
    """For each network and number of workers, the fastest strategy. It is clear if its interval is below all others."""
    found = []
    for (network, workers), its in _by(rows, lambda row: (row.network, row.workers)):
        best, *others = sorted(its, key=lambda row: row.iteration_s)
        if others:
            clear = all(best.high_s < other.low_s for other in others)
            found.append({"network": network, "workers": workers, "strategy": best.requested, "clear": clear})
    return tuple(found)


def _by(
    rows: Sequence[Predicted], key: Callable[[Predicted], tuple[str, object]]
) -> list[tuple[tuple[str, object], list[Predicted]]]:
    order = list(dict.fromkeys(key(row) for row in rows))
    return [(one, [row for row in rows if key(row) == one]) for one in order]


NOTHING = 0.001
"""The share of an iteration below which a change counts as no effect."""


Cases = Sequence[tuple[Predicted, Varied]]


def remarks(asked: Question, cases: Cases, held_out: Sequence[Holdout | None]) -> list[str]:
    """All remarks, first those on strategies or networks with equal predictions."""
    networks = [cluster.name for cluster in asked.clusters]
    strategies = list(dict.fromkeys(row.requested for row, _ in cases))
    found = [
        *_alike(cases, "network", networks, "no row depends on their differences"),
        *_alike(cases, "requested", strategies, "the model makes no difference between them here"),
    ]
    for cluster, holdout in zip(asked.clusters, held_out, strict=True):
        its = [(row, varied) for row, varied in cases if row.network == cluster.name]
        found += _in_vain(cluster, its)
        found += _hosts(asked, cluster, its)
        found += _assumed(cluster, its)
        found.append(_error(cluster, holdout))
    return found


def _alike(cases: Cases, what: str, names: Sequence[str], why: str) -> Iterator[str]:
    for first, second in combinations(names, 2):
        if _times(cases, what, first) == _times(cases, what, second):
            yield f"{first} and {second} have equal predictions: {why}."


def _times(cases: Cases, what: str, name: str) -> list[str]:
    return [f"{row.iteration_s:.9g}" for row, _ in cases if getattr(row, what) == name]


def _in_vain(cluster: Cluster, cases: Cases) -> Iterator[str]:
    """Remarks on given constants, or a topology, that have no effect on any row."""
    given = [name for name, one in cluster.constants.items() if one.source == "given" and one.value > 0]
    idle = [name for name in given if not any(_matters(varied, name) for _, varied in cases)]
    if idle:
        yield (
            f"{cluster.name}: no row depends on {', '.join(idle)}: a doubled value changes no iteration by"
            f" {100 * NOTHING:g} %."
        )
    if not isinstance(cluster.topology, Switch) and not any(
        varied.would_save_s.get(SHARED, 0.0) > NOTHING * row.iteration_s for row, varied in cases
    ):
        yield f"{cluster.name}: no row depends on the topology {cluster.topology}: the ports are busier than the links."


def _matters(varied: Varied, name: str) -> bool:
    cluster, nominal_s = varied.setting.cluster, varied.nominal.iteration_s
    if not varied.uses(name):
        return False
    twice = cluster.replaced({name: 2 * cluster.constants[name].value})
    return abs(varied.seconds(twice) - nominal_s) > NOTHING * nominal_s


def _hosts(asked: Question, cluster: Cluster, cases: Cases) -> Iterator[str]:
    if cluster.inside is None and any(row.per_node > 1 for row, _ in cases):
        yield (
            f"{cluster.name} has no constants of links inside hosts: messages between ranks of one host are assumed to"
            " pass the host's port; give inside.alpha and inside.beta."
        )
    native = any(varied.setting.strategy.native_inside for _, varied in cases)
    if cluster.native is None and native:
        yield f"{cluster.name} {WITHOUT_NATIVE}"
    if asked.per_node is None and cluster.per_host > 1:
        yield f"{cluster.name} has {cluster.per_host} workers on each host; --per-node changes that."


def _assumed(cluster: Cluster, cases: Cases) -> Iterator[str]:
    codecs = {varied.setting.strategy.codec for _, varied in cases} - {NONE}
    free = sorted(text for codec in codecs if (text := write("codecs", codec)) not in cluster.codecs)
    if free:
        yield (
            f"{cluster.name} has no costs of {', '.join(free)}: encoding and decoding are assumed to take no time, so"
            " these rows are lower bounds; `syncline bench codecs` measures the costs."
        )
    if not cluster.constants.get("update"):
        yield f"{cluster.name} has no cost of an update: it is assumed to take no time."
    device = cases[0][1].model.device if cases else ""
    if SLOWDOWN + device not in cluster.constants:
        where = f"on {device}" if device else "whose device the trace does not name"
        yield f"{cluster.name} has no slowdown of layers {where}: they are assumed to lose no time beside messages."
    if "tensor" not in cluster.constants:
        yield (
            f"{cluster.name} has no time of a gradient in the training thread (tensor): it is assumed to take none"
            " beside its messages."
        )
    assumed = [name for name, one in cluster.constants.items() if not one.measured and one.source != "given"]
    if assumed:
        yield f"{cluster.name}: assumed and not measured: {', '.join(assumed)}."
    if bare := unranged(cluster):
        yield f"{cluster.name}: the intervals exclude the uncertainty of {', '.join(bare)}, whose range is unknown."


def _error(cluster: Cluster, holdout: Holdout | None) -> str:
    if holdout is None:
        return (
            f"{cluster.name}: no measurements of this network exist to test the model; the intervals contain only the"
            " constants' ranges."
        )
    fitted = f"; constants were fitted on {holdout.fitted}" if holdout.fitted else ""
    return (
        f"{cluster.name}: on {holdout.count} held-out measurements the error of the model is"
        f" {100 * holdout.mean:.1f} % on average and {100 * holdout.worst:.1f} % at worst ({holdout.source},"
        f" {holdout.date}{fitted}); the intervals include {100 * holdout.usual:.1f} %, the error that"
        f" {100 * USUAL:g} % of them do not exceed."
    )


def workload(
    text: str,
    networks: Sequence[str],
    workers: Sequence[str],
    strategies: Sequence[str],
    *,
    origin: Mapping[str, Any],
    per_node: int | None = None,
    price: float | None = None,
    epoch_images: int | None = None,
    json_path: Path | None = None,
    report_path: Path | None = None,
    console: Console | None = None,
) -> None:
    """Predict a workload, print the table and write the files. Raises UsageError before the first simulation.

    ``origin`` comes from ``machine.provenance`` and becomes part of the files.
    """
    target, page = result_paths({"--json": json_path, "--report": report_path})
    asked = question(text, networks, worker_counts(workers), strategies, per_node, price, epoch_images)
    console = console or Console(stderr=STANDARD_OUTPUT in (target, page))
    found = replace(predict(asked), **origin)
    if target is not None:
        found.save(target)
    if page is not None:
        from ..report.page import prediction_page

        replace_text(page, prediction_page(found))
    console.print(render(found))
