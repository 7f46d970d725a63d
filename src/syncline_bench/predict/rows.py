"""Predictions as rows: a workload under strategies, on numbers of workers of networks, each with its interval.

Owns the question, every refusal of bad input, and the order of things. Does not know how anything is simulated
(``iterations``), varied (``vary``) or shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from syncline.errors import UsageError
from syncline.registry import names
from syncline.strategy.grammar import nearest, read_list, read_value
from syncline.strategy.strategy import Strategy
from syncline.workloads import load

from ..report.forecast_rows import Predicted, Prediction, Stated
from .asked import Asked, Question, Settled, all_asked, settled
from .cluster import Cluster
from .exchanges import Exchanges
from .holdout import Holdout, holdout_of
from .iterations import simulate
from .models import Model, model_of
from .networks import load_network
from .remarks import remarks
from .scaling import break_even, knees, winners
from .settings import Habits, Setting, codec_costs, lay_out, setting_of
from .vary import Varied

SHORT = ("alexnet", "googlenet", "resnet50")
"""Networks whose replay a bare name means."""

_MOST_COUNTS = 10_000
"""Numbers of workers that dots may stand for."""


def question(
    workload: str,
    networks: Sequence[str],
    workers: Sequence[int],
    strategies: Sequence[str],
    per_node: int | None = None,
    price: float | None = None,
    epoch_images: int | None = None,
) -> Question:
    """The question that texts ask; raises UsageError, naming the nearest, for what does not exist."""
    asked, clusters = tuple(all_asked(strategies)), tuple(load_network(text) for text in networks)
    plain = workload.strip().partition("(")[0]
    loaded = load(f"replay:{workload.strip()}" if plain in SHORT else _known(workload))
    for count in workers:
        if count > 0:
            loaded.speed.check(count)
    return Question(
        loaded.name,
        model_of(loaded),
        clusters,
        tuple(sorted(workers)),
        asked,
        per_node,
        price,
        epoch_images,
    )


def worker_counts(texts: Sequence[str]) -> list[int]:
    """The numbers of a list such as ``2,4,8,...,512``, whose dots go on as the two numbers before them.

    Raises UsageError for what is no number, and for dots that do not come to the number behind them.
    """
    items, found = read_list(texts), list[int]()
    for at, item in enumerate(items):
        if item != "...":
            found.append(read_value(item, int, "--workers"))
            continue
        if at < 2 or at + 1 == len(items):
            raise UsageError(f"--workers: dots stand between numbers, as in 2,4,8,...,512, got {','.join(items)}")
        last, (before, now) = read_value(items[at + 1], int, "--workers"), found[-2:]
        times = now // before if before > 0 and now % before == 0 and now > before else 0
        while now < last and now > before:
            before, now = now, now * times if times else 2 * now - before
            found.append(now)
            if len(found) > _MOST_COUNTS:
                raise UsageError(f"--workers: {','.join(items)} are more than {_MOST_COUNTS:,} numbers: ask for fewer")
        if found.pop() != last:
            raise UsageError(f"--workers: {','.join(items)} does not come to {last}")
    return found


def _known(workload: str) -> str:
    """A workload's text, unless it is near to a short name that is meant."""
    name = workload.partition(":")[0].partition("(")[0].strip()
    if name not in names("workloads"):
        raise UsageError(
            f"unknown workload {workload!r}{nearest(name, (*SHORT, *names('workloads'))) or '.'} There are"
            f" {', '.join(SHORT)}, replay:NETWORK and trace:FILE.csv, which `syncline record` writes"
        )
    return workload


def predict(asked: Question) -> Prediction:
    """Everything that is asked for. Simulates every row some ten to thirty times, so takes seconds for each row."""
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
    """The iteration of one worker, which exchanges nothing."""
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
        epoch_s=epoch_s,
        price=None if asked.price is None or epoch_s is None else asked.price * workers * epoch_s / 3600,
        **{name: getattr(iteration, name) for name in stages},
    )


def sent_bytes(setting: Setting, model: Model) -> float | None:
    """What a worker sends in an iteration, in the mean; None where not every step exchanges all gradients."""
    mode = setting.strategy.sync_mode()
    if setting.alone or not mode.merges or hasattr(mode, "averages"):
        return None
    buckets = lay_out(setting, model).buckets
    exchanges = Exchanges(
        setting.strategy, model.layers, buckets, setting.placement, setting.cluster, codec_costs(setting)
    )
    return sum(exchanges.sent_bytes(bucket) for bucket in buckets)


def _all_stated(clusters: Sequence[Cluster]) -> tuple[Stated, ...]:
    return tuple(
        Stated(cluster.name, name, one.value, *one.range, one.measured, one.source)
        for cluster in clusters
        for name, one in cluster.constants.items()
    )
