"""The question of a prediction: its strategies, presets and peers, checked and resolved for a network.

Owns the parsing, the error texts, and the choices that a run makes by measuring; here, simulations replace the
measurements. ``schedule=auto`` becomes the simplest candidate of ``tuning.schedule_choice`` whose time is within its
margin of the best. ``architecture=auto`` becomes the fastest of the allreduce algorithms that a run measures, the same
for all sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from syncline.costs.cluster import Cluster
from syncline.errors import StrategyError, UsageError
from syncline.registry import entries, names
from syncline.strategy.grammar import Part, nearest, read_list, read_part, read_value, read_words
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import AUTO, preset_of, write
from syncline.sync import Averages, exchanges_gradients
from syncline.tuning import codec_choice, schedule_choice
from syncline.tuning.algorithm_choice import candidates as algorithms
from syncline.tuning.algorithm_choice import is_wanted as algorithm_is_wanted

from ..workloads import load
from ..workloads.replay import NETWORKS
from .iterations import simulate
from .networks import load_network
from .settings import OURS, Habits, Iteration, Model, Setting, lay_out, model_of, setting_of

_PEERS: Mapping[str, Mapping[str, str]] = {"ddp": {"bucket": "25MiB", "hook": "none", "codec": "none"}}


@dataclass(frozen=True)
class Asked:
    """A strategy under the user's name for it; ``note`` has the assumptions of a preset or peer."""

    name: str
    strategy: Strategy
    note: str = ""
    habits: Habits = field(default=OURS)


@dataclass(frozen=True)
class Question:
    """The checked question of a prediction.

    ``price`` is the price of a worker per hour, ``epoch_images`` the number of images per epoch. Raises UsageError for
    numbers out of range.
    """

    workload: str
    model: Model
    clusters: tuple[Cluster, ...]
    workers: tuple[int, ...]
    asked: tuple[Asked, ...]
    per_node: int | None = None
    price: float | None = None
    epoch_images: int | None = None

    def __post_init__(self) -> None:
        for count in self.workers:
            if count < 1:
                raise UsageError(f"--workers has to be 1 or more, got {count}")
        if not self.workers:
            raise UsageError("--workers is missing: predict --workload googlenet --network 10gbe --workers 2,4,8")
        if len(set(self.workers)) < len(self.workers):
            raise UsageError(f"--workers takes different numbers, got {', '.join(map(str, self.workers))}")
        if self.per_node is not None and self.per_node < 1:
            raise UsageError(f"--per-node has to be 1 or more, got {self.per_node}")
        if self.price is not None and not self.price >= 0:
            raise UsageError(f"--price, the price of a worker per hour, must be 0 or more, got {self.price:g}")
        if self.price is not None and self.epoch_images is None:
            raise UsageError(
                "--price gives the price of an epoch, whose number of images is unknown: give --epoch-images too, such"
                " as --epoch-images 1281167 for ImageNet"
            )
        if self.epoch_images is not None and self.epoch_images < 1:
            raise UsageError(f"--epoch-images has to be 1 or more, got {self.epoch_images}")
        names = [cluster.name for cluster in self.clusters]
        if len(set(names)) < len(names) or not names:
            raise UsageError(f"--network takes different networks, got {', '.join(names) or 'none'}")


@dataclass(frozen=True)
class Settled:
    """A resolved strategy, its simulated iteration, and a text on the choices made by simulation."""

    setting: Setting
    iteration: Iteration
    chosen: str = ""


def asked_of(text: str) -> Asked:
    """Parse a strategy, preset or peer. Raises UsageError, with the nearest name, for an unknown one."""
    words = read_words(text)
    if words and not words[0][0] and words[0][1].name in _PEERS:
        return _peer(read_part(text))
    preset = preset_of(words)
    try:
        strategy = Strategy.parse(text)
    except StrategyError as error:
        near = "" if "did you mean" in str(error) else nearest(text.partition("(")[0], _PEERS)
        raise StrategyError(f"{error}{near}") from None
    if strategy.collective is not None:
        raise UsageError(
            f"{text!r} cannot be predicted: the library of {strategy.architecture.name} chooses its messages itself;"
            " use ring, or another algorithm that has a plan"
        )
    _check_answerable(text, strategy)
    return Asked(text.strip(), strategy) if preset is None else Asked(preset.name, strategy, preset.note)


def _check_answerable(text: str, strategy: Strategy) -> None:
    """Raise UsageError, with an alternative, for words that a prediction cannot take into account."""
    if strategy.codec == AUTO:
        raise UsageError(
            f"{text!r} cannot be predicted: a run measures which codec is fastest, and few networks have the constants"
            f" of all codecs; name one: {', '.join(f'codec={name}' for name in codec_choice.CANDIDATES)}"
        )
    limited = [name for name in ("rate", "delay") if strategy.transport.arguments.get(name)]
    if limited:
        raise UsageError(
            f"{text!r} cannot be predicted: {limited[0]} of transport={strategy.transport.name} would make the network"
            " slower than its constants; leave it out, and give a slower network, such as alpha=45us,rate=10Mbit"
        )
    mode = strategy.sync_mode()
    if isinstance(mode, Averages) and exchanges_gradients(mode):
        raise UsageError(
            f"{text!r} cannot be predicted: under sync={strategy.sync.name} the first steps exchange gradients and"
            " later ones average weights, so the iterations differ; predict each phase: sync=bsp for the first, and"
            f" sync=local(steps={strategy.sync.arguments.get('steps', 'N')}) for the second"
        )


def all_asked(texts: Sequence[str]) -> list[Asked]:
    """Parse a list of strategies. Raises UsageError for an empty list and for duplicates."""
    found: dict[str, Asked] = {}
    for text in texts:
        one = asked_of(text)
        if one.name in found:
            raise UsageError(f"the strategy {one.name} is listed twice: leave one of them out")
        found[one.name] = one
    if not found:
        raise UsageError("no strategy to predict: name one, such as ring")
    return list(found.values())


def _peer(part: Part) -> Asked:
    """DistributedDataParallel as the nearest strategy. Raises UsageError for an unknown argument."""
    given = {name: str(value) for name, value in part.args}
    known = _PEERS[part.name]
    if unknown := [name for name in given if name not in known]:
        raise UsageError(
            f"{part.name} has no argument {unknown[0]!r}{nearest(unknown[0], known)}: its arguments are"
            f" {', '.join(known)}"
        )
    words = {**known, **given}
    hook = words["hook"]
    codec = {"none": f" codec={words['codec']}", "powersgd": " codec=powersgd(rank=1)"}.get(
        hook, f" codec={hook} feedback=off"
    )
    strategy = Strategy.parse(f"ring schedule=fixed(bucket={words['bucket']}){codec}")
    _check_answerable(part.name, strategy)
    arguments = ", ".join(f"{name}={value}" for name, value in given.items() if value != known[name])
    note = f"assumed to be {str(strategy)!r}, with Syncline's cost of a message; Gloo's own costs are unknown"
    return Asked(f"{part.name}({arguments})" if arguments else part.name, strategy, note, Habits(tickets=False))


def settled(asked: Asked, cluster: Cluster, workers: int, per_host: int | None, model: Model) -> Settled:
    """Resolve a strategy for a cluster and simulate it. If the strategy cannot run there, the UsageError names it."""
    try:
        first = setting_of(asked.strategy, cluster, workers, per_host)
        chosen: list[str] = []
        if algorithm_is_wanted(asked.strategy, first.strategy, workers):
            first = _with_algorithm(asked, first, model)
            chosen.append(f"{write('algorithms', first.strategy.architecture)}, by simulation")
        if schedule_choice.is_wanted(asked.strategy, workers):
            found = _with_schedule(asked, first, model)
            chosen.append(f"schedule={write('schedules', found.setting.strategy.schedule)}, by simulation")
        else:
            found = Settled(first, simulate(first, model, asked.habits))
    except UsageError as error:
        raise UsageError(f"{asked.name} on {workers} workers: {error}") from None
    return replace(found, chosen="; ".join(chosen))


def _with_algorithm(asked: Asked, setting: Setting, model: Model) -> Setting:
    fastest = setting, simulate(setting, model, asked.habits).iteration_s
    for one in _with_other_algorithms(setting):
        seconds = simulate(one, model, asked.habits).iteration_s
        fastest = min(fastest, (one, seconds), key=lambda pair: pair[1])
    return fastest[0]


def _with_other_algorithms(setting: Setting) -> list[Setting]:
    """The setting with each candidate of a run; if no plan fits, with each algorithm that has a formula or a plan."""
    if setting.formula is None:
        candidates = list(algorithms(setting.strategy, setting.placement.group))
    else:
        every = entries("algorithms")
        candidates = [one.name for one in every if one.capabilities.get("goal") == "allreduce" and not one.parameters]
    found = []
    for name in candidates:
        one = replace(setting, strategy=replace(setting.strategy, architecture=Part(name)))
        if one.strategy != setting.strategy and (setting.formula is None or one.is_known):
            found.append(one)
    return found


def _with_schedule(asked: Asked, setting: Setting, model: Model) -> Settled:
    open_one = replace(setting.strategy, schedule=AUTO)
    found = []
    for strategy in schedule_choice.candidates(open_one, overlap=True):
        one = replace(setting, strategy=strategy)
        try:
            lay_out(one, model)
        except UsageError:
            continue  # a schedule that cannot lay out this model is not a candidate
        iteration = simulate(one, model, asked.habits)
        found.append((Settled(one, iteration), schedule_choice.with_overlap_s(strategy, iteration.iteration_s)))
    if not found:
        raise UsageError("schedule=auto has no candidate that can lay out this model: name a schedule")
    enough_s = min(seconds for _, seconds in found) * (1 + schedule_choice.MARGIN)
    return next(one for one, seconds in found if seconds <= enough_s)


_MOST_COUNTS = 10_000
"""The most numbers that ``...`` may expand to."""


def question(
    workload: str,
    networks: Sequence[str],
    workers: Sequence[int],
    strategies: Sequence[str],
    per_node: int | None = None,
    price: float | None = None,
    epoch_images: int | None = None,
) -> Question:
    """Parse the question. Raises UsageError, with the nearest name, for an unknown workload, strategy or network."""
    asked, clusters = tuple(all_asked(strategies)), tuple(load_network(text) for text in networks)
    plain = workload.strip().partition("(")[0]
    loaded = load(f"replay:{workload.strip()}" if plain in NETWORKS else _known(workload))
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
    """The numbers of a list such as ``2,4,8,...,512``; ``...`` continues the two numbers before it.

    Raises UsageError for a text that is not a number, and if the continuation misses the number after ``...``.
    """
    items, found = read_list(texts), list[int]()
    for at, item in enumerate(items):
        if item != "...":
            found.append(read_value(item, int, "--workers"))
            continue
        if at < 2 or at + 1 == len(items):
            raise UsageError(
                f"--workers: '...' needs two numbers before it and one after it, as in 2,4,8,...,512, got"
                f" {','.join(items)}"
            )
        last, (before, now) = read_value(items[at + 1], int, "--workers"), found[-2:]
        times = now // before if before > 0 and now % before == 0 and now > before else 0
        while now < last and now > before:
            before, now = now, now * times if times else 2 * now - before
            found.append(now)
            if len(found) > _MOST_COUNTS:
                raise UsageError(f"--workers: {','.join(items)} are more than {_MOST_COUNTS:,} numbers: use fewer")
        if found.pop() != last:
            raise UsageError(f"--workers: {','.join(items)} does not reach {last}: change it, or write all numbers")
    return found


def _known(workload: str) -> str:
    """The workload's text. Raises UsageError, with the nearest name, for an unknown workload."""
    name = workload.partition(":")[0].partition("(")[0].strip()
    if name not in names("workloads"):
        raise UsageError(
            f"unknown workload {workload!r}{nearest(name, (*NETWORKS, *names('workloads'))) or '.'} There are"
            f" {', '.join(NETWORKS)}, replay:NETWORK and trace:FILE.csv, which `syncline record` writes"
        )
    return workload
