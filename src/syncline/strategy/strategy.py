"""A strategy: the five words that define how a group of workers trains together, as a value and as text.

This file parses and prints strategies, fills in defaults and resolves ``auto``. ``words`` has the values of a word,
``rules`` the valid combinations, ``grammar`` the syntax.

    ring
    ps(servers=2) schedule=wait_free transport=tcp
    codec=feedback(topk(ratio=0.01))                 the architecture is left out: auto

``Strategy.parse(str(s)) == s`` for every strategy, and equal strategies have equal texts, even if they were given as
presets: building a strategy completes its arguments with their defaults, and printing omits them again. A part's
registration may declare, for this file, ``words``, ``rules`` and ``parts``:

    goal="allreduce"        (algorithms, collectives) only these are architectures
    roles=callable          (algorithms) takes the arguments and returns the ``Roles`` of an architecture with owners
    two_levels="ring"       (algorithms) sums inside hosts first: with a codec, payloads travel between hosts only;
                            the name is the equivalent where every rank has a host of its own
    always_print=(names)    arguments that are printed even at their default
    wraps="name"            (codecs) the argument that takes another codec, written without its name
    examples=("a(b=1)",)    (codecs) texts for tests and tables; by default the bare name
    one_host=True           (transports) reaches processes of one host only
    check=callable          (transports) takes the arguments and raises UsageError for invalid values; other parts are
                            built for that, but building a transport needs connections
    allreduce=True          (transports) the library has an allreduce of its own
    collectives=True        (transports) the library also has a reduce-scatter and an all-gather (``HasCollectives``)
    inside="auto"           (transports) if the library only sums inside hosts, messages travel over ``transport=auto``
    inside=native           (an argument of algorithms) the library's collectives are a part of the plan
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from .. import registry
from ..codecs import Chooses
from ..compression.reducers.ways import OWNERS, way_of
from ..errors import NotBuiltError, StrategyError, UsageError
from ..nouns import Group, Seconds
from ..sync import Averages, Mixes, backup_of
from .grammar import Part, nearest, read_part, read_value, read_words, write_value
from .rules import Combination, elastic_fault_of, fault_of, nearest_that_works, with_arguments
from .words import AUTO, NONE, WORDS, belongs_to, bind_word, build, built_names, kind_of, known_sync, preset_of, write

if TYPE_CHECKING:
    from ..codecs import Codec
    from ..plans.plan import Plan
    from ..schedules import Schedule
    from ..sync import SyncMode

_DEFAULTS = {"sync": "bsp", "codec": "none", "schedule": "auto", "transport": "auto"}


@dataclass(frozen=True)
class Strategy(Combination):
    """Architecture, sync mode, codec, schedule and transport; raises StrategyError when they cannot be combined.

    A part may be given as ``Part`` or, without arguments, by name. The constructor validates every name, every argument
    and the combination.
    """

    budget_s: float = 0.0
    """Seconds for trying schedules on the live run, where the architecture is ``auto``; 0: none are tried."""

    def __post_init__(self) -> None:
        for word, part in self.parts():
            given = part if isinstance(part, Part) else read_part(part)
            if word == "architecture" and given.name == AUTO.name and given.args:
                object.__setattr__(self, "budget_s", budget_of(given))
                given = AUTO
            object.__setattr__(self, word, bind_word(word, given))
        fault = fault_of(self)
        if fault is not None:
            found = nearest_that_works(Combination(**dict(self.parts())), fault)
            words: dict[str, Any] = {} if found is None else dict(found.parts())
            advice = "" if found is None else f"; the nearest that works is {str(Strategy(**words))!r}"
            raise StrategyError(fault[0] + advice)
        if self.budget_s:
            check_live(self)

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Parse a strategy; an empty text is ``auto``. Raises StrategyError.

        The name of a preset gives the strategy that it stands for.
        """
        words = read_words(text)
        preset = preset_of(words)
        if preset is not None:
            words = read_words(preset.text)
        parts: dict[str, Any] = {}
        feedback = ""
        for position, (key, part) in enumerate(words):
            word = _word(key, part, position)
            if word in parts:
                raise StrategyError(f"{word} is given twice in {text!r}")
            parts[word] = part
        if "feedback" in parts:
            feedback = _on_or_off(parts.pop("feedback"))
        if feedback == "off" and "codec" in parts and _brings_feedback(parts["codec"]):
            raise StrategyError(
                f"feedback=off: codec={parts['codec'].name} has its own error feedback; leave one of them out"
            )
        told = feedback == "on" and "codec" in parts and not _brings_feedback(parts["codec"])
        if told or (feedback != "off" and "codec" in parts and _needs_feedback(parts["codec"])):
            parts["codec"] = Part("feedback", (("", parts["codec"]),))
        return cls(**parts)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        found = []
        for word, part in self.parts():
            shown = "auto" if part == AUTO else write(kind_of(word, part.name), part)
            if word == "architecture":
                found += [] if part == AUTO else [shown]
                found += (
                    [f"auto(budget={write_value(self.budget_s, Seconds)})"]
                    if self.architecture == AUTO and self.budget_s
                    else []
                )
            elif shown != _DEFAULTS[word]:
                found.append(f"{word}={shown}")
        if _needs_feedback(self.codec):
            found.append("feedback=off")
        return " ".join(found) or "auto"

    def resolve(self, group: Group, *, hosts: int = 1, inproc: bool = False, planned: bool = True) -> Strategy:
        """The same strategy with every ``auto`` replaced by the default for that group, without measurements.

        ``group`` may omit the strategy's own servers. ``hosts`` is the number of machines; processes of one share
        memory. ``inproc`` means that the ranks are threads of one process. ``transport=auto`` stays if some processes
        share a host and others do not: it is shm inside hosts and tcp between them. If hosts sum before a codec
        compresses, the codec is dropped on a single host from which nothing is sent; an architecture of two levels
        becomes one of one level for the codec if no host has several ranks. Raises UsageError if the transport cannot
        reach all ranks, or the architecture has no plan for so many workers or servers; unless ``planned``, no plan is
        made and the last is not checked.
        """
        group = self._with_servers(group)
        if group.workers <= (backup := backup_of(self.sync_mode())):
            raise UsageError(
                f"sync={write('sync', self.sync)} does not wait for {backup} of {group.workers} workers, so it waits"
                " for none: use fewer backup workers, or sync=asp"
            )
        transport = self.transport
        if transport == AUTO:
            if inproc:
                transport = Part("inproc")
            elif self.collective is not None or self.native_inside:
                transport = Part("torch")
            elif hosts == 1 or hosts == group.processes:
                transport = Part("shm" if hosts == 1 else "tcp")
        elif hosts > 1 and registry.get("transports", transport.name).capabilities.get("one_host"):
            raise StrategyError(f"transport={transport.name} cannot reach other hosts; use transport=auto or tcp")
        architecture = self.architecture
        if architecture == AUTO:
            # Owners read and write their peers' memory on shm. Two levels reduce the traffic between hosts with several
            # ranks, also with a codec (docs/concepts/codecs.md). Elsewhere a ring keeps every link evenly busy.
            architecture = Part({"shm": "direct", "auto": "hierarchical"}.get(transport.name, "ring"))
        codec = NONE if self.codec == AUTO else self.codec
        carrier = way_of(replace(self, codec=codec).codec_object()).carrier
        places = len(group.members_by_node()) if group.nodes else hosts
        flat = _one_level(architecture) if codec != NONE else None
        pushes = self.servers > 0 and self.server_holds_weights  # also from a single host
        if places == 1 < group.workers and (flat is not None or (self._hosts_push and not pushes)):
            codec = NONE  # nothing is compressed inside a host
        elif flat is None or places >= group.workers:
            if flat is not None:  # its messages carry tags, which NCCL lacks
                transport = replace(self, transport=transport).by_messages().transport
            architecture = Part(carrier) if carrier and self.roles is None else flat or architecture
        schedule = Part("fixed") if self.schedule == AUTO else self.schedule
        resolved = replace(self, architecture=architecture, codec=codec, schedule=schedule, transport=transport)
        if planned and resolved.collective is None:
            resolved.plan(group)
        return resolved

    def with_owners_among(self, workers: int, servers: int = 0) -> Strategy:
        """The same strategy with at most as many owners as workers, or as ``servers`` if these are the owners.

        Raises StrategyError if no argument of the architecture is the number of owners.
        """
        roles, architecture = self.roles, self.architecture
        most = servers if roles is not None and roles.apart else workers
        if roles is None or roles.owners <= most:
            return self
        for name, value in architecture.args:
            if type(value) is int and value == roles.owners:
                fewer = replace(self, architecture=with_arguments(architecture, **{name: most}))
                if fewer.roles is not None and fewer.roles.owners == most:
                    return fewer
        raise StrategyError(f"{self} needs {roles.owners} owners, but {most} are left: start with fewer owners")

    def _with_servers(self, group: Group) -> Group:
        if group.servers not in (0, self.servers):
            raise UsageError(
                f"the strategy {str(self)!r} needs {self.servers} server processes, but the run has {group.servers}:"
                f" start it with --servers {self.servers}"
            )
        return replace(group, servers=self.servers)

    def plan(self, group: Group) -> Plan:
        """The plan of the architecture for that group, cached. UsageError while the architecture is ``auto``."""
        architecture = self._chosen("architecture")
        if self.collective is not None:
            raise UsageError(
                f"{architecture.name} has no plan: the message library decides what it sends; to see or run a plan,"
                f" choose one of {', '.join(built_names('architecture'))}"
            )
        return _planned(registry.get("algorithms", architecture.name).target, architecture.args, group)

    @property
    def library(self) -> str:
        """The message library whose own collectives the strategy uses, if it uses any."""
        return str(self.transport.arguments.get("backend", self.transport.name))

    @property
    def _by_library(self) -> str:
        return f" by {self.library}" if self.native_inside else ""

    def by_messages(self) -> Strategy:
        """The strategy without collectives of the message library inside hosts, for groups that the library lacks."""
        if not self.native_inside:
            return self
        plain = with_arguments(self.architecture, inside="ring")
        nccl = self.transport.arguments.get("backend") == "nccl"  # whose messages travel over Gloo
        carrier = with_arguments(self.transport, backend="gloo") if nccl else self.transport
        return replace(self, architecture=plain, transport=carrier)

    def hosts(self, group: Group) -> tuple[tuple[int, ...], ...]:
        """The workers of each host if hosts sum before a codec compresses; empty if every worker compresses."""
        nodes = group.members_by_node()
        if self.codec == NONE or not self._sums_inside or len(nodes) == group.workers:
            return ()
        return nodes if len(nodes) > 1 or self._hosts_push else ()

    @property
    def _hosts_push(self) -> bool:
        """Whether the workers of a host make one push to owners."""
        return self.roles is not None and self.roles.local

    @property
    def _sums_inside(self) -> bool:
        """Whether gradients are summed inside hosts before a codec compresses them."""
        return self._hosts_push or _one_level(self.architecture) is not None

    def halves(self, group: Group) -> tuple[Plan, Plan]:
        """The plans of push and pull if servers hold the weights. UsageError if the architecture has no owners."""
        roles = self.roles
        if roles is None:
            raise UsageError(f"{self.architecture.name} has no servers for push and pull")
        push, pull = roles.halves(group)
        for half in (push, pull):
            if tuple(dict.fromkeys(half.owners)) != roles.places(group):
                raise UsageError(
                    f"{half.name} leaves its parts with {half.owners}, but the roles of {self.architecture.name}"
                    f" declare {roles.places(group)}: let the algorithm declare the owners of its plans"
                )
        return push, pull

    @cached_property
    def exchange(self) -> str:
        """A description of how gradients, or differences of weights, are averaged. The strategy must be resolved."""
        mode = self.sync_mode()
        if isinstance(mode, Mixes):
            return "every worker averages its weights with those of a few others"
        if isinstance(mode, Averages):
            return f"differences from the last agreed weights: {self._exchange}"
        return self._exchange

    @property
    def _exchange(self) -> str:
        name = self.architecture.name
        if not self.sync_mode().merges:
            if self.codec == NONE:
                return (
                    "each worker sends its gradients separately to owners of the weights, and gets their weights back"
                )
            what = "and gets the updates that it lacks, encoded, or the weights if these are smaller"
            return f"each worker sends its payloads separately to owners of the weights, {what}"
        if self.codec == NONE:
            return f"allreduce by {name}" + (f", inside hosts{self._by_library}" if self.native_inside else "")
        summed = f"gradients are summed uncompressed inside hosts{self._by_library}; between hosts "
        inside = summed if self._sums_inside else ""
        if self.server_holds_weights:
            return f"{inside}servers add up payloads, update the weights, and send the encoded change to all workers"
        if self.roles is not None:
            return inside + OWNERS.words.format(owners="servers")
        codec = self.codec_object()
        if inside:
            name = "owners of their parts"
        words = way_of(codec).words.format(architecture=name, owners="owners")
        if isinstance(codec, Chooses):
            words = (
                f"small tensors are summed by {name}; for the others, {words}, or"
                f" {OWNERS.words.format(owners='owners')}"
            )
        return inside + words

    def schedule_object(self) -> Schedule:
        """The schedule object. UsageError while the schedule is ``auto``."""
        schedule: Schedule = build("schedules", self._chosen("schedule"))
        return schedule

    def sync_mode(self) -> SyncMode:
        """The sync mode object."""
        mode: SyncMode = build("sync", self.sync)
        return mode

    def codec_object(self) -> Codec:
        """The codec object, with nested codecs."""
        codec: Codec = build("codecs", self._chosen("codec"))
        return codec

    def _chosen(self, word: str) -> Part:
        part: Part = getattr(self, word)
        if part == AUTO:
            raise UsageError(f"the {word} of {str(self)!r} is auto: call resolve() first")
        return part


def _one_level(architecture: Part) -> Part | None:
    """The one-level equivalent of an architecture of two levels; None for others."""
    if architecture.name not in registry.names("algorithms"):
        return None
    name = registry.get("algorithms", architecture.name).capabilities.get("two_levels")
    return None if name is None else Part(name)


@lru_cache(maxsize=64)
def _planned(algorithm: Callable[..., Plan], args: tuple[tuple[str, Any], ...], group: Group) -> Plan:
    return algorithm(group, **dict(args))


def _word(key: str, part: Part, position: int) -> str:
    """The word that a piece of text belongs to. Raises StrategyError if there is none."""
    if key == "architecture":
        raise StrategyError(f"the architecture comes first and without a key: write {part.name!r}")
    if key in WORDS or key == "feedback":
        return key
    if key:
        raise StrategyError(f"unknown word {key!r}{nearest(key, WORDS) or '; there are ' + ', '.join(WORDS)}")
    if position > 0:
        raise StrategyError(
            f"{part.name!r} has no key{belongs_to(part.name) or ': only the architecture, which comes first, has none'}"
        )
    return "architecture"


def _on_or_off(part: Part) -> str:
    if part.name not in ("on", "off") or part.args:
        raise StrategyError(f"feedback must be on or off, got {part.name!r}")
    return part.name


def _brings_feedback(codec: Part) -> bool:
    """Whether a codec wraps others and decides itself which of them get error feedback."""
    return codec.name in registry.names("codecs") and "wraps" in registry.get("codecs", codec.name).capabilities


def _needs_feedback(codec: Part) -> bool:
    """Whether a codec has a bias that feedback corrects. False if it cannot be built; binding reports the reason."""
    if codec.name not in registry.names("codecs"):
        return False
    try:
        built = build("codecs", codec)
        return bool(built.biased and built.contraction)
    except UsageError:
        return False


# ``auto(budget=60s)`` tries schedules on the live run for that time. It tries only settings that leave the weights
# equal bit for bit: other schedules, bucket sizes and slice sizes, with architectures that add in the same order at
# every position (``plans.check``). With the rest of the strategy, a schedule must change only time.

SAME_BITS = "halving_doubling"
"""The bytes of a ring, with one order of additions for all chunks."""


def budget_of(part: Part) -> float:
    """The seconds of ``auto(budget=...)``. Raises StrategyError for other arguments and for none at all."""
    for name, value in part.args:
        if name != "budget":
            hint = nearest(name, ["budget"]) if name else ""
            raise StrategyError(f"architecture=auto takes budget, as in auto(budget=60s), not {name or value!r}{hint}")
    if len(part.args) > 1:
        raise StrategyError("an argument of auto is given twice")
    value = part.args[0][1]
    seconds = float(read_value(value, Seconds, "budget of auto")) if isinstance(value, str) else float(value)
    if not seconds > 0:
        raise StrategyError(
            "the budget of auto must be more than 0 seconds, such as 60s; leave it out to try no schedules"
        )
    return seconds


def check_live(strategy: Strategy) -> None:
    """Raise StrategyError, with a remedy, for words with which a schedule could change more than time."""
    text = f"syncline tune --strategy {str(strategy).partition(')')[2].strip()!r}"
    if strategy.architecture != AUTO:
        return
    for word, plain, why in (
        ("sync", known_sync(strategy), "workers must meet in every step"),
        ("codec", strategy.codec == NONE, "gradients must travel uncompressed"),
    ):
        if not plain:
            part = getattr(strategy, word)
            shown = part.name if part == AUTO else write({"sync": "sync", "codec": "codecs"}[word], part)
            raise StrategyError(
                f"auto(budget=) tries only settings that leave the weights equal bit for bit: {why}, but the strategy"
                f" has {word}={shown}. Leave the budget out, or search beforehand with {text}"
            )


def check_asked(strategy: Strategy) -> None:
    """Raise StrategyError if the user gives both a budget and a schedule, although a running strategy has both."""
    if strategy.budget_s and strategy.architecture == AUTO and strategy.schedule != AUTO:
        raise StrategyError(
            f"auto(budget=) tries schedules, but the strategy has schedule={write('schedules', strategy.schedule)}:"
            " leave one of them out"
        )


def check_elastic(strategy: Strategy, least: int) -> None:
    """Raise NotBuiltError, with a strategy that works, if workers can be lost, or join, and this one cannot go on.

    UsageError if ``least`` workers are too few for it. The strategy may have words that are still ``auto``.
    """
    fault = elastic_fault_of(strategy)
    if fault is None:
        if least <= (backup := backup_of(strategy.sync_mode())):
            raise UsageError(
                f"--elastic {least} lets the run go on with {least} of its workers, but {str(strategy)!r} waits for all"
                f" but {backup}: begin --elastic with {backup + 1}, or use fewer backup workers"
            )
        return
    judge = lambda given: fault_of(given) or elastic_fault_of(given)  # noqa: E731
    found = nearest_that_works(Combination(**dict(strategy.parts())), fault, judge)
    words: dict[str, Any] = {} if found is None else dict(found.parts())
    raise NotBuiltError(
        f"an elastic run works {fault[0]}, not with {str(strategy)!r}: use {str(Strategy(**words))!r}; or leave"
        " --elastic out"
    )
