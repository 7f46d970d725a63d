"""What is asked to be predicted: the strategies, presets and peers of a list, and how they become what runs there.

Owns the reading of such texts and the choices that a run makes by measuring, which are made here by simulation.
``schedule=auto`` takes, of the candidates of ``tuning.schedule_choice``, the simplest that is as fast as the best but
for its margin; ``architecture=auto`` the fastest allreduce of those that ``tuning`` measures, one for all sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from syncline.errors import StrategyError, UsageError
from syncline.strategy.grammar import Part, nearest, read_part, read_words
from syncline.strategy.parts import write
from syncline.strategy.presets import preset_of
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import AUTO
from syncline.sync import Averages, exchanges_gradients
from syncline.tuning import candidates as algorithms
from syncline.tuning import codec_choice, schedule_choice
from syncline.tuning import is_wanted as algorithm_is_wanted

from .cluster import Cluster
from .collectives import check_plan
from .iterations import simulate
from .models import Model
from .settings import OURS, Habits, Iteration, Setting, lay_out, setting_of

_PEERS: Mapping[str, Mapping[str, str]] = {"ddp": {"bucket": "25MiB", "hook": "none", "codec": "none"}}


@dataclass(frozen=True)
class Asked:
    """A strategy under the name that it was asked for with; ``note`` says what is assumed of it."""

    name: str
    strategy: Strategy
    note: str = ""
    habits: Habits = field(default=OURS)


@dataclass(frozen=True)
class Question:
    """What is to be predicted, checked.

    ``price`` is of one worker for an hour, ``epoch_images`` what an epoch has. Raises UsageError for numbers that make
    no sense.
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
            raise UsageError(f"--workers takes numbers that differ, got {', '.join(map(str, self.workers))}")
        if self.per_node is not None and self.per_node < 1:
            raise UsageError(f"--per-node has to be 1 or more, got {self.per_node}")
        if self.price is not None and not self.price >= 0:
            raise UsageError(f"--price is of a worker for an hour and not negative, got {self.price:g}")
        if self.price is not None and self.epoch_images is None:
            raise UsageError(
                "--price is of an epoch, and the workload's layers do not say how many images one has: give"
                " --epoch-images, such as --epoch-images 1281167 for ImageNet"
            )
        if self.epoch_images is not None and self.epoch_images < 1:
            raise UsageError(f"--epoch-images has to be 1 or more, got {self.epoch_images}")
        names = [cluster.name for cluster in self.clusters]
        if len(set(names)) < len(names) or not names:
            raise UsageError(f"--network takes networks that differ, got {', '.join(names) or 'none'}")


@dataclass(frozen=True)
class Settled:
    """What runs, the iteration that it makes, and what was chosen for it, in words."""

    setting: Setting
    iteration: Iteration
    chosen: str = ""


def asked_of(text: str) -> Asked:
    """The strategy, preset or peer of a text; raises UsageError, with the nearest, for one that does not exist."""
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
            f"{text!r} cannot be predicted: what {strategy.architecture.name} sends is its library's own affair; ask"
            " for ring, or another algorithm that has a plan"
        )
    _check_answerable(text, strategy)
    return Asked(text.strip(), strategy) if preset is None else Asked(preset.name, strategy, preset.note)


def _check_answerable(text: str, strategy: Strategy) -> None:
    """Raise UsageError, with what to ask for, for words that a prediction cannot take into account."""
    if strategy.codec == AUTO:
        raise UsageError(
            f"{text!r} cannot be predicted: a run measures which codec is fastest, and a network seldom says what all"
            f" of them cost; ask for each by its name: {', '.join(f'codec={name}' for name in codec_choice.CANDIDATES)}"
        )
    limited = [name for name in ("rate", "delay") if strategy.transport.arguments.get(name)]
    if limited:
        raise UsageError(
            f"{text!r} cannot be predicted: {limited[0]} of transport={strategy.transport.name} would make the network"
            " slower than it says; leave it out, and ask on a network that is so slow, such as alpha=45us,rate=10Mbit"
        )
    mode = strategy.sync_mode()
    if isinstance(mode, Averages) and exchanges_gradients(mode):
        raise UsageError(
            f"{text!r} cannot be predicted: under sync={strategy.sync.name} the first steps exchange gradients and"
            " later ones average weights, so no iteration stands for all; ask for each phase: sync=bsp and, for the"
            f" second, sync=local(steps={strategy.sync.arguments.get('steps', 'N')})"
        )


def all_asked(texts: Sequence[str]) -> list[Asked]:
    """Those of a list; raises UsageError for none, and for one that is listed twice."""
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
    """DistributedDataParallel, as far as a strategy stands for it."""
    given = {name: str(value) for name, value in part.args}
    known = _PEERS[part.name]
    if unknown := [name for name in given if name not in known]:
        raise UsageError(
            f"{part.name} has no argument {unknown[0]!r}{nearest(unknown[0], known)}: there are {', '.join(known)}"
        )
    words = {**known, **given}
    hook = words["hook"]
    codec = {"none": f" codec={words['codec']}", "powersgd": " codec=powersgd(rank=1)"}.get(
        hook, f" codec={hook} feedback=off"
    )
    strategy = Strategy.parse(f"ring schedule=fixed(bucket={words['bucket']}){codec}")
    _check_answerable(part.name, strategy)
    arguments = ", ".join(f"{name}={value}" for name, value in given.items() if value != known[name])
    note = f"assumed to be {str(strategy)!r}, with what a message costs here; Gloo's own costs are not known"
    return Asked(f"{part.name}({arguments})" if arguments else part.name, strategy, note, Habits(tickets=False))


def settled(asked: Asked, cluster: Cluster, workers: int, per_host: int | None, model: Model) -> Settled:
    """What a strategy becomes there; raises UsageError, which names it, where it cannot run so."""
    try:
        check_plan(asked.strategy, cluster, workers, per_host)
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
    names = algorithms(setting.strategy, setting.placement.group)
    fastest = setting, simulate(setting, model, asked.habits).iteration_s
    for name in names:
        one = replace(setting, strategy=replace(setting.strategy, architecture=Part(name)))
        if one.strategy != setting.strategy:
            seconds = simulate(one, model, asked.habits).iteration_s
            fastest = min(fastest, (one, seconds), key=lambda pair: pair[1])
    return fastest[0]


def _with_schedule(asked: Asked, setting: Setting, model: Model) -> Settled:
    open_one = replace(setting.strategy, schedule=AUTO)
    found = []
    for strategy in schedule_choice.candidates(open_one, crossing=True):
        one = replace(setting, strategy=strategy)
        try:
            lay_out(one, model)
        except UsageError:
            continue  # a schedule that cannot lay this model out is none of those that may be chosen
        iteration = simulate(one, model, asked.habits)
        beyond = schedule_choice.CROSSING_COST * (strategy.schedule_object().apply != "step")
        found.append((Settled(one, iteration), iteration.iteration_s * (1 + beyond)))
    if not found:
        raise UsageError("no schedule that might be chosen can lay out this model")
    enough_s = min(seconds for _, seconds in found) * (1 + schedule_choice.MARGIN)
    return next(one for one, seconds in found if seconds <= enough_s)
