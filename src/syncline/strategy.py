"""A strategy: the five words that say how a group of workers trains together, as a value and as text.

Owns which words exist, their defaults, how they are printed, and which combinations are possible. Does not know how
any part works: names, arguments, types and capabilities come from the registry, the syntax from ``grammar``.

    ring
    ps(servers=2) schedule=wait_free transport=tcp
    codec=feedback(topk(ratio=0.01))                 the architecture is left out: auto

``Strategy.parse(str(s)) == s`` for every strategy, and equal strategies have equal texts: arguments are completed with
their defaults when a strategy is built, and left out again when it is printed. What a part declares in the registry
and this file reads:

    goal="allreduce"        (algorithms, collectives) only these are architectures
    always_print=(names)    arguments that are printed even at their default
    wraps="name"            (codecs) the argument that takes another codec, written without its name
    examples=("a(b=1)",)    (codecs) texts that tests and tables try; by default the bare name
    one_host=True           (transports) reaches processes of one host only
    check=callable          (transports) takes the arguments and raises UsageError for values that make no sense;
                            other parts are built to find out, transports need connections for that
    allreduce=True          (transports) the library has an allreduce of its own
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from . import registry
from .codecs import Chooses, NeedsFeedback, Wraps
from .errors import NotBuiltError, StrategyError, UsageError
from .grammar import Part, nearest, read_part, read_words
from .parts import bind, build, signature, write
from .types import Group

if TYPE_CHECKING:
    from .codecs import Codec
    from .collectives import Collective
    from .plan import Plan
    from .schedules import Schedule
    from .sync import SyncMode

__all__ = ["RULES", "WORDS", "Part", "Strategy", "Word", "vocabulary"]

WORDS: Mapping[str, str] = {
    "architecture": "algorithms",
    "sync": "sync",
    "codec": "codecs",
    "schedule": "schedules",
    "transport": "transports",
}
"""The words of a strategy in the order of printing, each with the registry's kind of its parts."""

AUTO = Part("auto")
"""Chosen later: by topology when the group is known, by measuring where the schedule or architecture can be tuned."""

BSP, NONE = Part("bsp"), Part("none")

_HAS_AUTO = ("architecture", "codec", "schedule", "transport")

# fmt: off
PLANNED: Mapping[str, tuple[str, ...]] = {
    "architecture": (
        "ring", "recursive_doubling", "halving_doubling", "tree", "double_tree", "hierarchical", "direct", "ps",
        "native"
    ),
    "sync": (
        "bsp", "ssp", "asp", "local", "post_local", "easgd", "diloco", "gossip"
    ),
    "codec": (
        "none", "fp16", "bf16", "fp8", "int8", "int4", "qsgd", "natural", "ternary", "onebit", "sign", "topk",
        "threshold", "randomk", "gtopk", "powersgd", "adaptive", "feedback", "auto"
    ),
    "schedule": (
        "fifo", "wait_free", "fixed", "merged", "priority", "split", "delayed"
    ),
    "transport": (
        "shm", "tcp", "inproc", "torch", "mpi", "zmq", "grpc", "ucx"
    ),
}
# fmt: on
"""The words of the whole grammar: those that the registry does not have are refused as not built yet."""


@dataclass(frozen=True)
class Strategy:
    """Architecture, sync mode, codec, schedule and transport; raises StrategyError when they cannot be combined.

    The parts may be given as ``Part`` or, for one without arguments, by name. Building a strategy checks every name
    and argument and the combination; NotBuiltError says that a word is part of the grammar but does not exist yet.
    """

    architecture: Part = AUTO
    sync: Part = BSP
    codec: Part = NONE
    schedule: Part = AUTO
    transport: Part = AUTO

    def __post_init__(self) -> None:
        for word, part in self.parts():
            object.__setattr__(self, word, _bind_word(word, part if isinstance(part, Part) else read_part(part)))
        fault = self._fault()
        if fault is not None:
            nearest_one = self._nearest_that_works(fault)
            advice = "" if nearest_one is None else f"; the nearest that works is {str(nearest_one)!r}"
            raise StrategyError(fault[0] + advice)

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """The strategy that ``text`` describes, an empty one being ``auto``; raises StrategyError or NotBuiltError."""
        parts: dict[str, Part] = {}
        feedback = ""
        for position, (key, part) in enumerate(read_words(text)):
            word = _word(key, part, position)
            if word in parts:
                raise StrategyError(f"{word} is given twice in {text!r}")
            parts[word] = part
        if "feedback" in parts:
            feedback = _on_or_off(parts.pop("feedback"))
        if feedback == "off" and "codec" in parts and _brings_feedback(parts["codec"]):
            raise StrategyError(f"feedback=off: codec={parts['codec'].name} brings its own; leave one of them away")
        told = feedback == "on" and "codec" in parts and not _brings_feedback(parts["codec"])
        if told or (feedback != "off" and "codec" in parts and _needs_feedback(parts["codec"])):
            parts["codec"] = Part("feedback", (("", parts["codec"]),))
        return cls(**parts)

    def __str__(self) -> str:
        found = []
        for word, part in self.parts():
            shown = "auto" if part == AUTO else write(kind_of(word, part.name), part)
            if word == "architecture":
                found += [] if part == AUTO else [shown]
            elif shown != _DEFAULTS[word]:
                found.append(f"{word}={shown}")
        if _needs_feedback(self.codec):
            found.append("feedback=off")
        return " ".join(found) or "auto"

    def parts(self) -> Iterator[tuple[str, Part]]:
        """The five words with their parts, in the order of printing."""
        for word in WORDS:
            yield word, getattr(self, word)

    @property
    def servers(self) -> int:
        """How many server processes of their own the strategy needs, beside the workers."""
        if self.architecture.name != "ps" or self.architecture.arguments.get("on") == "workers":
            return 0
        return int(self.architecture["servers"])

    @property
    def server_holds_weights(self) -> bool:
        """True when servers apply the update; False when every worker does."""
        return self.architecture.name == "ps" and self.architecture.arguments.get("update") == "server"

    def resolve(self, group: Group, *, hosts: int = 1, inproc: bool = False) -> Strategy:
        """The same strategy with every ``auto`` replaced by what runs in that group when nothing is measured.

        ``group`` may leave the strategy's own servers out. ``hosts`` is the number of machines that the processes are
        on, those of one sharing memory; ``inproc`` says that the ranks are threads of one process. Where some
        processes share a host and others do not, ``transport=auto`` stays: it is shm inside hosts and tcp between
        them. Raises UsageError when the transport cannot reach all ranks, or the architecture cannot be planned for
        so many workers or servers.
        """
        group = self._with_servers(group)
        transport = self.transport
        if transport == AUTO:
            if inproc:
                transport = Part("inproc")
            elif self.architecture.name == "native":
                transport = Part("torch")
            elif hosts == 1 or hosts == group.processes:
                transport = Part("shm" if hosts == 1 else "tcp")
        elif hosts > 1 and registry.get("transports", transport.name).capabilities.get("one_host"):
            raise StrategyError(f"transport={transport.name} cannot reach other hosts; use transport=auto or tcp")
        architecture = self.architecture
        if architecture == AUTO:
            # Owners read and write their peers' memory on shm; two levels spare the links between hosts that have
            # several ranks; elsewhere a ring keeps every link evenly busy.
            architecture = Part({"shm": "direct", "auto": "hierarchical"}.get(transport.name, "ring"))
        codec = NONE if self.codec == AUTO else self.codec
        carrier = _CARRIERS.get(replace(self, codec=codec).codec_object().combine)
        if carrier is not None and architecture.name != "ps":
            architecture = Part(carrier)
        schedule = Part("fixed") if self.schedule == AUTO else self.schedule
        resolved = replace(self, architecture=architecture, codec=codec, schedule=schedule, transport=transport)
        if resolved.collective is None:
            resolved.plan(group)
        return resolved

    def _with_servers(self, group: Group) -> Group:
        if group.servers not in (0, self.servers):
            raise UsageError(
                f"the strategy {str(self)!r} needs {self.servers} server processes, the run has {group.servers}: "
                f"start it with --servers {self.servers}"
            )
        return replace(group, servers=self.servers)

    def plan(self, group: Group) -> Plan:
        """The plan of the architecture for that group, one object for all calls; UsageError while it is ``auto``."""
        architecture = self._chosen("architecture")
        if self.collective is not None:
            raise UsageError(
                f"{architecture.name} has no plan: what the library sends is its own affair; choose one of"
                f" {', '.join(_built('architecture'))} to see, or run, a plan"
            )
        return _planned(registry.get("algorithms", architecture.name).target, architecture.args, group)

    @property
    def collective(self) -> Collective | None:
        """The collective of the message library that takes the place of a plan; None where there is a plan."""
        if self.architecture.name not in registry.names("collectives"):
            return None
        found: Collective = build("collectives", self.architecture)
        return found

    @property
    def exchange(self) -> str:
        """How gradients become one average, in words; for a resolved strategy."""
        name = self.architecture.name
        if self.codec == NONE:
            return f"allreduce by {name}"
        served = name == "ps"
        owners = "servers" if served else "owners"
        again = f"payloads are added up at {owners}, encoded again and given to all"
        if self.server_holds_weights:
            again = "payloads are added up at servers, and what their update changes in the weights is encoded for all"
        words = {
            "sum": again if served else f"payloads are summed by {name}",
            "owner": again,
            "gather": again if served else "all payloads are gathered by all",
            "merge": again if served else "payloads are merged on a tree",
            "rounds": f"factors are summed by {name}",
        }
        codec = self.codec_object()
        if isinstance(codec, Chooses) and not served:
            return f"small tensors are summed by {name}; of others, {words[codec.combine]}, or {again}"
        return words[codec.combine]

    def schedule_object(self) -> Schedule:
        """The schedule that the engine reads; raises UsageError while it is ``auto``."""
        schedule: Schedule = build("schedules", self._chosen("schedule"))
        return schedule

    def sync_mode(self) -> SyncMode:
        """The rules of the sync mode."""
        mode: SyncMode = build("sync", self.sync)
        return mode

    def codec_object(self) -> Codec:
        """The codec, with those nested in it."""
        codec: Codec = build("codecs", self._chosen("codec"))
        return codec

    def _chosen(self, word: str) -> Part:
        part: Part = getattr(self, word)
        if part == AUTO:
            raise UsageError(f"the {word} of {str(self)!r} is auto: call resolve() first")
        return part

    def _fault(self) -> Fault | None:
        return next((fault for rule in RULES if (fault := rule(self)) is not None), None)

    def _nearest_that_works(self, fault: Fault) -> Strategy | None:
        """The first strategy without a fault that the remedies lead to, those with fewer changes first."""
        todo = deque((self, changes) for changes in fault[1])
        seen = {self}
        while todo:
            origin, changes = todo.popleft()
            try:
                changed = {word: _bind_word(word, part) for word, part in (dict(origin.parts()) | changes).items()}
            except UsageError:
                continue
            candidate = object.__new__(Strategy)
            for word, part in changed.items():
                object.__setattr__(candidate, word, part)
            if candidate in seen:
                continue
            seen.add(candidate)
            found = candidate._fault()
            if found is None:
                return candidate
            todo.extend((candidate, more) for more in found[1])
        return None


@lru_cache(maxsize=64)
def _planned(algorithm: Callable[..., Plan], args: tuple[tuple[str, Any], ...], group: Group) -> Plan:
    return algorithm(group, **dict(args))


@dataclass(frozen=True)
class Word:
    """One value that a word may take: ``text`` shows its arguments, ``summary`` is empty when it is not built yet."""

    word: str
    name: str
    text: str
    summary: str
    built: bool


def vocabulary() -> list[Word]:
    """Everything that a strategy may say, built or not, in the order of printing."""
    found = []
    for word in WORDS:
        if word in _HAS_AUTO:
            found.append(Word(word, "auto", "auto", _AUTO_SUMMARY[word], True))
        for name in _built(word):
            entry = registry.get(kind_of(word, name), name)
            found.append(Word(word, name, signature(entry), entry.summary, True))
        found += [Word(word, name, name, "", False) for name in PLANNED[word] if name not in _built(word)]
    return found


_AUTO_SUMMARY = {
    "architecture": "The fastest for each size of array, measured when the run starts.",
    "codec": "None, bf16, or int8 or int4 with error feedback: the fastest, measured when the run starts.",
    "schedule": "Starts as fixed.",
    "transport": "shm among the processes of one host, tcp between hosts.",
}

_CARRIERS = {"owner": "direct", "gather": "direct", "merge": "tree"}
"""What compressed gradients that no plan can sum travel by, whatever architecture was asked for; a server stays one."""

_DEFAULTS = {"sync": "bsp", "codec": "none", "schedule": "auto", "transport": "auto"}

# Rules -------------------------------------------------------------------------------------------------------------

Fault = tuple[str, list[dict[str, Part]]]
"""Why a combination is impossible, and changes that may mend it, the nearest first."""


def _native_needs_its_library(strategy: Strategy) -> Fault | None:
    if strategy.collective is None or strategy.transport == AUTO:
        return None
    if registry.get("transports", strategy.transport.name).capabilities.get("allreduce"):
        return None
    reason = f"native calls the library's own collective, and transport={strategy.transport.name} has none"
    return reason, [{"transport": Part("torch")}, {"transport": Part("mpi")}, {"architecture": AUTO}]


def _native_sends_what_it_is_given(strategy: Strategy) -> Fault | None:
    if strategy.collective is None or strategy.codec in (NONE, AUTO):
        return None
    reason = f"native hands the gradients to a library that knows nothing of codec={strategy.codec.name}"
    return reason, [{"architecture": AUTO}, {"codec": NONE}]


def _nccl_knows_collectives_only(strategy: Strategy) -> Fault | None:
    if strategy.transport.arguments.get("backend") != "nccl" or strategy.collective is not None:
        return None
    reason = "NCCL has no messages that are matched by tag, so no plan runs over it"
    return reason, [{"architecture": Part("native")}, {"transport": _with(strategy.transport, backend="gloo")}]


def _ps_needs_a_server(strategy: Strategy) -> Fault | None:
    if strategy.architecture.name != "ps" or strategy.architecture["servers"] >= 1:
        return None
    reason = f"a parameter server needs at least one server, got servers={strategy.architecture['servers']}"
    return reason, [{"architecture": _with(strategy.architecture, servers=1)}]


def _weights_follow_updates(strategy: Strategy) -> Fault | None:
    if not strategy.server_holds_weights or strategy.codec == AUTO:
        return None
    codec = strategy.codec_object()
    inner = codec.codec if isinstance(codec, Wraps) else codec
    if inner.contraction or not inner.biased:
        return None
    reason = f"codec={strategy.codec.name} does not say how large an update is, and ps(update=server) tells updates"
    return reason, [{"architecture": _with(strategy.architecture, update="worker")}, {"codec": NONE}]


def _memory_needs_feedback(strategy: Strategy) -> Fault | None:
    if strategy.codec == AUTO:
        return None
    codec = strategy.codec_object()
    if not isinstance(codec, NeedsFeedback) or not codec.needs_feedback:
        return None
    reason = f"codec={strategy.codec.name} accumulates what is not sent, which it cannot with feedback=off"
    return reason, [{"codec": Part("feedback", (("", strategy.codec),))}]


def _rounds_need_sums(strategy: Strategy) -> Fault | None:
    if strategy.architecture.name != "ps" or strategy.codec == AUTO or strategy.codec_object().combine != "rounds":
        return None
    codec = write("codecs", strategy.codec)
    reason = f"codec={codec} needs sums over the workers while it computes, which servers do not make"
    return reason, [{"architecture": AUTO}, {"codec": NONE}]


def _staleness_needs_weights_on_servers(strategy: Strategy) -> Fault | None:
    if strategy.sync.name not in ("ssp", "asp") or strategy.server_holds_weights or strategy.architecture == AUTO:
        return None
    reason = f"sync={strategy.sync.name} lets workers run ahead of each other, so servers must hold the weights"
    server = Part("ps") if strategy.architecture.name != "ps" else _with(strategy.architecture, update="server")
    return reason, [{"architecture": server}, {"sync": BSP}]


def _servers_that_sum_count_no_steps(strategy: Strategy) -> Fault | None:
    if strategy.codec == AUTO or not strategy.servers or strategy.server_holds_weights:
        return None
    codec = strategy.codec_object()
    if not isinstance(codec, Wraps) or not codec.warmup:
        return None
    reason = "servers that only sum do not know whether a resumed run still warms up"
    return reason, [
        {"architecture": _with(strategy.architecture, update="server")},
        {"codec": _with(strategy.codec, warmup=0)},
    ]


def _feedback_needs_a_contraction(strategy: Strategy) -> Fault | None:
    if strategy.codec.name != "feedback":
        return None
    inner = next(value for _, value in strategy.codec.args if isinstance(value, Part))
    if build("codecs", inner).contraction:
        return None
    reason = (
        f"error feedback around {inner.name} diverges: its error can be larger than the gradient, so that what is left"
        " for the next step grows from step to step"
    )
    return reason, [{"codec": inner}]


RULES: tuple[Callable[[Strategy], Fault | None], ...] = (
    _native_needs_its_library,
    _native_sends_what_it_is_given,
    _nccl_knows_collectives_only,
    _ps_needs_a_server,
    _weights_follow_updates,
    _memory_needs_feedback,
    _rounds_need_sums,
    _staleness_needs_weights_on_servers,
    _servers_that_sum_count_no_steps,
    _feedback_needs_a_contraction,
)
"""What cannot be combined. A rule is a function of the whole strategy; parts know nothing of each other."""


def _with(part: Part, **changes: Any) -> Part:
    return Part(part.name, tuple((part.arguments | changes).items()))


# Words -------------------------------------------------------------------------------------------------------------


def _built(word: str) -> tuple[str, ...]:
    """The registered names that the word may take."""
    kind = WORDS[word]
    if kind != "algorithms":
        return registry.names(kind)
    return tuple(
        entry.name
        for kind in ("algorithms", "collectives")
        for entry in registry.entries(kind)
        if entry.capabilities.get("goal") == "allreduce"
    )


def kind_of(word: str, name: str) -> str:
    """The registry's kind of a word's part: an architecture is an algorithm, or a collective of a library."""
    return "collectives" if word == "architecture" and name in registry.names("collectives") else WORDS[word]


def _bind_word(word: str, part: Part) -> Part:
    """The bound part of a word, or an error that says what the word may be."""
    if word in _HAS_AUTO and part.name == "auto":
        if part.args:
            raise StrategyError(f"{word}=auto takes no arguments")
        return AUTO
    _require_known(word, part)
    kind, built = kind_of(word, part.name), _built(word)
    bound = bind(kind, part)
    entry = registry.get(kind, part.name)
    if "check" in entry.capabilities:
        entry.capabilities["check"](**bound.arguments)
    elif inspect.isclass(entry.target) and kind != "transports":
        build(kind, bound)  # its __post_init__ knows the ranges
    assert part.name in built
    return bound


def _require_known(word: str, part: Part) -> None:
    """Raise NotBuiltError or StrategyError unless the part, and those nested in it, have registered names."""
    built = _built(word)
    if part.name not in built:
        if part.name in PLANNED[word]:
            raise NotBuiltError(f"{word} {part.name!r} is not built yet; built are {', '.join(built)}")
        hint = _belongs_to(part.name) or nearest(part.name, (*built, *PLANNED[word]))
        raise StrategyError(f"unknown {word} {part.name!r}{hint or '; there are ' + ', '.join(built)}")
    wraps = registry.get(kind_of(word, part.name), part.name).capabilities.get("wraps")
    for name, value in part.args:
        if wraps and name in ("", wraps):
            _require_known(word, Part(value) if isinstance(value, str) else value)


def _word(key: str, part: Part, position: int) -> str:
    """The word that a piece of text is about; raises StrategyError when there is none."""
    if key == "architecture":
        raise StrategyError(f"the architecture comes first and without a key: write {part.name!r}")
    if key in WORDS or key == "feedback":
        return key
    if key:
        raise StrategyError(f"unknown word {key!r}{nearest(key, WORDS) or '; there are ' + ', '.join(WORDS)}")
    if position > 0:
        raise StrategyError(
            f"{part.name!r} has no key{_belongs_to(part.name) or ': only the architecture, first, has none'}"
        )
    return "architecture"


def _belongs_to(name: str) -> str:
    """A remedy for a name that is known under another word."""
    for word in WORDS:
        if word != "architecture" and name in (*_built(word), *PLANNED[word]) and name != "auto":
            return f": it is a {word}, write {word}={name}"
    return ": an architecture comes first" if name in (*_built("architecture"), *PLANNED["architecture"]) else ""


def _on_or_off(part: Part) -> str:
    if part.name not in ("on", "off") or part.args:
        raise StrategyError(f"feedback must be on or off, got {part.name!r}")
    return part.name


def _brings_feedback(codec: Part) -> bool:
    """Whether a codec stands around others, and says itself which of them get error feedback."""
    return codec.name in registry.names("codecs") and "wraps" in registry.get("codecs", codec.name).capabilities


def _needs_feedback(codec: Part) -> bool:
    """Whether a codec is biased in a way that feedback mends; False for one that cannot be built: binding says why."""
    if codec.name not in registry.names("codecs"):
        return False
    try:
        built = build("codecs", codec)
        return bool(built.biased and built.contraction)
    except UsageError:
        return False
